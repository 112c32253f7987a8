"""Sizes of HP1's attention kernels, and what follows from them for a decode launch."""

import sys
from dataclasses import dataclass, replace

import torch

from rosebatch_kernels.common.sizes import Program, Steps, table, value_at

_PREFILL_FP32 = Program(keys=16, warps=8, stages=1)
_PREFILL = Program(keys=16, warps=4, stages=4)


@dataclass(frozen=True)
class Sizes:
    """Sizes of programs and splits.

    Attributes:
        warps: of a program. One warp never waits at a barrier.
        row_bytes: bytes of a row of K that a thread holds.
        keys: keys in a group, by query heads to a K/V head: as many as the registers hold.
        programs: programs that run at once. Their registers allow 8 on each of 132 multiprocessors.
        max_splits: splits of a sequence.
        min_keys: keys that make a split worth its merge.
        merged: splits that are added up at a time.
        prefill_fp32, prefill: of programs that walk over a prompt or over shared keys, for fp32 and for 16-bit types.
    """

    warps: int = 1
    row_bytes: int = 16
    keys: Steps = ((3, 4), (0, 8))
    programs: int = 1056
    max_splits: int = 32
    min_keys: int = 32
    merged: int = 8
    prefill_fp32: Program = _PREFILL_FP32
    prefill: Program = _PREFILL

    def invariant(self) -> "Sizes":
        """As many splits for all batches: the keys of each follow from the position alone. Not measured."""
        return replace(self, programs=sys.maxsize, max_splits=8)


SIZES = table(Sizes())


def num_splits(batch: int, kv_heads: int, *, sizes: Sizes) -> int:
    """Parts of each sequence's keys: as many as fill the GPU with programs that run at once.

    They follow from the batch alone, never from lengths, so that a CUDA graph can hold them.
    """
    parts = max(1, min(sizes.programs // (batch * kv_heads), sizes.max_splits))
    return 1 << (parts.bit_length() - 1)


def runs_and_keys(width: int, group: int, dtype: torch.dtype, *, sizes: Sizes) -> tuple[int, int]:
    """Runs of a program, and keys in a group of each run."""
    runs = max(1, sizes.warps * 32 * sizes.row_bytes // (width * dtype.itemsize))
    return runs, value_at(sizes.keys, group)
