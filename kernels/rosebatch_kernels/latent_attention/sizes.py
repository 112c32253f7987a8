"""Sizes of the kernels of latent attention. Decode on Hopper and expanded prefill were measured, on an H200."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rosebatch_kernels.common.sizes import Program, Steps, table, value_at


class LatentProgram(NamedTuple):
    """Sizes of a program.

    Attributes:
        rows: of q: heads of a token, or of some.
        keys: of a tile.
        warps: of a program.
        stages: of the software pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


_FP32 = LatentProgram(rows=16, keys=16, warps=4, stages=1)
_FRESH, _PREFIX = Program(keys=64, warps=4, stages=2), Program(keys=64, warps=8, stages=2)
_FRESH_OF_LARGE = Program(keys=64, warps=4, stages=3)
# Channels of a value that make a head large.
_LARGE = 256


@dataclass(frozen=True)
class Sizes:
    """Sizes of decode and prefill programs.

    Attributes:
        few: of decode, for 16 bits and as many heads as it has rows.
        decode, prefill: for 16 bits.
        fp32: of both.
        fresh, fresh_of_large: of prefill with expanded keys and values; of large heads.
        prefix: of what is read as latents then.
        splits: of each sequence's keys, by sequences times programs of its heads.
        min_keys: keys that make a split worth its merge.
    """

    few: LatentProgram
    decode: LatentProgram
    prefill: LatentProgram
    fp32: LatentProgram = _FP32
    fresh: Program = _FRESH
    fresh_of_large: Program = _FRESH_OF_LARGE
    prefix: Program = _PREFIX
    splits: Steps = ((264, 1), (132, 2), (66, 4), (33, 8), (0, 16))
    min_keys: int = 128

    def undivided(self) -> "Sizes":
        """Without splits."""
        return replace(self, splits=((0, 1),))

    def invariant(self) -> "Sizes":
        """Splits go by the batch, so there are none. Prefill has one order of sums in any case."""
        return self.undivided()

    def decode_of(self, heads: int, dtype: torch.dtype) -> LatentProgram:
        """Of so many heads."""
        if dtype.itemsize == 4:
            return self.fp32
        return self.few if heads <= self.few.rows else self.decode

    def fresh_of(self, values: int) -> Program:
        """Of heads with so many channels of a value."""
        return self.fresh_of_large if values >= _LARGE else self.fresh

    def prefill_of(self, dtype: torch.dtype) -> LatentProgram:
        """Of a dtype."""
        return self.fp32 if dtype.itemsize == 4 else self.prefill


SIZES = table(
    Sizes(
        few=LatentProgram(rows=16, keys=32, warps=4, stages=2),
        decode=LatentProgram(rows=32, keys=32, warps=4, stages=2),
        prefill=LatentProgram(rows=64, keys=32, warps=8, stages=2),
        # A program fills one of the 132 processors.
        splits=((199, 1), (133, 2), (67, 1), (34, 2), (17, 4), (9, 8), (5, 16), (0, 32)),
    ),
    sm_86=Sizes(
        few=LatentProgram(rows=16, keys=16, warps=4, stages=2),
        decode=LatentProgram(rows=16, keys=16, warps=4, stages=2),
        prefill=LatentProgram(rows=16, keys=16, warps=4, stages=2),
    ),
)


def num_splits(batch: int, heads: int, dtype: torch.dtype, *, sizes: Sizes) -> int:
    """Parts of each sequence's keys. They follow from sizes that a CUDA graph fixes, never from lengths."""
    tiles = -(-heads // sizes.decode_of(heads, dtype).rows)
    return value_at(sizes.splits, batch * tiles)
