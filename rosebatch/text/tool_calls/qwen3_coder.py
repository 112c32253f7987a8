"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``."""

import json
import re
from collections.abc import Callable, Collection, Sequence

from rosebatch.errors import RowError
from rosebatch.text.tool_calls.call import Offered, Parsed, ToolCall
from rosebatch.text.tool_calls.hermes import CLOSE, OPEN, parse_between

_FUNCTION = re.compile(r"<function=([^>\s]+)>\s*(.*?)\s*</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class Qwen3Coder:
    """See ``rosebatch.text.tool_calls.call.CallForm``."""

    marks: tuple[str, ...] = (OPEN, CLOSE)

    def parse(self, text: str, names: Collection[str]) -> Parsed:
        """See ``CallForm``. A value that is JSON is taken as that, any other as a text."""

        def call_from(at: int) -> tuple[ToolCall, int] | None:
            match = _FUNCTION.match(text, at)
            if match is None or match[1] not in names or _PARAMETER.sub("", match[2]):
                return None
            values = {key: _value(written) for key, written in _PARAMETER.findall(match[2])}
            return ToolCall(match[1], json.dumps(values, ensure_ascii=False)), match.end()

        return parse_between(text, call_from)

    def grammar(self, tools: Sequence[Offered], mark: Callable[[str], str], *, parallel: bool) -> str:
        """See ``CallForm``.

        Raises:
            RowError: always. Values are no JSON, so that no schema can hold them.
        """
        raise RowError("unsupported_field", "tool_choice: the calls of this model cannot be forced; use auto")


def _value(written: str) -> object:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written
