"""Longrope in the engine: a sequence has short factors up to the trained length, and long ones once it is longer.

The factors change all keys. So a sequence that outgrows the trained length restarts with another salt: it gives its
blocks back, and all its tokens are computed again. transformers does so for Phi-3.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from rosebatch.engine.plan import Chunk, SequenceSpec

if TYPE_CHECKING:
    from rosebatch.model.mixers.mixer import MixerSpec

LONG = b"long factors"


@dataclass(frozen=True, slots=True)
class LongRope:
    """A ``rosebatch.engine.plan.RestartPolicy`` from the lengths of a model's rotary tables.

    See ``rosebatch.model.rope.Rotary``.

    Attributes:
        trained_len: most tokens that are computed with short factors.
        max_len: positions of the tables. The long rows of the first ``trained_len`` ones follow them.
    """

    trained_len: int
    max_len: int

    def spec_for(self, spec: SequenceSpec, num_tokens: int) -> SequenceSpec:
        """The last token of a sequence is not computed, so one more than the trained length may be known."""
        salt = spec.salt.removesuffix(LONG)
        if num_tokens > self.trained_len:
            return structs.replace(spec, salt=salt + LONG, restart_len=None)
        restart_len = self.trained_len + 1
        return structs.replace(spec, salt=salt, restart_len=restart_len if restart_len < spec.max_len else None)

    def rotary_rows(self, chunk: Chunk, spec: SequenceSpec) -> np.ndarray:
        """Decode steps need no long rows: their tokens with long factors are after the trained length."""
        rows = np.arange(chunk.start, chunk.end, dtype=np.int32)
        if spec.salt.endswith(LONG):
            rows[rows < self.trained_len] += self.max_len
        return rows


def restart_policy(specs: Iterable["MixerSpec"]) -> LongRope | None:
    """The policy of a model's layers; None if each position has one row of the rotary tables."""
    found = {(spec.rotary.trained_len, spec.rotary.max_len) for spec in specs if spec.rotary is not None}
    if not any(trained_len for trained_len, _ in found):
        return None
    (only,) = found
    return LongRope(*only)
