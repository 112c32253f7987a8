"""Tokens with log-probabilities and texts: packed until they are read, for objects of all of them would be large."""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from rosebatch.core.request import Logprobs
from rosebatch.io.results import ScoredToken
from rosebatch.text.tokenizer import Tokenizer


class ScoredTokens(Sequence[ScoredToken]):
    """Some tokens of a prompt or a completion.

    Args:
        logprobs: of each token.
        tokenizer: None for a model that works on token ids.
    """

    def __init__(self, logprobs: Sequence[Logprobs], tokenizer: Tokenizer | None) -> None:
        self._logprobs = logprobs
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, at: int) -> ScoredToken: ...

    @overload
    def __getitem__(self, at: slice) -> "ScoredTokens": ...

    def __getitem__(self, at: "int | slice") -> "ScoredToken | ScoredTokens":
        if isinstance(at, slice):
            return ScoredTokens(self._logprobs[at], self._tokenizer)
        return scored(*self._logprobs[at], self._tokenizer)

    def __iter__(self) -> Iterator[ScoredToken]:
        return (scored(*each, self._tokenizer) for each in self._logprobs)


def scored(
    token_id: int, logprob: float | None, top: Iterable[tuple[int, float]], rank: int, tokenizer: Tokenizer | None
) -> ScoredToken:
    """A token; None as the log-probability of the first one of a prompt."""
    if tokenizer is None:
        likeliest = tuple(ScoredToken(other, None, value) for other, value in top)
        return ScoredToken(token_id, None, logprob, likeliest, rank=rank)
    likeliest = tuple(ScoredToken(other, tokenizer.token_bytes(other), value) for other, value in top)
    return ScoredToken(
        token_id, tokenizer.token_bytes(token_id), logprob, likeliest, tokenizer.is_special(token_id), rank
    )
