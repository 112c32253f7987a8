"""Stop strings: found while tokens are generated, and cut off the text."""

from collections.abc import Sequence

from rosebatch.text.reasoning.parser import Thinking
from rosebatch.text.vocabulary import Vocabulary


class StopStrings:
    """Finds stop strings in generated tokens, also across tokens (see ``rosebatch.core.request.StopMatcher``).

    Args:
        vocabulary: of the model.
        stop: the strings.
        min_tokens: a string that ends within the text of this many first tokens does not count.
        skip_special_tokens: whether the text leaves special tokens out. A stop string that is one matches all the same.
        thinking: follows thoughts, in which strings do not count; None if there are none.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str],
        min_tokens: int = 0,
        *,
        skip_special_tokens: bool = True,
        thinking: Thinking | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._thinking = thinking
        # White space between thoughts and answer is of neither.
        self._has_thought = self._at_begin = False
        self._stream = vocabulary.stream(skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._stop_ids = vocabulary.special_ids(stop) if skip_special_tokens else frozenset()
        self._keep = max(map(len, stop)) - 1
        # The end of the text so far, and its position in the text.
        self._tail, self._begin = "", 0
        self._missing = min_tokens
        self._first: list[int] = []
        self._protected = 0

    def feed(self, token_id: int) -> bool:
        """Add the next generated token; True once a stop string has appeared."""
        if self._is_thought(token_id):
            self._missing = max(0, self._missing - 1)
            self._tail, self._begin, self._first = "", 0, []
            self._has_thought = self._at_begin = True
            return False
        added = self._next_text(token_id)
        if self._at_begin:
            added = added.lstrip()
            self._at_begin = not added
        text = self._tail + added
        begin = self._begin
        self._tail = text[-self._keep :] if self._keep else ""
        self._begin += len(text) - len(self._tail)
        if self._missing:
            self._missing -= 1
            self._first.append(token_id)
            # Decoded at once, as for the final text: half a character at the end counts as one.
            first = "" if self._missing else self._decode(self._first)
            self._protected = len(first.lstrip() if self._has_thought else first)
            return False
        if token_id in self._stop_ids:
            return True
        return cut_at_stop(text, self._stop, max(0, self._protected - begin))[1] is not None

    def _is_thought(self, token_id: int) -> bool:
        """Whether the token is a thought, or a mark of thoughts."""
        if self._thinking is None:
            return False
        before = self._thinking.open
        self._thinking.feed(token_id)
        return before or self._thinking.open

    def _next_text(self, token_id: int) -> str:
        try:
            return self._stream.step(self._vocabulary.backend, token_id) or ""
        # The library raises a plain Exception where a token changes the text before it.
        except Exception:
            self._stream = self._vocabulary.stream(skip_special_tokens=self._skip)
            return self._decode([token_id])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.decode(token_ids, skip_special_tokens=self._skip)


def cut_at_stop(text: str, stop: Sequence[str], protected: int = 0, *, keep: bool = False) -> tuple[str, str | None]:
    """The text up to its first stop string, and this string, the shortest of several; all of it, and None, without one.

    Args:
        text: of the whole completion.
        stop: the strings.
        protected: those that end within so many characters do not count.
        keep: whether the text ends behind the string.
    """
    if not stop:
        return text, None
    places = [
        (text.find(each, max(0, protected - len(each) + 1) if protected else 0), len(each), each) for each in stop
    ]
    found = min((place for place in places if place[0] >= 0), default=None)
    if found is None:
        return text, None
    at, length, string = found
    return text[: at + length if keep else at], string
