"""Splits of decode attention: how many parts the keys of a sequence have, and the memory for their results."""

from collections.abc import Callable

import torch

from rosebatch_kernels.common.shared_keys import MAX_PARTS, SharedParts


class DecodeWorkspace:
    """Partial results of split sequences. One serves a whole run: its layers use it one after the other.

    Args:
        max_batch: most sequences of a call.
        heads, kv_heads: query heads, and K/V heads.
        head_dim: D.
        num_splits: gives the parts of each sequence's keys, by sequences and K/V heads; None for one part.
        shares: whether sequences may share keys, which takes memory.
        pieces: results of a sequence that is split; 0 for one of each split.

    Attributes:
        shared: partial results of the keys that sequences share; None if they never do.
    """

    def __init__(
        self,
        max_batch: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_splits: Callable[[int, int], int] | None,
        *,
        shares: bool = False,
        pieces: int = 0,
    ) -> None:
        self._num_splits = num_splits
        self.kv_heads = kv_heads
        self._pieces = pieces
        self._parts = max(batch * self._results(batch) for batch in range(1, max_batch + 1))
        self.sums = torch.empty(self._parts * heads, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(self._parts * heads, 2, dtype=torch.float32, device=device)
        self.shared = SharedParts(max_batch, heads, head_dim, device, pieces or MAX_PARTS) if shares else None
        # Every call leaves zeros: the split that merges resets its counter.
        self.arrived = torch.zeros(max_batch * kv_heads, dtype=torch.int32, device=device)

    def num_splits(self, batch: int) -> int:
        """Parts of each sequence's keys in a call with ``batch`` sequences."""
        splits = self._splits(batch)
        assert batch * self._results(batch) <= self._parts, "there is memory for the result of each part"
        return splits

    def _results(self, batch: int) -> int:
        """Of each sequence."""
        splits = self._splits(batch)
        return self._pieces if self._pieces and splits > 1 else splits

    def _splits(self, batch: int) -> int:
        return self._num_splits(batch, self.kv_heads) if self._num_splits else 1
