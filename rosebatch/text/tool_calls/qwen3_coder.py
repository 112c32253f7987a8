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
from rosebatch.text.tool_calls.schema_kinds import ALL, TEXT, SchemaKinds, choices, kinds_of_value, resolved

_BEGIN, _END = re.compile(r"<function=([^>\s]+)>\s*"), "</function>"
_PARAMETER, _CLOSE = re.compile(r"<parameter=([^>\s]+)>\n?"), "</parameter>"
# What follows the mark that ends a value. Elsewhere, the mark is a part of the value.
_NEXT = re.compile(r"\s*(?=<parameter=[^>\s]+>|</function>)")
# A line of a value that begins a parameter: the one before was not closed.
_UNCLOSED = re.compile(r"^<parameter=[^>\s]+>", re.MULTILINE)
_KEY = re.compile(r"[^<>\s]+")
_VALUE_END = "\n</parameter>"
# Values that are generated have no mark in them.
_UNBROKEN = r"~/(?s:.)*<\/parameter>(?s:.)+/ & ~/(?s:.)*<\/function>(?s:.)*/ & ~/(?s:.)*<parameter=(?s:.)*/"
_MARKS = ("</", "<parameter=")

_ANNOTATIONS = {"$id", "$schema", "default", "deprecated", "description", "examples", "title"}
_DEFINITIONS = {"$defs", "definitions"}
# Keywords whose meaning a grammar of parameters can keep, and one of a text without quotes.
_OF_OBJECTS = _ANNOTATIONS | _DEFINITIONS | {"additionalProperties", "properties", "required", "type"}
_OF_TEXTS = _ANNOTATIONS | {"const", "enum", "maxLength", "minLength", "type"}

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
            begin = _BEGIN.match(text, at)
            if begin is None or begin[1] not in tools:
                return None
            kinds, members, end = SchemaKinds(tools[begin[1]]), [], begin.end()
            while (parameter := _parameter_at(text, end)) is not None:
                key, written, end = parameter
                members.append(f"{_json(key)}: {_value(written, kinds.of_member(key))}")
            if not text.startswith(_END, end):
                return None
            return ToolCall(begin[1], f"{{{', '.join(members)}}}"), end + len(_END)

        return parse_between(text, call_from)

    def grammar(self, tools: Sequence[Offered], mark: Terminal, *, parallel: bool, around: str | None = None) -> str:
        """See ``ToolCallFormat``. Parameters come in the order of the schema."""

        def call(name: str, arguments: str) -> str:
            begin, end = lark.text(f"\n<function={name}>\n"), lark.text("</function>\n")
            return f"{mark(OPEN)} {begin} {arguments} {end} {mark(CLOSE)}"

        between = lark.text("\n") if parallel else None
        return lark.calls(tools, call, between=between, around=around, arguments=_parameters)


def _parameter_at(text: str, begin: int) -> tuple[str, str, int] | None:
    """Name and value of the parameter that begins there, and where it ends; None if it is broken."""
    mark = _PARAMETER.match(text, begin)
    close = -1 if mark is None else text.find(_CLOSE, mark.end())
    while mark is not None and close >= 0:
        following = _NEXT.match(text, close + len(_CLOSE))
        if following is not None:
            written = text[mark.end() : close].removesuffix("\n")
            return None if _UNCLOSED.search(written) else (mark[1], written, following.end())
        close = text.find(_CLOSE, close + 1)
    return None


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
    kinds = SchemaKinds(tool.schema)
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
        if kinds.of(schema) == TEXT:
            forms = _text_forms(schema, tool.schema, set())
            rules.append(f"{value}: {' | '.join(f'{value}_{i}' for i in range(len(forms)))}")
            rules += [_text_rule(f"{value}_{i}", form, f"{tool.name}: {key}") for i, form in enumerate(forms)]
        else:
            whole = {**(schema if isinstance(schema, dict) else {"allOf": [schema]}), **definitions}
            rules += [f"{value}: {value}_json {lark.text(_VALUE_END)}", lark.json_rule(f"{value}_json", whole)]
    return [f"{rule}: {' '.join(parts) or lark.text('')}", *rules]


def _text_forms(schema: Schema, root: Schema, referred: set[str]) -> list[Schema]:
    """The forms that a text may have: each a schema without references and alternatives, as far as possible.

    Args:
        schema: takes texts alone.
        root: references refer to it.
        referred: references whose forms are there already.
    """
    match {name: value for name, value in schema.items() if name not in _ANNOTATIONS}:
        case {"$ref": reference, **rest} if not rest:
            if reference in referred:
                return []
            referred.add(reference)
            return _text_forms(resolved(reference, root), root, referred)
        case {"anyOf": list(forms), **rest} | {"oneOf": list(forms), **rest} if not rest:
            return [each for form in forms for each in _text_forms(form, root, referred)]
        case {"allOf": [form], **rest} if not rest:
            return _text_forms(form, root, referred)
    return [schema]


def _text_rule(rule: str, schema: Schema, where: str) -> str:
    """The rule of a text with the mark at its end."""
    _require_known(schema, _OF_TEXTS, where)
    given = msgspec.convert(schema, _Text)
    if listed := choices(schema):
        able = [c for c in listed if isinstance(c, str) and len(c) >= given.minLength]
        able = [c for c in able if not any(mark in c for mark in _MARKS)]
        able = [c for c in able if given.maxLength is None or len(c) <= given.maxLength]
        if not able:
            raise ValueError(f"{where} has no possible value")
        return f"{rule}: ({' | '.join(map(lark.text, able))}) {lark.text(_VALUE_END)}"
    length = f"{{{given.minLength},{'' if given.maxLength is None else given.maxLength}}}"
    return rf"{rule}[lazy]: /(?s:.){length}\n<\/parameter>/ & {_UNBROKEN}"


def _require_known(schema: Schema, known: set[str], where: str) -> None:
    if unknown := schema.keys() - known:
        raise ValueError(f"{where}: {min(unknown)} cannot be kept in the form of this model's calls")


def _value(written: str, kinds: frozenset[str]) -> str:
    """What a value means, as JSON text; a number keeps its digits."""
    if kinds == TEXT:
        return _json(written)
    try:
        found = kinds_of_value(json.loads(written, parse_constant=_refuse, parse_float=_finite))
    except (ValueError, RecursionError):
        kind, value = _WORDS.get(written.lower(), ("", written))
        return _json(value if kind in kinds and kinds != ALL else written)
    return _json(written) if "string" in kinds and not found & kinds else written.strip()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    """A number; one like 1e400 would be written as Infinity."""
    value = float(number)
    if math.isinf(value):
        _refuse(number)
    return value
