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


class PrefixTiles(NamedTuple):
    """The tiles of a step, in order of its rows.

    Attributes:
        firsts: ``[N]``, the first row of each in the step.
        shared: ``[N]``, keys that all of its pieces share.
        counts: ``[N]``, how many pieces it has.
        pieces: ``[P, 4]`` of one tile after the other, each rows of a chunk: the row of the block table, the first row
            in the tile, their number, and the position of the first.
    """

    firsts: np.ndarray
    shared: np.ndarray
    counts: np.ndarray
    pieces: np.ndarray

    @property
    def num_rows(self) -> np.ndarray:
        """``[N]``, of each tile."""
        return np.add.reduceat(self.pieces[:, 2], self.counts.cumsum() - self.counts)

    def sorted(self, order: np.ndarray) -> "PrefixTiles":
        """The tiles in another order, with their pieces."""
        counts = self.counts[order]
        begins = (self.counts.cumsum() - self.counts)[order]
        places = np.repeat(begins - (counts.cumsum() - counts), counts) + np.arange(len(self.pieces))
        return PrefixTiles(self.firsts[order], self.shared[order], counts, self.pieces[places])


_NONE = np.zeros(0, np.int32)
NO_TILES = PrefixTiles(_NONE, _NONE, _NONE, _NONE.reshape(0, 4))


def group_tiles(plan: PackedStep, slots: Slots, block_size: int, tile_rows: int) -> PrefixTiles | None:
    """The tiles of a step; None if they are hardly fewer than with a tile for each chunk.

    A tile is open until it is full, or the next chunk shares too little with the last one in it.
    """
    assert slots.tables is not None, "the host keeps the tables"
    chunks = plan.chunks
    lengths = np.array([len(chunk.token_ids) for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    whole = starts // block_size
    width, ends = int(whole.max()), lengths.cumsum()
    # With the fewest tiles, all are full.
    most = MAX_LEFT * int((-(-lengths // tile_rows)).sum())
    if len(chunks) < 2 or width * block_size < MIN_KEYS or -(-int(ends[-1]) // tile_rows) > most:
        return None
    numbers = np.array([slots.slot_of[chunk.id] for chunk in chunks])
    alike = _alike(slots.tables[numbers, :width], whole)
    firsts = ends - lengths
    # Chunks that go on in each other's tiles, one run after the other; then the tiles of these runs.
    begins = firsts[alike * block_size < MIN_KEYS]
    of_runs = np.append(begins[1:], ends[-1]) - begins
    counts = -(-of_runs // tile_rows)
    if (num_tiles := int(counts.sum())) > most:
        return None
    within = np.arange(num_tiles) - np.repeat(counts.cumsum() - counts, counts)
    tiles = np.repeat(begins, counts) + within * tile_rows
    # A piece begins with a chunk or with a tile.
    pieces = np.union1d(firsts, tiles)
    chunk_of = firsts.searchsorted(pieces, "right") - 1
    first_pieces = pieces.searchsorted(tiles)
    counts = np.append(first_pieces[1:], len(pieces)) - first_pieces
    inside = pieces - np.repeat(tiles, counts)
    keys = np.where(inside == 0, whole[chunk_of], alike[chunk_of]) * block_size
    rows = np.append(pieces[1:], ends[-1]) - pieces
    positions = starts[chunk_of] + pieces - firsts[chunk_of]
    own = np.stack((numbers[chunk_of], inside, rows, positions), 1)
    return PrefixTiles(tiles, np.minimum.reduceat(keys, first_pieces), counts, own)


def _alike(tables: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """How many whole blocks each row has in common with the row before; 0 for the first."""
    differs = tables[1:] != tables[:-1]
    alike = np.where(differs.any(1), differs.argmax(1), tables.shape[1])
    return np.append(0, np.minimum(alike, np.minimum(whole[1:], whole[:-1])))
