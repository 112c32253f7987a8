"""The inputs of a packed step as one array, so that one copy brings them to the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rosebatch.engine.long_rope import LongRope
from rosebatch.engine.plan import PackedStep
from rosebatch.engine.triton_runner.shared_tiles import SharedTile
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.ops import PackedChunks

# Larger steps are not padded: they keep a GPU busy for longer than Python needs to launch them.
MOST_PADDED_TOKENS = 16384


def padded_size(num_tokens: int) -> int:
    """The size that a step of at most ``MOST_PADDED_TOKENS`` is padded to. There are few sizes, so that graphs recur.

    Padding adds an eighth at most, or 15 tokens.
    """
    assert num_tokens <= MOST_PADDED_TOKENS, "such steps are not padded"
    unit = max(16, (1 << num_tokens.bit_length()) // 16)
    return -(-num_tokens // unit) * unit


class PackedInputs(NamedTuple):
    """What the forward pass of a packed step reads.

    Attributes:
        input_ids, rows, positions: ``[T]`` int32; padding has row -1.
        rotary_rows: ``[T]`` int32, each token's row of the rotary tables; None if it is the position.
        last_tiles: ``[S, 4]`` int32, a tile of a single row for each of the last rows, each row once.
        tiles: ``[N, 4]`` int32, see ``rosebatch_kernels.paged_attention.prefill``; padding has no rows. With ``pieces``
            ``[N, 5]``, see ``rosebatch_kernels.paged_attention.prefill_shared``.
        pieces: ``[P, 4]`` int32 of tiles that chunks share; empty if each tile is of one chunk.
        last_rows: ``[S]`` int32, the row of the last token of each chunk that samples, in the plan's order, then of
            each that pools, then the first of these again. Any row, if there is none.
        packed: the same chunks for layers with states; empty for a model without them.
    """

    input_ids: Tensor
    rows: Tensor
    positions: Tensor
    rotary_rows: Tensor | None
    last_tiles: Tensor
    tiles: Tensor
    pieces: Tensor
    last_rows: Tensor
    packed: PackedChunks


@dataclass(frozen=True, slots=True)
class Layout:
    """Room for tokens, tiles, last rows, and chunks if the model has states, in an array of packed inputs.

    With ``long_rope``, tokens have rows of the rotary tables too. With ``num_pieces``, chunks share tiles.
    """

    size: int
    num_tiles: int
    num_last: int
    num_chunks: int = 0
    long_rope: LongRope | None = None
    num_pieces: int = 0

    @classmethod
    def exact(
        cls,
        plan: PackedStep,
        tile_rows: int,
        *,
        states: bool = False,
        long_rope: LongRope | None = None,
        shared: Sequence[SharedTile] | None = None,
    ) -> "Layout":
        """No more room than the plan needs."""
        num_tiles = sum(-(-len(chunk.token_ids) // tile_rows) for chunk in plan.chunks)
        num_chunks = len(plan.chunks) if states else 0
        # Kernels are launched for a row at least.
        num_last = max(1, sum(chunk.samples or chunk.pools for chunk in plan.chunks))
        if shared is not None:
            num_tiles = len(shared)
        num_pieces = sum(len(tile.pieces) for tile in shared or ())
        return cls(plan.num_tokens, num_tiles, num_last, num_chunks, long_rope, num_pieces)

    @classmethod
    def padded(
        cls,
        size: int,
        tile_rows: int,
        num_slots: int,
        *,
        states: bool = False,
        long_rope: LongRope | None = None,
        shares: bool = False,
    ) -> "Layout":
        """Room for ``size`` tokens, whatever sequences they belong to; ``shares`` if chunks share tiles."""
        most = min(size, num_slots)
        num_tiles = size // tile_rows + most
        # A piece begins with a chunk or with a tile.
        num_pieces = num_tiles + most if shares else 0
        return cls(size, num_tiles, most, most if states else 0, long_rope, num_pieces)

    @property
    def num_cells(self) -> int:
        """Length of the array."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        """Cells of tokens, last tiles, tiles, pieces, last rows, chunks and the chunks' tiles."""
        of_tokens = self.size * (3 if self.long_rope is None else 4)
        of_tiles = [4 * self.num_last, self._tile_width * self.num_tiles, 4 * self.num_pieces]
        return [of_tokens, *of_tiles, self.num_last, 4 * self.num_chunks, 2 * self.num_state_tiles]

    @property
    def _tile_width(self) -> int:
        return 5 if self.num_pieces else 4

    @property
    def num_state_tiles(self) -> int:
        """Tiles of chunks for layers with states: as many as for attention."""
        return self.num_tiles if self.num_chunks else 0

    def inputs(self, cells: Tensor) -> PackedInputs:
        """Views of the array ``[at least num_cells]``."""
        tokens, last_tiles, tiles, pieces, last_rows, chunks, state_tiles = cells[: self.num_cells].split(self._sizes)
        input_ids, rows, positions, *rotary_rows = tokens.view(-1, self.size)
        packed = PackedChunks(chunks.view(-1, 4), state_tiles.view(-1, 2))
        own = rotary_rows[0] if rotary_rows else None
        last_tiles, tiles, pieces = last_tiles.view(-1, 4), tiles.view(-1, self._tile_width), pieces.view(-1, 4)
        return PackedInputs(input_ids, rows, positions, own, last_tiles, tiles, pieces, last_rows, packed)


