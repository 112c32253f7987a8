"""Longrope in the engine: a sequence has short factors up to the trained length, and long ones once it is longer.

The factors change all keys. So a sequence that outgrows the trained length starts over: its blocks are given up, and
all its tokens computed again. transformers does so for Phi-3.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rosebatch.engine.plan import Chunk, SequenceSpec

if TYPE_CHECKING:
    from rosebatch.model.layers import AttentionSpec


@dataclass(frozen=True, slots=True)
class LongRope:
    """The lengths of a model's rotary tables, see ``rosebatch.model.layers.Rotary``.

    Attributes:
        trained_len: most tokens that are computed with short factors.
        max_len: positions of the tables. The long rows of the first ``trained_len`` ones follow them.
    """

    trained_len: int
    max_len: int

    @classmethod
    def of(cls, specs: Iterable["AttentionSpec"]) -> "LongRope | None":
        """Of a model's layers; None if each position has one row."""
        found = {(spec.rotary.trained_len, spec.rotary.max_len) for spec in specs if spec.rotary is not None}
        if not any(trained_len for trained_len, _ in found):
            return None
        (only,) = found
        return cls(*only)

    def max_num_tokens(self, spec: SequenceSpec) -> int:
        """The length at which a sequence ends or starts over; its last token is not computed before."""
        return spec.max_len if spec.long_factors else min(spec.max_len, self.trained_len + 1)

    def rows(self, chunk: Chunk, spec: SequenceSpec) -> np.ndarray:
        """The rotary table's row of each token of a chunk, int32.

        Decode steps need none: there, tokens with long factors are behind the trained length.
        """
        rows = np.arange(chunk.start, chunk.end, dtype=np.int32)
        if spec.long_factors:
            rows[rows < self.trained_len] += self.max_len
        return rows
