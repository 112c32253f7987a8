"""The inputs of a packed step as one array, so that one copy brings them to the device."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rosebatch.engine.plan import PackedStep, RestartPolicy
from rosebatch.engine.triton_runner.prefix_tiles import PrefixTiles
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.ops.ops import PackedChunks

# Larger steps are not padded: they keep a GPU busy for longer than Python needs to launch them.
MAX_PADDED_TOKENS = 16384


def padded_size(num_tokens: int) -> int:
    """The size that a step of at most ``MAX_PADDED_TOKENS`` is padded to. There are few sizes, so that graphs recur.

    Padding adds an eighth at most, or 15 tokens.
    """
    assert num_tokens <= MAX_PADDED_TOKENS, "such steps are not padded"
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
        last_rows: ``[S]`` int32, the row of the last token of each of the plan's ``read_numbers``, of the first token
            for ``cls``; then the first of these again. Any row, if there is none.
        chunks: the same chunks for layers with states or whole prompts; empty for a model without them.
    """

    input_ids: Tensor
    rows: Tensor
    positions: Tensor
    rotary_rows: Tensor | None
    last_tiles: Tensor
    tiles: Tensor
    pieces: Tensor
    last_rows: Tensor
    chunks: PackedChunks


@dataclass(frozen=True, slots=True)
class Layout:
    """Room for tokens, tiles, last rows, and chunks if layers go by these, in an array of packed inputs.

    With ``restarts``, tokens have rows of the rotary tables too. With ``num_pieces``, chunks share tiles.
    """

    size: int
    num_tiles: int
    num_last: int
    num_chunks: int = 0
    restarts: RestartPolicy | None = None
    num_pieces: int = 0

    @classmethod
    def exact(
        cls,
        plan: PackedStep,
        tile_rows: int,
        *,
        with_chunks: bool = False,
        restarts: RestartPolicy | None = None,
        shared: PrefixTiles | None = None,
    ) -> "Layout":
        """No more room than the plan needs."""
        num_tiles = sum(-(-len(chunk.token_ids) // tile_rows) for chunk in plan.chunks)
        num_chunks = len(plan.chunks) if with_chunks else 0
        # Kernels are launched for a row at least.
        num_last = max(1, len(plan.read_numbers))
        num_pieces = 0
        if shared is not None:
            num_tiles, num_pieces = len(shared.firsts), len(shared.pieces)
        return cls(plan.num_tokens, num_tiles, num_last, num_chunks, restarts, num_pieces)

    @classmethod
    def padded(
        cls,
        size: int,
        tile_rows: int,
        num_slots: int,
        *,
        with_chunks: bool = False,
        restarts: RestartPolicy | None = None,
        shares: bool = False,
    ) -> "Layout":
        """Room for ``size`` tokens, whatever sequences they belong to; ``shares`` if chunks share tiles."""
        limit = min(size, num_slots)
        num_tiles = size // tile_rows + limit
        # A piece begins with a chunk or with a tile.
        num_pieces = num_tiles + limit if shares else 0
        return cls(size, num_tiles, limit, limit if with_chunks else 0, restarts, num_pieces)

    @property
    def num_cells(self) -> int:
        """Length of the array."""
        return sum(self._sizes)

    @property
    def width(self) -> int:
        """Cells of one number for each token. Parts begin at 16 bytes: elsewhere, Triton has kernels of their own."""
        return _round_up(self.size, 4)

    @property
    def _sizes(self) -> list[int]:
        """Cells of tokens, last tiles, tiles, pieces, last rows, chunks and the chunks' tiles."""
        of_tokens = self.width * (3 if self.restarts is None else 4)
        of_tiles = [4 * self.num_last, _round_up(self._tile_width * self.num_tiles, 4), 4 * self.num_pieces]
        of_states = [4 * self.num_chunks, _round_up(2 * self.num_state_tiles, 4)]
        return [of_tokens, *of_tiles, _round_up(self.num_last, 4), *of_states]

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
        input_ids, rows, positions, *rotary_rows = tokens.view(-1, self.width)[:, : self.size]
        packed = PackedChunks(chunks.view(-1, 4), state_tiles[: 2 * self.num_state_tiles].view(-1, 2))
        own = rotary_rows[0] if rotary_rows else None
        tiles = tiles[: self._tile_width * self.num_tiles].view(-1, self._tile_width)
        last_tiles, pieces = last_tiles.view(-1, 4), pieces.view(-1, 4)
        last_rows = last_rows[: self.num_last]
        return PackedInputs(input_ids, rows, positions, own, last_tiles, tiles, pieces, last_rows, packed)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


class _Chunks(NamedTuple):
    """Numbers of a plan's chunks, ``[N]`` int32 each: slot, first row in the step, first position, tokens."""

    slots: np.ndarray
    firsts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, plan: PackedStep, slots: Slots) -> "_Chunks":
        lengths = np.array([len(chunk.token_ids) for chunk in plan.chunks], np.int32)
        firsts = np.cumsum(lengths, dtype=np.int32) - lengths
        starts = np.array([chunk.start for chunk in plan.chunks], np.int32)
        return cls(np.array([slots.slot_of[chunk.id] for chunk in plan.chunks], np.int32), firsts, starts, lengths)

    def tiles(self, tile_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The number of each tile's chunk, and the tile's first token in it."""
        counts = -(-self.lengths // tile_rows)
        numbers = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        within = np.arange(len(numbers), dtype=np.int32) - (np.cumsum(counts) - counts)[numbers]
        return numbers, within * tile_rows


def pack(
    plan: PackedStep, slots: Slots, layout: Layout, tile_rows: int, shared: PrefixTiles | None = None
) -> np.ndarray:
    """The plan's tokens, tiles, last rows and chunks as int32, padded to ``layout``.

    Tiles are of one chunk each, unless chunks share those of ``shared``.
    """
    chunks, packed = _Chunks.of(plan, slots), np.zeros(layout.num_cells, np.int32)
    count, end = int(chunks.lengths.sum()), layout.width * (3 if layout.restarts is None else 4)
    input_ids, rows, positions, *rotary_rows = packed[:end].reshape(-1, layout.width)
    input_ids[:count] = np.frombuffer(b"".join([chunk.token_ids for chunk in plan.chunks]), np.int32)
    rows[:count], rows[count:] = np.repeat(chunks.slots, chunks.lengths), -1
    positions[:count] = np.repeat(chunks.starts - chunks.firsts, chunks.lengths)
    positions[:count] += np.arange(count, dtype=np.int32)
    if layout.restarts is not None:
        for chunk, first, length in zip(plan.chunks, chunks.firsts, chunks.lengths, strict=True):
            rotary_rows[0][first : first + length] = layout.restarts.rotary_rows(chunk, slots.specs[chunk.id])
    last_tiles, last_rows = _pack_last(plan, chunks, slots, layout)
    parts = [last_tiles]
    parts += [_pack_tiles(chunks, layout, tile_rows)] if shared is None else _pack_shared(shared, layout)
    parts.append(last_rows)
    if layout.num_chunks:
        parts += _pack_chunks(chunks, slots, layout, tile_rows)
    for part in parts:
        packed[end : end + len(part)] = part
        end = _round_up(end + len(part), 4)
    return packed


def _pack_last(plan: PackedStep, chunks: _Chunks, slots: Slots, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """``last_tiles`` and ``last_rows``, see ``PackedInputs``."""
    wanted, last = plan.read_numbers, chunks.lengths - 1
    for number in plan.pooled_numbers:
        if slots.specs[plan.chunks[number].id].pooling == "cls":
            last[number] = 0
    if plan.chunks and not wanted:
        # Kernels are launched for a row at least, and an attended one.
        wanted, last = [0], np.zeros_like(last)
    ends = np.stack((chunks.slots, chunks.firsts + last, chunks.starts + last, np.ones_like(last)), 1)
    tiles, count = np.zeros((layout.num_last, 4), np.int32), len(wanted)
    tiles[:count] = ends[np.array(wanted, np.int32)]
    rows = tiles[:, 1].copy()
    rows[count:] = rows[0]
    return tiles.reshape(-1), rows


def _pack_tiles(chunks: _Chunks, layout: Layout, tile_rows: int) -> np.ndarray:
    """Tiles of one chunk each, see ``rosebatch_kernels.paged_attention.prefill``."""
    numbers, begins = chunks.tiles(tile_rows)
    slots, firsts, starts, lengths = (values[numbers] for values in chunks)
    positions = starts + begins
    own = np.stack((slots, firsts + begins, positions, np.minimum(tile_rows, lengths - begins)), 1)
    tiles = np.zeros((layout.num_tiles, 4), np.int32)
    # The longest first, so that the shortest programs start last.
    tiles[: len(own)] = own[np.argsort(-positions, kind="stable")]
    return tiles.reshape(-1)


def _pack_shared(shared: PrefixTiles, layout: Layout) -> list[np.ndarray]:
    """Tiles of several chunks, and their pieces, see ``rosebatch_kernels.paged_attention.prefill_shared``."""
    tiles, pieces = np.zeros((layout.num_tiles, 5), np.int32), np.zeros((layout.num_pieces, 4), np.int32)
    if count := len(shared.firsts):
        # As above, by their last pieces.
        own = shared.sorted(np.argsort(-shared.pieces[shared.counts.cumsum() - 1, 3], kind="stable"))
        begins = own.counts.cumsum() - own.counts
        tiles[:count] = np.stack((own.firsts, own.num_rows, own.shared, begins, own.counts), 1)
        pieces[: len(own.pieces)] = own.pieces
    return [tiles.reshape(-1), pieces.reshape(-1)]


def _pack_chunks(chunks: _Chunks, slots: Slots, layout: Layout, tile_rows: int) -> list[np.ndarray]:
    """The plan's chunks and their tiles, see ``PackedChunks``."""
    packed, tiles = np.zeros((layout.num_chunks, 4), np.int32), np.zeros((layout.num_state_tiles, 2), np.int32)
    states = np.array([slots.state_of[slot] for slot in chunks.slots], np.int32)
    packed[: len(states)] = np.stack((states, chunks.firsts, chunks.starts, chunks.lengths), 1)
    own = np.stack(chunks.tiles(tile_rows), 1)
    tiles[: len(own)], tiles[len(own) :] = own, (-1, 0)
    return [packed.reshape(-1), tiles.reshape(-1)]
