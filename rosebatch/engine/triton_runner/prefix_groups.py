"""Which rows of decode steps begin with the same blocks, and how programs divide their shared keys. No torch.

Rows whose block tables begin alike are a group; a group may have groups inside, such as examples behind a system prompt
that others have too. See ``rosebatch_kernels.common.shared_keys`` for what becomes of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rosebatch_kernels.common.shared_keys import MAX_PARTS, MEMBERS

# What makes a group worth it, measured on an H100: 256 keys cost two of four models more than they save.
MIN_ROWS = 16
MIN_KEYS = 512
# Parts of an item's keys are multiples of this, and one group takes at most so many.
_UNIT = 64
_MAX_SPLITS = MAX_PARTS // 2


class Group(NamedTuple):
    """Rows that share the keys ``[first, end)``; groups outside of this one have those in front.

    Attributes:
        rows: numbers of rows, in no order.
        first, end: positions, at ends of blocks.
    """

    rows: np.ndarray
    first: int
    end: int


class Items(NamedTuple):
    """See ``rosebatch_kernels.common.shared_keys.SharedKeys``, whose arrays these are."""

    items: np.ndarray
    members: np.ndarray
    begins: np.ndarray
    counts: np.ndarray


def find_groups(tables: np.ndarray, positions: np.ndarray, block_size: int) -> list[Group]:
    """Groups of rows that begin alike, each in front of those inside of it.

    Args:
        tables: ``[N, M]`` int32 block ids.
        positions: ``[N]`` of each row's next token; only whole blocks in front of it are shared.
        block_size: tokens of a block.
    """
    count = len(tables)
    whole = positions // block_size
    width = int(np.partition(whole, -MIN_ROWS)[-MIN_ROWS]) if count >= MIN_ROWS else 0
    if width * block_size < MIN_KEYS:
        return []
    # Rows that begin alike are neighbours in the order of their bytes.
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
        if (common - taken) * block_size >= MIN_KEYS:
            groups.append(Group(order[low:high], taken * block_size, common * block_size))
            taken = common
        ends = [low, *(np.flatnonzero(inside == common) + low + 1).tolist(), high]
        spans += [(start, end, taken) for start, end in pairwise(ends)]
    return groups


def divide(groups: Sequence[Group], slots: np.ndarray, batch: int, wanted: int, limit: int) -> Items | None:
    """The items of groups; None if there are none.

    Args:
        groups: each in front of those inside of it.
        slots: the row of the step of each row that the groups number.
        batch: rows of the step.
        wanted: items, see ``rosebatch_kernels.common.shared_keys.items_wanted``; there may be more.
        most: items at most. Groups that find no room are left out, with those inside of them.
    """
    work = sum(-(-len(group.rows) // MEMBERS) * (group.end - group.first) for group in groups)
    share = -(-work // wanted)
    items: list[tuple[int, int, int, int, int]] = []
    members: list[np.ndarray] = []
    placed = 0
    begins, counts = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    for group in groups:
        rows = slots[group.rows]
        tiles = -(-len(rows) // MEMBERS)
        part = int(counts[rows[0]])
        room = min(_MAX_SPLITS, MAX_PARTS - part, (limit - len(items)) // tiles)
        if begins[rows[0]] != group.first or room < 1:
            continue
        keys = group.end - group.first
        length = _rounded_up(max(share, -(-keys // room)), _UNIT)
        starts = range(group.first, group.end, length)
        for low in range(0, len(rows), MEMBERS):
            own = min(MEMBERS, len(rows) - low)
            items += [
                (placed + low, own, start, min(start + length, group.end), part + number)
                for number, start in enumerate(starts)
            ]
        members.append(rows)
        placed += len(rows)
        begins[rows], counts[rows] = group.end, part + len(starts)
    if not items:
        return None
    return Items(np.array(items, np.int32), np.concatenate(members).astype(np.int32), begins, counts)


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
