"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``.

A text is written without quotes, anything else as JSON. The tool's schema says which of the two a value is.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from rosebatch.text.tool_calls import lark
from rosebatch.text.tool_calls.call import Offered, Parsed, Schema, Terminal, ToolCall
from rosebatch.text.tool_calls.hermes import CLOSE, OPEN, parse_between

_FUNCTION = re.compile(r"<function=([^>\s]+)>\s*(.*?)\s*</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_KEY = re.compile(r"[^<>\s]+")
_VALUE_END = "\n</parameter>"
# No value has an end mark in it.
_UNBROKEN = r"~/(?s:.)*<\/parameter>(?s:.)+/ & ~/(?s:.)*<\/function>(?s:.)*/"

_ANNOTATIONS = {"$id", "$schema", "default", "deprecated", "description", "examples", "title"}
_DEFINITIONS = {"$defs", "definitions"}
# Keywords whose meaning a grammar of parameters can keep, and one of a text without quotes.
_OF_OBJECTS = _ANNOTATIONS | _DEFINITIONS | {"additionalProperties", "properties", "required", "type"}
_OF_TEXTS = _ANNOTATIONS | {"const", "enum", "maxLength", "minLength", "type"}

_KINDS: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
# As Python writes them, and so the model at times.
_WORDS = {"true": ("boolean", True), "false": ("boolean", False), "none": ("null", None)}


class _Object(msgspec.Struct):
    properties: dict[str, Any] = {}
    required: list[str] = []


class _Text(msgspec.Struct):
    minLength: int = 0  # noqa: N815
    maxLength: int | None = None  # noqa: N815


class Qwen3Coder:
    """See ``rosebatch.text.tool_calls.call.ToolCallFormat``."""

    marks: tuple[str, ...] = (OPEN, CLOSE)
    opening: str | None = OPEN

    def parse(self, text: str, tools: Mapping[str, Schema]) -> Parsed:
        """See ``ToolCallFormat``. A value without a schema is JSON if it can be, and a text otherwise."""

        def call_from(at: int) -> tuple[ToolCall, int] | None:
            match = _FUNCTION.match(text, at)
            if match is None or match[1] not in tools or _PARAMETER.sub("", match[2]):
                return None
            schemas = tools[match[1]].get("properties")
            known = schemas if isinstance(schemas, dict) else {}
            values = {key: _value(written, known.get(key)) for key, written in _PARAMETER.findall(match[2])}
            return ToolCall(match[1], _arguments(values)), match.end()

        return parse_between(text, call_from)

    def grammar(self, tools: Sequence[Offered], mark: Terminal, *, parallel: bool, around: str | None = None) -> str:
        """See ``ToolCallFormat``. Parameters come in the order of the schema."""

        def call(name: str, arguments: str) -> str:
            begin, end = lark.text(f"\n<function={name}>\n"), lark.text("</function>\n")
            return f"{mark(OPEN)} {begin} {arguments} {end} {mark(CLOSE)}"

        between = lark.text("\n") if parallel else None
        return lark.calls(tools, call, between=between, around=around, arguments=_parameters)


def _parameters(rule: str, tool: Offered) -> list[str]:
    """The rules of a tool's parameters, the first one of all together.

    Raises:
        ValueError: the schema says what such a grammar cannot keep.
    """
    _require_known(tool.schema, _OF_OBJECTS, tool.name)
    given = msgspec.convert(tool.schema, _Object)
    if unknown := set(given.required) - given.properties.keys():
        raise ValueError(f"{tool.name} requires {min(unknown)}, which is no parameter")
    definitions = {name: tool.schema[name] for name in _DEFINITIONS & tool.schema.keys()}
    parts, rules = [], []
    if tool.schema == {"type": "object"}:
        parts.append(f"({rule}_name {rule}_value {lark.text(chr(10))})*")
        rules += [rf"{rule}_name[lazy]: /<parameter=[^<>\s]+>\n/", _text_rule(f"{rule}_value", {}, tool.name)]
    for number, (key, schema) in enumerate(given.properties.items()):
        if not _KEY.fullmatch(key):
            raise ValueError(f"{tool.name}: {key!r} is no name of a parameter")
        value = f"{rule}_{number}"
        part = f"{lark.text(f'<parameter={key}>' + chr(10))} {value} {lark.text(chr(10))}"
        parts.append(part if key in given.required else f"({part})?")
        if _is_text(schema):
            rules.append(_text_rule(value, schema, f"{tool.name}: {key}"))
        else:
            whole = {**(schema if isinstance(schema, dict) else {"allOf": [schema]}), **definitions}
            rules += [f"{value}: {value}_json {lark.text(_VALUE_END)}", lark.json_rule(f"{value}_json", whole)]
    return [f"{rule}: {' '.join(parts) or lark.text('')}", *rules]


def _text_rule(rule: str, schema: Schema, where: str) -> str:
    """The rule of a text with the mark at its end."""
    _require_known(schema, _OF_TEXTS, where)
    given = msgspec.convert(schema, _Text)
    if choices := _choices(schema):
        able = [c for c in choices if "</" not in c and len(c) >= given.minLength]
        able = [c for c in able if given.maxLength is None or len(c) <= given.maxLength]
        if not able:
            raise ValueError(f"{where} has no possible value")
        return f"{rule}: ({' | '.join(map(lark.text, able))}) {lark.text(_VALUE_END)}"
    length = f"{{{given.minLength},{'' if given.maxLength is None else given.maxLength}}}"
    return rf"{rule}[lazy]: /(?s:.){length}\n<\/parameter>/ & {_UNBROKEN}"


def _require_known(schema: Schema, known: set[str], where: str) -> None:
    if unknown := schema.keys() - known:
        raise ValueError(f"{where}: {min(unknown)} cannot be kept in the form of this model's calls")


def _is_text(schema: object) -> bool:
    """Whether values of a schema are texts and nothing else."""
    if not isinstance(schema, dict):
        return False
    choices = _choices(schema)
    return schema.get("type", "string" if choices else None) == "string" and all(isinstance(c, str) for c in choices)


def _choices(schema: Schema) -> list[Any]:
    """What values a schema lists; empty for none."""
    listed = schema.get("enum")
    return [schema["const"]] if "const" in schema else listed if isinstance(listed, list) else []


def _arguments(values: Mapping[str, Any]) -> str:
    """Values as JSON text."""
    text = json.dumps(values, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # The model escaped half a character, which UTF-8 cannot hold: it stays an escape.
        return json.dumps(values)
    return text


def _value(written: str, schema: object) -> Any:
    """What a value means."""
    if _is_text(schema):
        return written
    given = schema.get("type") if isinstance(schema, dict) else None
    kinds = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    try:
        value = json.loads(written, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        kind, value = _WORDS.get(written.lower(), ("", written))
        return value if kind in kinds else written
    return written if "string" in kinds and not _KINDS[type(value)] & kinds else value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    """A number; one like 1e400 would be written as Infinity."""
    value = float(number)
    if math.isinf(value):
        _refuse(number)
    return value
