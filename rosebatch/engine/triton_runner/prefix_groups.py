"""Prefix groups: rows of decode steps whose block tables begin with the same blocks, so that they share keys.

A group may have groups inside, such as examples after a system prompt that others have too. The host finds the groups
and divides their keys among programs; the kernels of ``rosebatch_kernels.common.shared_keys`` read these. Where a row's
bits may not depend on the batch, groups share whole pieces of keys, and their rows have pieces of one length.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from rosebatch.engine.plan import DecodeRow
from rosebatch.engine.staging import Staging
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.shared_keys import (
    MAX_PARTS,
    MEMBERS,
    SIZES,
    Pieces,
    SharedKeys,
    items_wanted,
    max_items,
)

# What makes a group worth it, measured on an H100: 256 keys cost two of four models more than they save.
MIN_ROWS = 16
MIN_KEYS = 512
# An item has a multiple of so many keys; a group has at most so many splits.
_UNIT = 64
_MAX_SPLITS = MAX_PARTS // 2


class Group(NamedTuple):
    """Rows that share the keys ``[first, end)``; groups around this one share those before.

    Attributes:
        rows: numbers of rows, in no order.
        first, end: positions, at ends of blocks, and of pieces.
        piece: keys of a piece; 0 where parts may end anywhere.
    """

    rows: np.ndarray
    first: int
    end: int
    piece: int = 0


class Items(NamedTuple):
    """See ``rosebatch_kernels.common.shared_keys.SharedKeys``, whose arrays these are."""

    items: np.ndarray
    members: np.ndarray
    begins: np.ndarray
    counts: np.ndarray


def find_groups(tables: np.ndarray, positions: np.ndarray, block_size: int, piece: int = 0) -> list[Group]:
    """Groups of rows that begin alike, each before those inside of it.

    Args:
        tables: ``[N, M]`` int32 block ids.
        positions: ``[N]`` of each row's next token; only whole blocks before it are shared.
        block_size: tokens of a block.
        piece: see ``Group``, a multiple of ``block_size``.
    """
    unit = piece // block_size or 1
    count = len(tables)
    whole = positions // block_size
    width = int(np.partition(whole, -MIN_ROWS)[-MIN_ROWS]) if count >= MIN_ROWS else 0
    if width * block_size < MIN_KEYS:
        return []
    # In the order of their bytes, rows that begin alike are next to each other.
    sortable = np.ascontiguousarray(tables[:, :width], ">i4")
    order = sortable.view(f"V{4 * width}").ravel().argsort(kind="stable")
    ordered, whole = sortable[order], whole[order]
    differs = ordered[1:] != ordered[:-1]
    alike = np.where(differs.any(1), differs.argmax(1), width)
    alike = np.minimum(alike, np.minimum(whole[1:], whole[:-1]))
    groups: list[Group] = []
    spans = [(0, count, 0)]
    while spans:
        low, high, taken = spans.pop()
        if high - low < MIN_ROWS:
            continue
        inside = alike[low : high - 1]
        common = int(inside.min())
        whole_pieces = common // unit * unit
        if (whole_pieces - taken) * block_size >= MIN_KEYS:
            groups.append(Group(order[low:high], taken * block_size, whole_pieces * block_size, piece))
            taken = whole_pieces
        ends = [low, *(np.flatnonzero(inside == common) + low + 1).tolist(), high]
        spans += [(start, end, taken) for start, end in pairwise(ends)]
    return groups


def divide(groups: Sequence[Group], slots: np.ndarray, batch: int, wanted: int, limit: int) -> Items | None:
    """The items of groups; None if there are none.

    Args:
        groups: each before those inside of it.
        slots: the row of the step of each row that the groups number.
        batch: rows of the step.
        wanted: items, see ``rosebatch_kernels.common.shared_keys.items_wanted``; there may be more.
        limit: maximum number of items. Groups without room are left out, with those inside of them.
    """
    work = sum(-(-len(group.rows) // MEMBERS) * (group.end - group.first) for group in groups)
    share = -(-work // wanted)
    items: list[tuple[int, int, int, int, int]] = []
    members: list[np.ndarray] = []
    placed = 0
    begins, counts = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    for group in groups:
        rows, piece = slots[group.rows], group.piece
        tiles = -(-len(rows) // MEMBERS)
        part = int(counts[rows[0]])
        room = min(_MAX_SPLITS, (limit - len(items)) // tiles)
        if not piece:
            room = min(room, MAX_PARTS - part)
        if begins[rows[0]] != group.first or room < 1:
            continue
        keys = group.end - group.first
        length = _rounded_up(max(share, -(-keys // room)), piece or _UNIT)
        starts = range(group.first, group.end, length)
        for low in range(0, len(rows), MEMBERS):
            own = min(MEMBERS, len(rows) - low)
            items += [
                (placed + low, own, start, min(start + length, group.end), piece or part + number)
                for number, start in enumerate(starts)
            ]
        members.append(rows)
        placed += len(rows)
        begins[rows], counts[rows] = group.end, group.end // piece if piece else part + len(starts)
    if not items:
        return None
    return Items(np.array(items, np.int32), np.concatenate(members).astype(np.int32), begins, counts)


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class PrefixGroupState:
    """The shared keys of decode steps on the device, in tensors that stay in place for graphs.

    Args:
        slots: with the block tables.
        block_size: tokens of a block.
        heads: query heads and K/V heads of the layers that share keys.
        pieces: how rows' keys are cut; None where parts may end anywhere.

    Attributes:
        own_begins: ``[num_slots]`` int32, the first key of each row that no other row shares.
    """

    def __init__(
        self,
        slots: Slots,
        block_size: int,
        heads: tuple[int, int],
        device: torch.device,
        pieces: Pieces | None = None,
    ) -> None:
        num_slots = slots.num_slots
        self.slots = slots
        self.block_size = block_size
        self.pieces = pieces
        self._wanted = items_wanted(*heads, sizes=SIZES.of(device_of(device)))
        self._sizes = [max_items(num_slots) * 5, MAX_PARTS * num_slots, num_slots, num_slots]
        self._cells = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        items, members, self._begins, self._counts = self._cells.split(self._sizes)
        self._items, self._members = items.view(-1, 5), members
        self.own_begins = np.zeros(num_slots, np.int32)
        # Sequences that were looked at, how many items they have, and the steps until one has longer pieces.
        self._known: set[int] = set()
        self._num_items = 0
        self._steps = 0

    def keys(self, batch: int) -> SharedKeys:
        """The shared keys of a step of the first ``batch`` rows."""
        return SharedKeys(self._items[: max_items(batch)], self._members, self._begins[:batch], self._counts[:batch])

    def forget(self) -> None:
        """Find the groups anew at the next step: some sequences have other slots or blocks."""
        self._known.clear()

    def update(self, rows: Sequence[DecodeRow], batch: int, staging: Staging) -> bool:
        """Whether any of these rows share keys in a step of the first ``batch``; the tensors then hold which.

        Groups are found anew when other rows run. Rows of a group may have ended since: their slots are not live.
        """
        ids = {row.id for row in rows}
        steps = max([row.length for row in rows]) if self.pieces else 0
        if not ids <= self._known or self._num_items > max_items(batch) or steps > self._steps:
            self._known = ids
            slots = np.array([self.slots.slot_of[row.id] for row in rows])
            starts = np.array([row.start for row in rows])
            ends = starts + [row.length - 1 for row in rows] if self.pieces else starts
            self._find(slots, slots, starts, ends, batch, staging)
        self._steps -= steps
        return self._num_items > 0

    def update_known(self, slots: np.ndarray, positions: np.ndarray, batch: int, staging: Staging) -> bool:
        """The same for rows of known tokens: of each its slot, and its position."""
        self.forget()
        self._find(np.arange(len(slots)), slots, positions, positions, batch, staging)
        return self._num_items > 0

    def _find(
        self, rows: np.ndarray, slots: np.ndarray, first: np.ndarray, last: np.ndarray, batch: int, staging: Staging
    ) -> None:
        """Find and send the groups of these rows of a step: of each its slot, and its first and last position."""
        assert self.slots.tables is not None, "the host keeps the tables"
        tables = self.slots.tables[slots]
        if self.pieces is None:
            groups = find_groups(tables, first, self.block_size)
        else:
            groups = self._find_pieces(self.pieces, tables, first, last)
        found = divide(groups, rows, self.slots.num_slots, self._wanted, max_items(batch))
        self._num_items = 0 if found is None else len(found.items)
        if found is not None:
            self.own_begins = found.begins
            self._send(found, staging)

    def _find_pieces(self, pieces: Pieces, tables: np.ndarray, positions: np.ndarray, last: np.ndarray) -> list[Group]:
        """Groups of rows with pieces of one length from their positions to the ``last`` ones of this window."""
        lengths = np.array([pieces.of(position) for position in positions.tolist()])
        ends = lengths * pieces.most
        # A row's own key counts too where another kernel has appended it.
        stays = last < ends
        # Others are looked at again after this window.
        self._steps = int((ends - positions).min()) if stays.all() else int((last - positions).max()) + 1
        groups: list[Group] = []
        for piece in {*lengths[stays].tolist()} if pieces.keys % self.block_size == 0 else ():
            rows = np.flatnonzero(stays & (lengths == piece))
            found = find_groups(tables[rows], positions[rows], self.block_size, piece)
            groups += [group._replace(rows=rows[group.rows]) for group in found]
        return groups

    def _send(self, found: Items, staging: Staging) -> None:
        parts = [np.zeros(size, np.int32) for size in self._sizes]
        for part, values in zip(parts, found, strict=True):
            part[: values.size] = values.reshape(-1)
        (cells,) = staging.send(np.concatenate(parts))
        self._cells.copy_(cells)
