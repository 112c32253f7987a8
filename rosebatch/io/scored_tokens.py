"""Tokens with log-probabilities: packed until they are read, for objects of all of them would be large."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

import msgspec

from rosebatch.core.request import PackedLogprobs

if TYPE_CHECKING:
    from rosebatch.text.vocabulary import Vocabulary

T = TypeVar("T")
# Where a number goes. No text has it: JSON escapes the quotes there.
_NUMBER = b'"logprob":null'
_NO_TOP = b',"top_logprobs":[]}'


class ScoredToken(NamedTuple):
    """A token with its log-probability. The first token of a prompt has None.

    Attributes:
        raw: its bytes, perhaps only a part of a character. For a special token, its name, which no text contains. None
            without a tokenizer.
        top: the likeliest tokens in its place.
        special: whether it is a special token.
        rank: see ``rosebatch.core.request.Logprobs``; only of a token that was chosen.
    """

    token_id: int
    raw: bytes | None
    logprob: float | None
    top: tuple["ScoredToken", ...] = ()
    special: bool = False
    rank: int = 0

    @property
    def text(self) -> str | None:
        """The bytes as text."""
        return None if self.raw is None else self.raw.decode("utf-8", errors="replace")

    @property
    def label(self) -> str:
        """The text; without a tokenizer the id, as vLLM's server writes it on request."""
        return f"token_id:{self.token_id}" if self.text is None else self.text


class _Made(dict[int, T], Generic[T]):
    """What a function makes of token ids, once of each."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make

    def __missing__(self, token_id: int) -> T:
        found = self[token_id] = self._make(token_id)
        return found


class TokenTable:
    """What is known of tokens by their ids. A run has one, so that each token is looked at once.

    Args:
        vocabulary: None for a model that works on token ids.
    """

    def __init__(self, vocabulary: "Vocabulary | None") -> None:
        self._vocabulary = vocabulary
        self._tokens = _Made(self._look_up)
        self._found: dict[Callable[[ScoredToken], Any], _Made[Any]] = {}

    def token(
        self, token_id: int, logprob: float | None = None, top: tuple[ScoredToken, ...] = (), rank: int = 0
    ) -> ScoredToken:
        """A token with these numbers."""
        known = self._tokens[token_id]
        return ScoredToken(token_id, known.raw, logprob, top, known.special, rank)

    def each(self, make: Callable[[ScoredToken], T], token_ids: Iterable[int]) -> Iterator[T]:
        """What a function makes of tokens without their numbers; kept by the function."""
        if make not in self._found:
            self._found[make] = _Made(lambda token_id: make(self._tokens[token_id]))
        return map(self._found[make].__getitem__, token_ids)

    def _look_up(self, token_id: int) -> ScoredToken:
        if self._vocabulary is None:
            return ScoredToken(token_id, None, None)
        raw, special = self._vocabulary.token_bytes(token_id), self._vocabulary.is_special(token_id)
        return ScoredToken(token_id, raw, None, special=special)


class ScoredTokens(Sequence[ScoredToken]):
    """Some tokens of a prompt or a completion.

    Args:
        logprobs: of each token.
        table: of the model's tokens.
        first: the id of a prompt's first token, which comes before the others and has no number; None for a completion.
    """

    def __init__(self, logprobs: PackedLogprobs, table: TokenTable, first: int | None = None) -> None:
        self.logprobs = logprobs
        self.table = table
        self.first = first

    def __len__(self) -> int:
        return len(self.logprobs) + (self.first is not None)

    @overload
    def __getitem__(self, at: int) -> ScoredToken: ...

    @overload
    def __getitem__(self, at: slice) -> list[ScoredToken]: ...

    def __getitem__(self, at: int | slice) -> ScoredToken | list[ScoredToken]:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        number = range(len(self))[at]
        if self.first is not None:
            if not number:
                return self.table.token(self.first)
            number -= 1
        return self._scored(*self.logprobs[number])

    def __iter__(self) -> Iterator[ScoredToken]:
        if self.first is not None:
            yield self.table.token(self.first)
        for each in self.logprobs:
            yield self._scored(*each)

    def _scored(self, token_id: int, logprob: float, top: Iterable[tuple[int, float]], rank: int) -> ScoredToken:
        token = self.table.token
        return token(token_id, logprob, tuple(token(other, value) for other, value in top), rank)

    def json(self, form: Callable[[ScoredToken], dict[str, Any]]) -> msgspec.Raw:
        """A list of tokens, each with its likeliest ones as ``top_logprobs`` behind its own fields.

        Objects of all tokens took five times as long to make and encode.

        Args:
            form: the fields of a token; one of them is its ``logprob``.
        """
        lines, halves = [], _halves(form)
        if self.first is not None:
            ((before, behind),) = self.table.each(halves, [self.first])
            lines.append(b"%bnull%b%b" % (before, behind, _NO_TOP))
        ids, values, width = self.logprobs.columns()
        if ids:
            top = [b',"top_logprobs":['] + [b"},"] * (width - 2) + [b"}]},"] if width > 1 else [_NO_TOP + b","]
            pieces = [b""] * (4 * len(ids))
            pieces[::4], pieces[2::4] = zip(*self.table.each(halves, ids), strict=True)
            pieces[1::4] = msgspec.json.encode(values)[1:-1].split(b",")
            pieces[3::4] = top * len(self.logprobs)
            lines.append(b"".join(pieces)[:-1])
        return msgspec.Raw(b"[%b]" % b",".join(lines))


@cache
def _halves(form: Callable[[ScoredToken], dict[str, Any]]) -> Callable[[ScoredToken], tuple[bytes, bytes]]:
    """Of a token's JSON without the last brace, what is before its number, and what is behind it."""

    def halves(token: ScoredToken) -> tuple[bytes, bytes]:
        before, _, behind = msgspec.json.encode(form(token))[:-1].partition(_NUMBER)
        return before + _NUMBER[:-4], behind

    return halves
