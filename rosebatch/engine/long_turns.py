"""Longrope in the engine: which row of the rotary tables each token has, where its position alone does not say."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rosebatch.engine.plan import Chunk, SequenceSpec
from rosebatch.model.layers import AttentionSpec


@dataclass(frozen=True, slots=True)
class LongTurns:
    """The rows of a model's rotary tables, see ``rosebatch.model.layers.Rotary``.

    Attributes:
        trained_len: longer prompts have long turns from their first token on.
        max_len: positions. The long turns of the first ``trained_len`` of them stand behind the rows of all positions.
    """

    trained_len: int
    max_len: int

    @classmethod
    def of(cls, specs: Iterable[AttentionSpec]) -> "LongTurns | None":
        """Of a model's layers; None if a token's row is its position."""
        found = {(spec.rotary.trained_len, spec.rotary.max_len) for spec in specs if spec.rotary is not None}
        if not any(trained_len for trained_len, _ in found):
            return None
        (only,) = found
        return cls(*only)

    def rows(self, chunk: Chunk, spec: SequenceSpec) -> np.ndarray:
        """The row of each token of a chunk, int32."""
        rows = np.arange(chunk.start, chunk.end, dtype=np.int32)
        if len(spec.prompt_token_ids) > self.trained_len:
            rows[rows < self.trained_len] += self.max_len
        return rows
