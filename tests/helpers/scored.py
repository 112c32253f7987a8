"""Tokens with log-probabilities, written out."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rosebatch.core.request import Logprobs, PackedLogprobs
from rosebatch.io.scored_tokens import ScoredToken, ScoredTokens, TokenTable


def packed(tokens: Sequence[ScoredToken]) -> ScoredTokens:
    """These tokens, which have equally many likeliest ones; without a number the first one of a prompt."""
    known = {each.token_id: each for token in tokens for each in (*token.top, token)}
    vocabulary: Any = SimpleNamespace(
        token_bytes=lambda token_id: known[token_id].raw, is_special=lambda token_id: known[token_id].special
    )
    first = tokens[0].token_id if tokens[0].logprob is None else None
    given = [
        Logprobs(token.token_id, token.logprob, tuple((each.token_id, each.logprob) for each in token.top), token.rank)
        for token in tokens
        if token.logprob is not None
    ]
    return ScoredTokens(PackedLogprobs(given), TokenTable(vocabulary), first)
