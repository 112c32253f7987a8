"""Tiles of query tokens for chunks with a common prefix: short chunks fill a tile together. No torch.

See ``rosebatch_kernels.paged_attention.prefill_shared`` for what becomes of them.
"""

from typing import NamedTuple

import numpy as np

from rosebatch.engine.plan import PackedStep
from rosebatch.engine.triton_runner.slots import Slots

# What makes it worth it (measured from 1,024 keys on): keys in common, and the share of tiles that is left.
MIN_KEYS = 256
MAX_LEFT = 0.8


class Piece(NamedTuple):
    """Rows of a chunk in a tile: row of the block table, first row in the tile, number, position of the first."""

    slot: int
    begin: int
    rows: int
    position: int


class PrefixTile(NamedTuple):
    """A tile: first row in the step, and keys that all of its pieces share."""

    first_row: int
    shared: int
    pieces: list[Piece]


def group_tiles(plan: PackedStep, slots: Slots, block_size: int, tile_rows: int) -> list[PrefixTile] | None:
    """The tiles of a step, in order of its rows; None if they are hardly fewer than with a tile for each chunk."""
    assert slots.tables is not None, "the host keeps the tables"
    chunks = plan.chunks
    numbers = np.array([slots.slot_of[chunk.id] for chunk in chunks])
    whole = np.array([chunk.start for chunk in chunks]) // block_size
    width = int(whole.max())
    if len(chunks) < 2 or width * block_size < MIN_KEYS:
        return None
    alike = _alike(slots.tables[numbers, :width], whole)
    fill = _Fill(tile_rows, block_size)
    for slot, chunk, own, common in zip(numbers.tolist(), chunks, whole.tolist(), alike, strict=True):
        fill.add(slot, chunk.start, len(chunk.token_ids), own, common)
    apart = sum(-(-len(chunk.token_ids) // tile_rows) for chunk in chunks)
    return fill.tiles if len(fill.tiles) <= MAX_LEFT * apart else None


def _alike(tables: np.ndarray, whole: np.ndarray) -> list[int]:
    """How many whole blocks each row has in common with the row before; 0 for the first."""
    differs = tables[1:] != tables[:-1]
    alike = np.where(differs.any(1), differs.argmax(1), tables.shape[1])
    return [0, *np.minimum(alike, np.minimum(whole[1:], whole[:-1])).tolist()]


class _Fill:
    """Tiles in the making: the last one is open until it is full, or a chunk shares too little with it."""

    def __init__(self, tile_rows: int, block_size: int) -> None:
        self.tile_rows = tile_rows
        self.block_size = block_size
        self.tiles: list[PrefixTile] = []
        self._row = 0
        self._used = tile_rows

    def add(self, slot: int, start: int, length: int, whole: int, alike: int) -> None:
        """Add a chunk with ``whole`` blocks before it, of which ``alike`` are in common with the last chunk."""
        done = 0
        if self.tiles and self._used < self.tile_rows:
            tile = self.tiles[-1]
            shared = min(tile.shared, alike * self.block_size)
            if shared >= MIN_KEYS:
                if shared < tile.shared:
                    self.tiles[-1] = tile._replace(shared=shared)
                done = self._take(slot, start, min(length, self.tile_rows - self._used))
        while done < length:
            self.tiles.append(PrefixTile(self._row, whole * self.block_size, []))
            self._used = 0
            done += self._take(slot, start + done, min(length - done, self.tile_rows))

    def _take(self, slot: int, position: int, rows: int) -> int:
        self.tiles[-1].pieces.append(Piece(slot, self._used, rows, position))
        self._used += rows
        self._row += rows
        return rows
