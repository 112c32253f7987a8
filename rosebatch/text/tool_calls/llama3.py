"""Llama 3: ``{"name": ..., "parameters": {...}}``, perhaps after ``<|python_tag|>``; several with ``;`` between."""

from collections.abc import Mapping, Sequence

from rosebatch.text.tool_calls import lark
from rosebatch.text.tool_calls.call import Offered, Parsed, Schema, Terminal, calls_from, skip_space

_TAG = "<|python_tag|>"


class Llama3:
    """See ``rosebatch.text.tool_calls.call.ToolCallFormat``."""

    marks: tuple[str, ...] = (_TAG,)
    opening: str | None = None

    def parse(self, text: str, tools: Mapping[str, Schema]) -> Parsed:
        """See ``ToolCallFormat``. Without the tag, the calls are all of the answer, or its beginning."""
        at = text.find(_TAG)
        calls, end = calls_from(text, skip_space(text, 0), tools, ";")
        before = ""
        # A tag in the arguments of a call is none.
        if at >= end or (at >= 0 and not calls):
            before = text[:at]
            calls, end = calls_from(text, skip_space(text, at + len(_TAG)), tools, ";")
        if not calls:
            return Parsed(text, ())
        return Parsed((before + text[end:].removeprefix(";")).strip(), tuple(calls))

    def grammar(self, tools: Sequence[Offered], mark: Terminal, *, parallel: bool, around: str | None = None) -> str:
        """See ``ToolCallFormat``."""

        def call(name: str, arguments: str) -> str:
            begin = lark.text(f'{{"name": "{name}", "parameters": ')
            return f"{begin} {arguments} {lark.text('}')}"

        return lark.calls(tools, call, between=lark.text("; ") if parallel else None)
