"""Pieces of Lark grammars in llguidance's dialect."""

import json
import re
from collections.abc import Callable, Sequence

from rosebatch.text.grammar.source import formatted_schema
from rosebatch.text.tool_calls.call import Offered


def text(value: str) -> str:
    """The terminal of a text."""
    return json.dumps(value)


def json_rule(rule: str, schema: object) -> str:
    """The rule of JSON that a schema accepts.

    Raises:
        ValueError: not a schema.
    """
    return f"{rule}: %json {formatted_schema(schema)}"


def json_arguments(rule: str, tool: Offered) -> list[str]:
    """The rules of arguments that are a JSON object."""
    return [json_rule(rule, tool.schema)]


def calls(
    tools: Sequence[Offered],
    call: Callable[[str, str], str],
    *,
    before: str = "",
    between: str | None,
    after: str = "",
    around: str | None = None,
    arguments: Callable[[str, Offered], list[str]] = json_arguments,
) -> str:
    """A grammar of calls.

    Args:
        tools: that may be called.
        call: the expression of one call, from the tool's name and the rule of its arguments.
        before, after: expressions around all calls.
        between: expression between two calls; None allows one call only.
        around: the terminal of what may be around calls and in their place; None for nothing.
        arguments: the rules of a tool's arguments, from the name of the first one.

    Raises:
        ValueError: a schema cannot be kept.
    """
    rules = [rule for i, tool in enumerate(tools) for rule in arguments(f"arguments_{i}", tool)]
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules += [f"call_{i}: {call(tool.name, f'arguments_{i}')}" for i, tool in enumerate(tools)]
    more = "" if between is None else f"({between} call)*"
    start = f"{before} call {more} {after}"
    if around is not None:
        start = f"words ({start} words){'?' if between is None else '*'}"
        rules += ['words: TEXT | ""', f"TEXT: {around}"]
    return "\n".join([f"start: {start}", f"call: {one}", *rules, ""])


def text_without(mark: str) -> str:
    """The terminal of any text in which a mark does not occur."""
    return f"/(?s:.)+/ & ~/(?s:.)*{re.escape(mark)}(?s:.)*/"
