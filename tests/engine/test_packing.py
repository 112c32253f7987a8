"""Packed inputs: every token once, with its row and position; padding that no kernel acts on."""

from array import array
from itertools import product

import pytest
import torch

from rosebatch.engine.long_rope import LongRope
from rosebatch.engine.plan import Chunk, PackedStep
from rosebatch.engine.triton_runner.packing import MAX_PADDED_TOKENS, Layout, pack, padded_size
from rosebatch.engine.triton_runner.slots import Slots
from tests.engine.fake_runner import make_sequence


def chunk(sequence_id, start, length, sampled):
    """Token i of sequence s is 100 (s + 1) + i."""
    tokens = array("I", (100 * (sequence_id + 1) + i for i in range(start, start + length)))
    return Chunk(sequence_id, start, tokens, sampled)


def test_padded_sizes_are_few_and_near():
    sizes = [padded_size(n) for n in range(1, MAX_PADDED_TOKENS + 1)]
    assert all(n <= size <= max(n + 15, n * 1.125) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 64
    with pytest.raises(AssertionError, match="not padded"):
        padded_size(MAX_PADDED_TOKENS + 1)


def test_tokens_tiles_and_padding():
    plan, slots = PackedStep(chunks=(chunk(0, 4, 5, sampled=1), chunk(1, 0, 3, sampled=0))), Slots(3, 8)
    slots.slot_of = {0: 2, 1: 0}
    layout = Layout.padded(12, tile_rows=2, num_slots=3)
    assert (layout.num_tiles, layout.num_last) == (9, 3)
    inputs = layout.inputs(torch.from_numpy(pack(plan, slots, layout, tile_rows=2)))
    assert inputs.input_ids.tolist() == [104, 105, 106, 107, 108, 200, 201, 202, 0, 0, 0, 0]
    assert inputs.rows.tolist() == [2] * 5 + [0] * 3 + [-1] * 4
    assert inputs.positions.tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 0, 0, 0, 0]
    # Of the longest context first; slot, first row, its position, rows.
    tiles = [[2, 4, 8, 1], [2, 2, 6, 2], [2, 0, 4, 2], [0, 7, 2, 1], [0, 5, 0, 2]]
    assert inputs.tiles.tolist() == tiles + [[0] * 4] * 4
    # What is computed for nobody is computed of a row that attention has reached.
    assert inputs.last_rows.tolist() == [4, 4, 4]
    assert inputs.last_tiles.tolist() == [[2, 4, 8, 1], [0] * 4, [0] * 4]

    layout = Layout.exact(plan, tile_rows=2)
    inputs = layout.inputs(torch.from_numpy(pack(plan, slots, layout, tile_rows=2)))
    assert inputs.rows.tolist() == [2] * 5 + [0] * 3
    assert inputs.tiles.tolist() == tiles
    assert (inputs.last_rows.tolist(), inputs.last_tiles.tolist()) == ([4], [[2, 4, 8, 1]])


@pytest.mark.parametrize("states", [False, True])
def test_every_part_begins_at_16_bytes(states):
    """Others are kernels of their own to Triton: a step with an odd number of tokens compiled them in mid-run."""
    slots = Slots(5, 8)
    for count, length in product(range(1, 6), (1, 3, 7)):
        slots.slot_of = {number: number for number in range(count)}
        slots.state_of = {number: number for number in range(count)}
        plan = PackedStep(tuple(chunk(number, 0, length, sampled=1) for number in range(count)))
        layout = Layout.exact(plan, tile_rows=2, with_chunks=states)
        cells = torch.from_numpy(pack(plan, slots, layout, tile_rows=2))
        assert len(cells) == layout.num_cells
        inputs = layout.inputs(cells)
        for part in (*inputs[:3], inputs.last_tiles, inputs.tiles, inputs.last_rows, *inputs.chunks):
            assert (part.data_ptr() - cells.data_ptr()) % 16 == 0 or not len(part)


@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_the_rotary_tables(padded):
    """Long factors of the first positions follow all positions; other sequences have the row of each position."""
    plan = PackedStep(chunks=(chunk(0, 2, 4, sampled=1), chunk(1, 2, 4, sampled=0)))
    long_rope = LongRope(trained_len=4, max_len=20)
    specs = [long_rope.spec_for(make_sequence([1] * 9, id=i).spec, known) for i, known in enumerate((5, 4))]
    slots = Slots(3, 8)
    slots.slot_of, slots.specs = {0: 2, 1: 0}, {spec.id: spec for spec in specs}
    exact = Layout.exact(plan, tile_rows=2, restarts=long_rope)
    layout = Layout.padded(10, tile_rows=2, num_slots=3, restarts=long_rope) if padded else exact
    cells = pack(plan, slots, layout, tile_rows=2)
    assert len(cells) == layout.num_cells
    inputs = layout.inputs(torch.from_numpy(cells))
    assert inputs.rotary_rows.tolist() == [22, 23, 4, 5, 2, 3, 4, 5] + [0] * (2 * padded)
    assert inputs.positions.tolist()[:8] == [2, 3, 4, 5] * 2
    assert inputs.last_rows.tolist()[0] == 3


def test_there_is_room_for_any_division_of_the_tokens():
    """Each sequence may leave a tile part-filled."""
    for size in (16, 80, 200):
        for chunks in range(1, min(size, 100) + 1):
            lengths = [size // chunks + (i < size % chunks) for i in range(chunks)]
            assert sum(-(-n // 64) for n in lengths) <= Layout.padded(size, 64, 100).num_tiles


def test_no_chunk_samples():
    """Behind the last layer's attention, products are computed for a row at least."""
    slots = Slots(1, 8)
    slots.slot_of = {0: 0}
    plan = PackedStep(chunks=(chunk(0, 3, 5, sampled=0),))
    layout = Layout.exact(plan, tile_rows=4)
    inputs = layout.inputs(torch.from_numpy(pack(plan, slots, layout, tile_rows=4)))
    assert (inputs.last_rows.tolist(), inputs.last_tiles.tolist()) == ([0], [[0, 0, 3, 1]])
