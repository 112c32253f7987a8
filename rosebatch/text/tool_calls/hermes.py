"""Hermes, Qwen 2.5, Qwen 3 and many others: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from collections.abc import Callable, Mapping, Sequence

from rosebatch.text.tool_calls import lark
from rosebatch.text.tool_calls.call import Offered, Parsed, Schema, Terminal, ToolCall, call_at, skip_space

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """See ``rosebatch.text.tool_calls.call.ToolCallFormat``."""

    marks: tuple[str, ...] = (OPEN, CLOSE)
    opening: str | None = OPEN

    def parse(self, text: str, tools: Mapping[str, Schema]) -> Parsed:
        """See ``ToolCallFormat``."""
        return parse_between(text, lambda at: call_at(text, at, tools))

    def grammar(self, tools: Sequence[Offered], mark: Terminal, *, parallel: bool, around: str | None = None) -> str:
        """See ``ToolCallFormat``."""

        def call(name: str, arguments: str) -> str:
            begin = lark.text(f'\n{{"name": "{name}", "arguments": ')
            end = lark.text("}\n")
            return f"{mark(OPEN)} {begin} {arguments} {end} {mark(CLOSE)}"

        return lark.calls(tools, call, between=lark.text("\n") if parallel else None, around=around)


def parse_between(text: str, call_from: Callable[[int], tuple[ToolCall, int] | None]) -> Parsed:
    """Take out calls between the marks.

    Args:
        text: of the answer.
        call_from: the call that begins at a place, and where it ends; None if it is broken.
    """
    calls, kept, done = [], [], 0
    at = text.find(OPEN)
    while at >= 0:
        found = call_from(skip_space(text, at + len(OPEN)))
        end = None if found is None else skip_space(text, found[1])
        if found is not None and end is not None and (end == len(text) or text.startswith(CLOSE, end)):
            calls.append(found[0])
            kept.append(text[done:at])
            done = min(end + len(CLOSE), len(text))
        at = text.find(OPEN, max(done, at + 1))
    if not calls:
        return Parsed(text, ())
    # Each piece with its own end alone: between two calls there is white space only.
    return Parsed("".join(piece if piece.strip() else "" for piece in (*kept, text[done:])).strip(), tuple(calls))