def pack(
    plan: PackedStep, slots: Slots, layout: Layout, tile_rows: int, shared: Sequence[SharedTile] | None = None
) -> np.ndarray:
    """The plan's tokens, tiles, last rows and chunks as int32, padded to ``layout``.

    Tiles are of one chunk each, unless chunks share those of ``shared``.
    """
    input_ids = np.zeros(layout.size, np.int32)
    rows = np.full(layout.size, -1, np.int32)
    positions = np.zeros(layout.size, np.int32)
    rotary_rows = np.zeros(layout.size if layout.long_rope else 0, np.int32)
    # Tiles of single rows: sequence, row, position, number of rows.
    sampled: list[tuple[int, int, int, int]] = []
    pooled: list[tuple[int, int, int, int]] = []
    first = 0
    for chunk in plan.chunks:
        slot, length = slots.slot_of[chunk.id], len(chunk.token_ids)
        end = first + length
        input_ids[first:end] = chunk.token_ids
        rows[first:end] = slot
        positions[first:end] = np.arange(chunk.start, chunk.end)
        if layout.long_rope is not None:
            rotary_rows[first:end] = layout.long_rope.rows(chunk, slots.specs[chunk.id])
        last = (slot, end - 1, chunk.end - 1, 1)
        if chunk.samples:
            sampled.append(last)
        if chunk.pools:
            pooled.append(last)
        first = end
    last_tiles = sampled + pooled
    if not last_tiles and plan.chunks:
        # Kernels are launched for a row at least, and an attended one.
        last_tiles.append((slots.slot_of[plan.chunks[0].id], 0, plan.chunks[0].start, 1))
    padding = layout.num_last - len(last_tiles)
    last_rows = [row for _, row, _, _ in last_tiles + last_tiles[:1] * padding] or [0] * padding
    last_tiles += [(0, 0, 0, 0)] * padding
    parts = [input_ids, rows, positions, rotary_rows, np.array(last_tiles, np.int32).reshape(-1)]
    parts += [_pack_tiles(plan, slots, layout, tile_rows)] if shared is None else _pack_shared(shared, layout)
    parts.append(np.array(last_rows, np.int32))
    if layout.num_chunks:
        parts += _pack_chunks(plan, slots, layout, tile_rows)
    return np.concatenate(parts)


def _pack_tiles(plan: PackedStep, slots: Slots, layout: Layout, tile_rows: int) -> np.ndarray:
    """Tiles of one chunk each, see ``rosebatch_kernels.paged_attention.prefill``."""
    tiles: list[tuple[int, int, int, int]] = []
    first = 0
    for chunk in plan.chunks:
        slot, length = slots.slot_of[chunk.id], len(chunk.token_ids)
        for begin in range(0, length, tile_rows):
            tiles.append((slot, first + begin, chunk.start + begin, min(tile_rows, length - begin)))
        first += length
    # The longest first, so that the shortest programs start last.
    tiles.sort(key=lambda tile: -tile[2])
    tiles += [(0, 0, 0, 0)] * (layout.num_tiles - len(tiles))
    return np.array(tiles, np.int32).reshape(-1)


def _pack_shared(shared: Sequence[SharedTile], layout: Layout) -> list[np.ndarray]:
    """Tiles of several chunks, and their pieces, see ``rosebatch_kernels.paged_attention.prefill_shared``."""
    tiles: list[tuple[int, int, int, int, int]] = []
    pieces: list[tuple[int, int, int, int]] = []
    for first_row, keys, own in sorted(shared, key=lambda tile: -tile.pieces[-1].position):
        tiles.append((first_row, sum(piece.rows for piece in own), keys, len(pieces), len(own)))
        pieces += own
    tiles += [(0, 0, 0, 0, 0)] * (layout.num_tiles - len(tiles))
    pieces += [(0, 0, 0, 0)] * (layout.num_pieces - len(pieces))
    return [np.array(tiles, np.int32).reshape(-1), np.array(pieces, np.int32).reshape(-1)]


def _pack_chunks(plan: PackedStep, slots: Slots, layout: Layout, tile_rows: int) -> list[np.ndarray]:
    """The plan's chunks and their tiles, see ``PackedChunks``."""
    lengths = [len(chunk.token_ids) for chunk in plan.chunks]
    firsts = accumulate(lengths, initial=0)
    chunks = np.zeros((layout.num_chunks, 4), np.int32)
    for number, (chunk, first, length) in enumerate(zip(plan.chunks, firsts, lengths, strict=False)):
        chunks[number] = slots.state_of[slots.slot_of[chunk.id]], first, chunk.start, length
    tiles = [(number, begin) for number, length in enumerate(lengths) for begin in range(0, length, tile_rows)]
    tiles += [(-1, 0)] * (layout.num_state_tiles - len(tiles))
    return [chunks.reshape(-1), np.array(tiles, np.int32).reshape(-1)]
