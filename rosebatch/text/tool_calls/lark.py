"""Pieces of Lark grammars in llguidance's dialect."""

import json
from collections.abc import Callable, Sequence

from rosebatch.text.grammar_source import formatted_schema
from rosebatch.text.tool_calls.call import Offered


def text(value: str) -> str:
    """The terminal of a text."""
    return json.dumps(value)


def calls(
    tools: Sequence[Offered], call: Callable[[str, str], str], *, before: str = "", between: str | None, after: str = ""
) -> str:
    """A grammar of calls.

    Args:
        tools: that may be called.
        call: the expression of one call, from the tool's name and the rule of its arguments.
        before, after: expressions around all calls.
        between: expression between two calls; None allows one call only.
    """
    rules = [f"arguments_{i}: %json {formatted_schema(tool.schema)}" for i, tool in enumerate(tools)]
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules += [f"call_{i}: {call(tool.name, f'arguments_{i}')}" for i, tool in enumerate(tools)]
    more = "" if between is None else f"({between} call)*"
    return "\n".join([f"start: {before} call {more} {after}", f"call: {one}", *rules, ""])
