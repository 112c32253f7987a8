"""The messages of gpt-oss: thoughts are those of the channel ``analysis``.

An answer is ``<|channel|>NAME<|message|>TEXT<|end|>``; messages that follow begin with ``<|start|>assistant``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rosebatch.text.reasoning.parser import Allowed, Split

_ROLE, _THOUGHTS, _FINAL, _CALLS = "assistant", "analysis", "final", "commentary"
_END_MARKS = ("<|end|>", "<|return|>", "<|call|>")


class Tokens(NamedTuple):
    """Ids of the marks."""

    start: int
    channel: int
    message: int
    end: int


class Harmony:
    """See ``rosebatch.text.reasoning.parser.ReasoningFormat``.

    Args:
        marks: names of the marks that texts must keep.
        tokens: the marks between messages.
        encode: tokens of a text.
        decode: their text.
    """

    start: int | None = None

    def __init__(
        self,
        marks: tuple[str, ...],
        tokens: Tokens,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.marks = marks
        self._tokens = tokens
        self._decode = decode
        role, thoughts, final, calls = (encode(each) for each in (_ROLE, _THOUGHTS, _FINAL, _CALLS))
        channel = (tokens.channel,)
        self._next: tuple[Allowed, ...] = ((tokens.end,), (tokens.start,), *_each(role))
        self._final: tuple[Allowed, ...] = (channel, *_each(final), (tokens.message,))
        self.reserved: tuple[int, ...] = (tokens.start, tokens.channel, tokens.message)
        self.begin: tuple[Allowed, ...] = (channel, *_each(thoughts), (tokens.message,))
        # Else the model might think again.
        self.end: tuple[Allowed, ...] = (*self._next, channel, (final[0], calls[0]))

    def has_ended(self, prompt: Sequence[int]) -> bool:
        """See ``ReasoningFormat``."""
        return False

    def follow(self, prompt: Sequence[int]) -> "_Thinking":
        """See ``ReasoningFormat``."""
        return _Thinking(self._tokens, self._is_thought)

    def split(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Split:
        """See ``ReasoningFormat``."""
        thinking = self.follow(prompt)
        thoughts: list[int] = []
        rest: list[int] = []
        has_thoughts = False
        for token_id in token_ids:
            before, count = thinking.open, thinking.count
            thinking.feed(token_id)
            if thinking.count > count:
                thoughts.append(token_id)
            elif thinking.open:
                # The header before it belongs to it.
                has_thoughts = True
                del rest[len(rest) - thinking.header :]
            elif not before or token_id == self._tokens.start:
                rest.append(token_id)
        return Split(thoughts if has_thoughts else None, rest)

    def answer(self, text: str, *, thought: bool) -> str:
        """See ``ReasoningFormat``. Messages to tools, whose calls were not understood, stay as they are."""
        return "\n".join(filter(None, map(_message, text.split("<|start|>"))))

    def before_grammar(self, *, calls: bool) -> tuple[Allowed, ...]:
        """See ``ReasoningFormat``."""
        return self._next[1:] if calls else (*self._next[1:], *self._final)

    def _is_thought(self, header: Sequence[int]) -> bool:
        text = self._decode(header)
        return _THOUGHTS in text and "to=" not in text


class _Thinking:
    """See ``rosebatch.text.reasoning.parser.Thinking``.

    Attributes:
        header: tokens of the last message's header but for its last one.
    """

    def __init__(self, tokens: Tokens, is_thought: Callable[[Sequence[int]], bool]) -> None:
        self._tokens, self._is_thought = tokens, is_thought
        self._header: list[int] | None = []
        self.open = self.over = False
        self.count = self.header = 0

    def feed(self, token_id: int) -> None:
        """See ``Thinking``. ``over`` is the end of a message of thoughts."""
        if token_id == self._tokens.start:
            self._header, self.open = [token_id], False
        elif self._header is not None:
            self._feed_header(self._header, token_id)
        elif self.open:
            self.over = token_id == self._tokens.end
            self.open = not self.over
            self.count += self.open

    def _feed_header(self, header: list[int], token_id: int) -> None:
        if token_id != self._tokens.message:
            header.append(token_id)
            return
        self.open = self._is_thought(header)
        self.header, self._header, self.over = len(header), None, False


def _message(text: str) -> str:
    """The text of a message, without its header; empty for one that has not begun."""
    header, mark, body = text.partition("<|message|>")
    if "to=" in header and mark:
        return text
    if not mark:
        return "" if "<|channel|>" in header or header == _ROLE else header
    for end in _END_MARKS:
        body = body.removesuffix(end)
    return body


def _each(token_ids: Sequence[int]) -> tuple[Allowed, ...]:
    return tuple((token_id,) for token_id in token_ids)
