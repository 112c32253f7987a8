"""Tokens of a prompt with the labels that a model gives them: packed until they are read."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from rosebatch.core.pooling_params import PoolingParams
from rosebatch.io.scored_tokens import ScoredToken, TokenTable


class LabelledToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token with its label.

    Attributes:
        token: its text; None without a tokenizer.
        start, end: its characters in the prompt's text; None for a token that stands for none.
        label: the likeliest, the first of several.
        score: the number of that.
        probs: of all labels, if they are asked for.
    """

    token: str | None
    start: int | None
    end: int | None
    label: str
    score: float
    probs: list[float] | None = None


class LabelledTokens:
    """What a head for tokens has made of a prompt: all of its tokens, or those that end steps.

    Args:
        token_ids: of the prompt.
        numbers: of one token after the other, a number for each label.
        pooling: how the prompt was pooled.
        spans: of all tokens; None for a prompt without a text.
        table: of the model's tokens.

    Attributes:
        numbers: ``[N, labels]`` fp32.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        numbers: "array[float]",
        pooling: PoolingParams,
        spans: Iterable[tuple[int, int] | tuple[None, None]] | None,
        table: TokenTable,
    ) -> None:
        self._token_ids, self._spans, self._table = token_ids, spans, table
        self._labels, self._step = pooling.labels, pooling.step_token
        self.numbers = np.frombuffer(numbers, np.float32).reshape(-1, len(pooling.labels))

    @property
    def of_steps(self) -> bool:
        """Whether they are the tokens that end steps."""
        return self._step is not None

    def read(self, *, probs: bool = False) -> list[LabelledToken]:
        """The tokens; with ``probs``, each has the numbers of all labels."""
        best = self.numbers.argmax(1)
        scores = shortest(self.numbers[np.arange(len(best)), best])
        each: list[Any] = shortest(self.numbers) if probs else [None] * len(best)
        names = self._table.each(_text, self._token_ids)
        spans = self._spans if self._spans is not None else [(None, None)] * len(self._token_ids)
        places = [
            (name, start, end)
            for token_id, name, (start, end) in zip(self._token_ids, names, spans, strict=True)
            if self._step in (None, token_id)
        ]
        rows = zip(places, best.tolist(), scores, each, strict=True)
        return [
            LabelledToken(token, start, end, self._labels[label], score, own)
            for (token, start, end), label, score, own in rows
        ]


def _text(token: ScoredToken) -> str | None:
    return token.text


def shortest(numbers: np.ndarray) -> list[Any]:
    """Numbers of fp32, whose texts have the fewest digits: a reader in fp32 gets the same bits."""
    import pyarrow as pa

    # NumPy takes ten times as long.
    texts = pa.array(numbers.reshape(-1)).cast(pa.string())
    found: list[Any] = texts.cast(pa.float64()).to_numpy().reshape(numbers.shape).tolist()
    return found
