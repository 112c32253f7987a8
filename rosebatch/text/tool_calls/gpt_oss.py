"""gpt-oss: a message of the channel ``commentary`` that goes to ``functions.NAME``.

The form is harmony's: ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``.
"""

import re
from collections.abc import Mapping, Sequence

from rosebatch.text.tool_calls import lark
from rosebatch.text.tool_calls.call import Offered, Parsed, Schema, Terminal, ToolCall, arguments_at, skip_space

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
# The recipient follows the channel, or the role.
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?"
    r"(?:\s*<\|channel\|>\w+\s+to=functions\.([\w.-]+)|\s*to=functions\.([\w.-]+)\s*<\|channel\|>\w+)"
    r"\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>"
)
_END = re.compile(r"\s*(?:<\|call\|>|<\|end\|>|(?=<\|start\|>)|$)")


class GptOss:
    """See ``rosebatch.text.tool_calls.call.ToolCallFormat``."""

    marks: tuple[str, ...] = MARKS
    opening: str | None = None

    def parse(self, text: str, tools: Mapping[str, Schema]) -> Parsed:
        """See ``ToolCallFormat``. The content keeps the headers of other messages."""
        calls: list[ToolCall] = []
        kept, done = [], 0
        for header in _HEADER.finditer(text):
            if header.start() < done:
                # It is in the arguments of a call.
                continue
            name = header[1] or header[2]
            found = arguments_at(text, skip_space(text, header.end())) if name in tools else None
            end = None if found is None else _END.match(text, found[1])
            if found is None or end is None:
                continue
            calls.append(ToolCall(name, found[0]))
            kept.append(text[done : header.start()])
            done = end.end()
        return Parsed("".join((*kept, text[done:])), tuple(calls))

    def grammar(self, tools: Sequence[Offered], mark: Terminal, *, parallel: bool, around: str | None = None) -> str:
        """See ``ToolCallFormat``. There is one call only: its last token ends the answer."""

        def call(name: str, arguments: str) -> str:
            begin = f"{mark('<|channel|>')} {lark.text(f'commentary to=functions.{name} ')}"
            return f"{begin} {mark('<|constrain|>')} {lark.text('json')} {mark('<|message|>')} {arguments}"

        return lark.calls(tools, call, between=None)
