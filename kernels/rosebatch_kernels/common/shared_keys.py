"""Keys that many sequences of a decode step have in common: how the host describes them, and the memory for results.

The host cuts the work into items: up to ``MEMBERS`` rows that share blocks, and a range of the shared keys. A kernel
attends to each item once for all of its rows. It leaves a partial result for each row and head. The decode kernel of a
row goes on from its partial results, and reads the row's own keys only.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rosebatch_kernels.common.sizes import table

# Rows of an item.
MEMBERS = 64
# Queries of a program of the kernel.
QUERIES = 128
# Partial results of a row.
MAX_PARTS = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of programs; the measured ones are of an H100 80GB HBM3.

    Attributes:
        programs: of the kernel. Each has a multiprocessor of 132 to itself, and the decode kernel begins on the others.
            More programs leave more partial results: for Qwen3-0.6B's heads, 132 take a layer from 70 to 82 µs.
    """

    programs: int = 100


SIZES = table(Sizes())


def items_wanted(heads: int, kv_heads: int, *, sizes: Sizes) -> int:
    """Items that make ``sizes.programs`` programs at most, but at least one item."""
    programs = kv_heads * -(-MEMBERS * (heads // kv_heads) // QUERIES)
    return max(1, sizes.programs // programs)


def max_items(batch: int) -> int:
    """Items of a step of so many rows. A CUDA graph holds this number; programs of items that are not there return."""
    return 48 + batch // 16


class Pieces(NamedTuple):
    """How a row's keys are cut where the cuts may follow from its position alone.

    Attributes:
        keys: of a piece. In rows with more than ``most`` of them, twice as many, or four times, and so on.
        most: pieces of a row at most.
    """

    keys: int
    most: int

    def of(self, keys: int) -> int:
        """Keys of a piece of a row with so many keys in the cache."""
        piece = self.keys
        while piece * self.most < keys:
            piece *= 2
        return piece

    def cut(self, position: int, window: int) -> tuple[int, int]:
        """Where the first piece of a token's keys begins, and the keys of a piece; a window of 0 is all keys."""
        origin = max(position + 1 - window, 0) // self.keys * self.keys if window else 0
        return origin, self.of(position - origin)


class SharedKeys(NamedTuple):
    """The shared keys of a decode step.

    Attributes:
        items: ``[N, 5]`` int32: place of the first member, number of members (0 for padding), first key, the key after
            the last, and the number of the partial result. Where results are those of pieces, see ``Pieces``, the last
            is the keys of a piece in its place.
        members: int32 rows of the step. Its first member's row of the block table has an item's keys.
        begins: ``[B]`` int32 by row: the items have all keys before this one; 0 where there are none.
        counts: ``[B]`` int32 by row: partial results, at most ``MAX_PARTS``, or as many as there are pieces.
    """

    items: Tensor
    members: Tensor
    begins: Tensor
    counts: Tensor


class SharedParts:
    """Partial results of shared keys. One serves a whole run: its layers use it one after the other.

    Args:
        max_batch: most rows of a step.
        heads: query heads.
        head_dim: D.

        parts: partial results of a row at most.

    Attributes:
        sums: ``[max_batch · heads · parts, D]`` fp32, weighted sums of values.
        stats: the same without D, times 2: largest score in units of ln 2, and sum of weights.
    """

    def __init__(self, max_batch: int, heads: int, head_dim: int, device: torch.device, parts: int = MAX_PARTS) -> None:
        lines = max_batch * heads * parts
        self.sums = torch.empty(lines, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(lines, 2, dtype=torch.float32, device=device)
