"""Mistral: ``[TOOL_CALLS]`` and a JSON list of calls; newer models ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

import re
from collections.abc import Collection, Mapping, Sequence

from rosebatch.text.tool_calls import lark
from rosebatch.text.tool_calls.call import (
    Offered,
    Parsed,
    Schema,
    Terminal,
    ToolCall,
    arguments_at,
    calls_from,
    skip_space,
)

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


class Mistral:
    """See ``rosebatch.text.tool_calls.call.ToolCallFormat``.

    Args:
        named: whether grammars take the newer form.
    """

    marks: tuple[str, ...] = (_CALLS, _ID, _ARGUMENTS)
    opening: str | None = _CALLS

    def __init__(self, *, named: bool = False) -> None:
        self._named = named

    def parse(self, text: str, tools: Mapping[str, Schema]) -> Parsed:
        """See ``ToolCallFormat``."""
        at = text.find(_CALLS)
        calls: list[ToolCall] = []
        kept = [text[:at]]
        while at >= 0:
            begin = skip_space(text, at + len(_CALLS))
            found, end = _listed(text, begin, tools) if text.startswith("[", begin) else _named(text, begin, tools)
            calls += found
            # A mark in the arguments of a call is none.
            end = end if found else at + len(_CALLS)
            at = text.find(_CALLS, end)
            rest = text[end : at if at >= 0 else len(text)]
            # What is left of a broken list keeps its mark.
            kept.append(rest if found and not rest.strip() else _CALLS + rest)
        return Parsed("".join(kept).strip(), tuple(calls)) if calls else Parsed(text, ())

    def grammar(self, tools: Sequence[Offered], mark: Terminal, *, parallel: bool, around: str | None = None) -> str:
        """See ``ToolCallFormat``."""

        def named(name: str, arguments: str) -> str:
            return f"{mark(_CALLS)} {lark.text(name)} {mark(_ARGUMENTS)} {arguments}"

        def listed(name: str, arguments: str) -> str:
            begin = lark.text(f'{{"name": "{name}", "arguments": ')
            return f"{begin} {arguments} {lark.text('}')}"

        if self._named:
            return lark.calls(tools, named, between="" if parallel else None, around=around)
        before, after = f"{mark(_CALLS)} {lark.text('[')}", lark.text("]")
        between = lark.text(", ") if parallel else None
        return lark.calls(tools, listed, before=before, between=between, after=after, around=around)


def _listed(text: str, begin: int, names: Collection[str]) -> tuple[list[ToolCall], int]:
    """The calls of a list up to the first broken one, and where they end."""
    calls, end = calls_from(text, skip_space(text, begin + 1), names, ",")
    return calls, end + text.startswith("]", end)


def _named(text: str, begin: int, names: Collection[str]) -> tuple[list[ToolCall], int]:
    """One call, and where it ends."""
    match = _NAMED.match(text, begin)
    found = arguments_at(text, match.end()) if match is not None and match[1] in names else None
    return ([ToolCall(match[1], found[0])], found[1]) if match is not None and found is not None else ([], begin)
