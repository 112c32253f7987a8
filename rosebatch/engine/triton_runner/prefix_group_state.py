"""The shared keys of decode steps on the device: found anew when other sequences run, sent when they changed."""

from collections.abc import Sequence

import numpy as np
import torch

from rosebatch.engine.plan import DecodeRow
from rosebatch.engine.staging import Staging
from rosebatch.engine.triton_runner.prefix_groups import Items, divide, find_groups
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.ops.ops import Heads
from rosebatch_kernels.common.shared_keys import MAX_PARTS, SharedKeys, items_wanted, max_items


class PrefixGroupState:
    """Tensors that stay in place, so that a graph can read them.

    Args:
        slots: with the block tables.
        block_size: tokens of a block.
        heads: of the layers that share keys.

    Attributes:
        own_begins: ``[num_slots]`` int32, the first key of each row that it shares with none.
    """

    def __init__(self, slots: Slots, block_size: int, heads: Heads, device: torch.device) -> None:
        num_slots = slots.num_slots
        self.slots = slots
        self.block_size = block_size
        self.heads = heads
        self._sizes = [max_items(num_slots) * 5, MAX_PARTS * num_slots, num_slots, num_slots]
        self._cells = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        items, members, self._begins, self._counts = self._cells.split(self._sizes)
        self._items, self._members = items.view(-1, 5), members
        self.own_begins = np.zeros(num_slots, np.int32)
        # Sequences that were looked at, and how many items they have.
        self._known: set[int] = set()
        self._num_items = 0

    def keys(self, batch: int) -> SharedKeys:
        """Of a step of the first rows."""
        return SharedKeys(self._items[: max_items(batch)], self._members, self._begins[:batch], self._counts[:batch])

    def forget(self) -> None:
        """Look at all sequences again: some have other slots or blocks."""
        self._known.clear()

    def update(self, rows: Sequence[DecodeRow], batch: int, staging: Staging) -> bool:
        """Whether any of these rows share keys in a step of the first ``batch``; the tensors then say which.

        Of a group that was found before, some rows may have ended: their slots are not live.
        """
        ids = {row.id for row in rows}
        if not ids <= self._known or self._num_items > max_items(batch):
            self._known = ids
            found = self._find(rows, max_items(batch))
            self._num_items = 0 if found is None else len(found.items)
            if found is not None:
                self.own_begins = found.begins
                self._send(found, staging)
        return self._num_items > 0

    def _find(self, rows: Sequence[DecodeRow], limit: int) -> Items | None:
        assert self.slots.tables is not None, "the host keeps the tables"
        slots = np.array([self.slots.slot_of[row.id] for row in rows])
        positions = np.array([row.start for row in rows])
        groups = find_groups(self.slots.tables[slots], positions, self.block_size)
        return divide(groups, slots, self.slots.num_slots, items_wanted(*self.heads[:2]), limit)

    def _send(self, found: Items, staging: Staging) -> None:
        parts = [np.zeros(size, np.int32) for size in self._sizes]
        for part, values in zip(parts, found, strict=True):
            part[: values.size] = values.reshape(-1)
        (cells,) = staging.send(np.concatenate(parts))
        self._cells.copy_(cells)
