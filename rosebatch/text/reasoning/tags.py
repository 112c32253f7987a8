"""Thoughts between two tokens, such as ``<think>`` and ``</think>``: Qwen 3, DeepSeek R1, Magistral and others."""

from collections.abc import Callable, Sequence

from rosebatch.text.reasoning.parser import Allowed, Split

# A prompt that opens the thoughts ends with the token, or with it and white space.
_TAIL = 2


class Tags:
    """See ``rosebatch.text.reasoning.parser.ReasoningFormat``.

    Args:
        start, stop: ids of the two tokens.
        is_blank: whether a token is white space.
    """

    marks: tuple[str, ...] = ()
    begin: tuple[Allowed, ...] = ()

    def __init__(self, start: int, stop: int, is_blank: Callable[[int], bool]) -> None:
        self.start: int | None = start
        self._stop = stop
        self._is_blank = is_blank
        self.reserved: tuple[int, ...] = (start,)
        self.end: tuple[Allowed, ...] = ((stop,),)

    def has_ended(self, prompt: Sequence[int]) -> bool:
        """See ``ReasoningFormat``."""
        return self._ends_with(prompt, self._stop)

    def follow(self, prompt: Sequence[int]) -> "_Thinking":
        """See ``ReasoningFormat``."""
        return _Thinking(self.start, self._stop, self._is_blank, is_open=self._ends_with(prompt, self.start))

    def split(self, prompt: Sequence[int], token_ids: Sequence[int]) -> Split:
        """See ``ReasoningFormat``."""
        if self.has_ended(prompt):
            return Split(None, list(token_ids))
        thinking, begin = self.follow(prompt), 0
        # The first tokens are enough: a text may have thousands.
        while not (thinking.open or thinking.over) and begin < len(token_ids):
            thinking.feed(token_ids[begin])
            begin += 1
        if not thinking.open:
            return Split(None, list(token_ids))
        rest = token_ids[begin:]
        end = rest.index(self._stop) if self._stop in rest else len(rest)
        return Split(list(rest[:end]), list(rest[end + 1 :]))

    def answer(self, text: str, *, thought: bool) -> str:
        """See ``ReasoningFormat``."""
        return text.lstrip() if thought else text

    def before_grammar(self, *, calls: bool) -> tuple[Allowed, ...]:
        """See ``ReasoningFormat``."""
        return ()

    def _ends_with(self, prompt: Sequence[int], token_id: int | None) -> bool:
        """Whether the token is the last one but for white space."""
        for last in reversed(prompt[-_TAIL:]):
            if last == token_id or not self._is_blank(last):
                return last == token_id
        return False


class _Thinking:
    """See ``rosebatch.text.reasoning.parser.Thinking``. A model thinks once, before all else."""

    def __init__(self, start: int | None, stop: int, is_blank: Callable[[int], bool], *, is_open: bool) -> None:
        self._start, self._stop, self._is_blank = start, stop, is_blank
        self.open = is_open
        self.over = False
        self.count = 0

    def feed(self, token_id: int) -> None:
        """See ``Thinking``."""
        if self.open:
            self.open = token_id != self._stop
            self.over = not self.open
            self.count += self.open
        elif not self.over:
            self.open = token_id == self._start
            self.over = not self.open and not self._is_blank(token_id)
