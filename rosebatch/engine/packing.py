"""The inputs of a step over packed chunks as one array, so that one copy brings them to the device."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from rosebatch.engine.plan import StepPlan
from rosebatch.engine.slots import Slots

# Steps of more tokens keep a GPU busy for longer than Python needs to launch them; they are not padded.
MOST_PADDED_TOKENS = 16384


def padded_size(num_tokens: int) -> int:
    """The number of tokens that a step is padded to, at most an eighth more than it has; few, so that graphs recur."""
    if num_tokens > MOST_PADDED_TOKENS:
        return num_tokens
    unit = max(16, (1 << num_tokens.bit_length()) // 16)
    return -(-num_tokens // unit) * unit


class PackedInputs(NamedTuple):
    """What the forward pass of a packed step reads.

    Attributes:
        input_ids, rows, positions: ``[T]`` int32; a token that is padding has row -1.
        tiles: ``[N, 4]`` int32, see ``rosebatch_kernels.paged_attention.prefill``; padding has no rows.
    """

    input_ids: Tensor
    rows: Tensor
    positions: Tensor
    tiles: Tensor

    @classmethod
    def of(cls, cells: Tensor, size: int) -> "PackedInputs":
        """Views of the array that ``pack`` makes for ``size`` tokens."""
        input_ids, rows, positions = cells[: 3 * size].view(3, size)
        return cls(input_ids, rows, positions, cells[3 * size :].view(-1, 4))


def pack(plan: StepPlan, slots: Slots, size: int, num_tiles: int, tile_rows: int) -> np.ndarray:
    """A plan's tokens and tiles, ``[3 · size + 4 · num_tiles]`` int32, padded to at least so many of each."""
    input_ids = np.zeros(size, np.int32)
    rows = np.full(size, -1, np.int32)
    positions = np.zeros(size, np.int32)
    tiles: list[tuple[int, int, int, int]] = []
    first = 0
    for chunk in plan.chunks:
        slot, end = slots.slot_of[chunk.sequence], first + chunk.length
        input_ids[first:end] = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]
        rows[first:end] = slot
        positions[first:end] = np.arange(chunk.start, chunk.start + chunk.length)
        for begin in range(0, chunk.length, tile_rows):
            tiles.append((slot, first + begin, chunk.start + begin, min(tile_rows, chunk.length - begin)))
        first = end
    # The longest first: the last programs to start should be the shortest.
    tiles.sort(key=lambda tile: -tile[2])
    tiles += [(0, 0, 0, 0)] * (num_tiles - len(tiles))
    return np.concatenate((input_ids, rows, positions, np.array(tiles, np.int32).reshape(-1)))


def last_rows(plan: StepPlan, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
    """Of each chunk that samples, the row of its last token and its slot."""
    ends = np.cumsum([chunk.length for chunk in plan.chunks])
    sampling = [i for i, chunk in enumerate(plan.chunks) if chunk.samples]
    columns = [slots.slot_of[plan.chunks[i].sequence] for i in sampling]
    return (ends[sampling] - 1).astype(np.int32), np.array(columns, np.int32)
