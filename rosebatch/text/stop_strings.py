"""Stop strings: found while tokens are generated, and cut off the text."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from rosebatch.text.vocabulary import Vocabulary


class StopStrings:
    """Finds stop strings in generated tokens, also across tokens (see ``rosebatch.core.request.StopMatcher``).

    Args:
        vocabulary: of the model.
        stop: the strings.
        min_tokens: a string that ends within the text of this many first tokens does not count.
        skip_special_tokens: whether the text leaves special tokens out.
    """

    def __init__(
        self, vocabulary: Vocabulary, stop: Sequence[str], min_tokens: int = 0, *, skip_special_tokens: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._stop = tuple(stop)
        self._keep = max(map(len, stop)) - 1
        # The end of the text so far, and its position in the text.
        self._tail, self._begin = "", 0
        self._missing = min_tokens
        self._first: list[int] = []
        self._protected = 0

    def feed(self, token_id: int) -> bool:
        """Add the next generated token; True once a stop string has appeared."""
        text = self._tail + self._next_text(token_id)
        begin = self._begin
        self._tail = text[-self._keep :] if self._keep else ""
        self._begin += len(text) - len(self._tail)
        if self._missing:
            self._missing -= 1
            self._first.append(token_id)
            # Decoded at once, as for the final text: half a character at the end counts as one.
            self._protected = 0 if self._missing else len(self._decode(self._first))
            return False
        return cut_at_stop(text, self._stop, max(0, self._protected - begin)) != text

    def _next_text(self, token_id: int) -> str:
        try:
            return self._stream.step(self._vocabulary.backend, token_id) or ""
        # The library raises a plain Exception where a token changes the text before it.
        except Exception:
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return self._decode([token_id])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.decode(token_ids, skip_special_tokens=self._skip)


def cut_at_stop(text: str, stop: Sequence[str], protected: int = 0, *, keep: bool = False) -> str:
    """The text up to its first stop string.

    Args:
        text: of the whole completion.
        stop: the strings.
        protected: those that end within so many characters do not count.
        keep: whether the text ends after the string.
    """
    places = [(text.find(each, max(0, protected - len(each) + 1) if protected else 0), each) for each in stop]
    found = min(((at, len(each)) for at, each in places if at >= 0), default=None)
    if found is None:
        return text
    return text[: found[0] + (found[1] if keep else 0)]
