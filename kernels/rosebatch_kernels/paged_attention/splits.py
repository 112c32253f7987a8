"""Into how many parts decode attention divides the keys of a sequence, and where their results are kept."""

from collections.abc import Callable

import torch

# Programs (sequences times K/V heads) from which on none is split: so many balance each other.
_MANY_PROGRAMS = 2112
_MOST_SPLITS = 16


def num_splits(batch: int, kv_heads: int) -> int:
    """Parts that the keys of each sequence are divided into: a function of what a CUDA graph fixes, nothing else.

    Few programs are divided to fill the GPU, more of them so that a long sequence does not outlast the others.
    """
    programs = batch * kv_heads
    if programs >= _MANY_PROGRAMS:
        return 1
    return 4 if programs >= 128 else 8 if programs >= 32 else _MOST_SPLITS


def least_keys(batch: int, kv_heads: int, warps: int) -> int:
    """Keys that a split should have to be worth its merge; more where undivided sequences fill the GPU already.

    Args:
        warps: of a program.
    """
    return 512 if batch * kv_heads * warps >= 512 else 128


class DecodeWorkspace:
    """Partial results of split sequences: one for a whole run, shared by all layers, which run one after the other.

    Args:
        max_batch: most sequences of a call.
        heads, kv_heads: query heads, and K/V heads.
        head_dim: D.
        num_splits: as the function of this name; None leaves the keys of each sequence to one program.
    """

    def __init__(
        self,
        max_batch: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_splits: Callable[[int, int], int] | None = num_splits,
    ) -> None:
        self._num_splits = num_splits
        self.kv_heads = kv_heads
        parts = max(batch * self.num_splits(batch) for batch in range(1, max_batch + 1))
        self.sums = torch.empty(parts * heads, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(parts * heads, 2, dtype=torch.float32, device=device)
        # Left at 0 by every call: the split that merges resets it.
        self.arrived = torch.zeros(max_batch * kv_heads, dtype=torch.int32, device=device)

    def num_splits(self, batch: int) -> int:
        """Parts in a call with so many sequences."""
        return self._num_splits(batch, self.kv_heads) if self._num_splits else 1
