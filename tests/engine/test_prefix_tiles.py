"""Tiles that short chunks share: exact cases, and that each token of a step is in one tile."""

import random
from array import array
from itertools import islice

import numpy as np
import torch

from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.plan import Chunk, PackedStep, SequenceSpec
from rosebatch.engine.triton_runner.packing import Layout, pack
from rosebatch.engine.triton_runner.prefix_tiles import group_tiles
from rosebatch.engine.triton_runner.slots import Slots

BLOCK, ROWS = 64, 64


def step(*chunks):
    """Chunks ``(start, tokens, blocks)`` in slots of their number, with block tables that begin with these blocks."""
    slots = Slots(len(chunks), 40, keeps_tables=True)
    slots.tables[:] = np.arange(slots.tables.size).reshape(slots.tables.shape) + 1000
    made = []
    for number, (start, tokens, blocks) in enumerate(chunks):
        slots.slot_of[number] = number
        slots.specs[number] = SequenceSpec(number, (1,), SamplingParams(), 5000)
        slots.tables[number, : len(blocks)] = blocks
        made.append(Chunk(number, start, array("I", range(tokens)), sampled=1))
    return PackedStep(chunks=tuple(made)), slots


def shared(*chunks):
    plan, slots = step(*chunks)
    tiles = group_tiles(plan, slots, BLOCK, ROWS)
    if tiles is None:
        return None
    pieces = iter(map(tuple, tiles.pieces.tolist()))
    by_tile = zip(tiles.firsts.tolist(), tiles.shared.tolist(), tiles.counts.tolist(), strict=True)
    return [(first, keys, list(islice(pieces, count))) for first, keys, count in by_tile]


def test_short_chunks_fill_tiles():
    """The third goes on in the next tile."""
    long = range(5)
    assert shared((320, 30, long), (330, 30, long), (320, 30, long), (400, 2, [*long, 9]), (384, 1, [*long, 9])) == [
        (0, 320, [(0, 0, 30, 320), (1, 30, 30, 330), (2, 60, 4, 320)]),
        (64, 320, [(2, 0, 26, 324), (3, 26, 2, 400), (4, 28, 1, 384)]),
    ]


def test_tiles_share_what_their_pieces_have_in_common():
    """Examples behind a system prompt, and behind those the system prompt alone."""
    system, examples = range(5), range(9)
    tiles = shared((576, 9, examples), (600, 9, examples), (330, 9, system), (331, 9, system))
    assert tiles == [(0, 320, [(0, 0, 9, 576), (1, 9, 9, 600), (2, 18, 9, 330), (3, 27, 9, 331)])]


def test_others_do_not_join():
    """Too little in common, or nothing; what is left over is joined by the next that can."""
    long, other = range(5), range(10, 15)
    tiles = shared(*[(320, 9, long)] * 3, *[(320, 9, other)] * 3, (320, 9, [10, 11]))
    assert [(keys, len(pieces)) for _, keys, pieces in tiles] == [(320, 3), (320, 3), (320, 1)]


def test_full_tiles_are_left_as_they_are():
    """Nothing is gained by other tiles."""
    long = range(5)
    for chunk, count in ((320, 64, long), 4), ((320, 60, long), 4), ((200, 10, range(3)), 4), ((0, 10, ()), 2):
        assert shared(*[chunk] * count) is None
    assert shared((320, 10, long)) is None


def test_every_token_is_in_one_tile():
    """As the kernel gets them: the row, slot and position of each token, and shared keys that all pieces have."""
    checked = 0
    for seed in range(100):
        rng = random.Random(seed)
        prefixes = [range(rng.randint(4, 8)), [*range(4), *range(50, 60)], range(90, 97), ()]
        chunks = [
            (len(blocks) * BLOCK + rng.randint(0, 90), rng.choice([1, 9, 30, 70, 200]), blocks)
            for blocks in sorted(rng.choices(prefixes, k=rng.randint(2, 40)), key=len)
        ]
        plan, slots = step(*chunks)
        tiles = group_tiles(plan, slots, BLOCK, ROWS)
        if tiles is None:
            continue
        padded = Layout.padded(plan.num_tokens + 20, ROWS, len(chunks), shares=True)
        for layout in Layout.exact(plan, ROWS, shared=tiles), padded:
            inputs = layout.inputs(torch.from_numpy(pack(plan, slots, layout, ROWS, tiles)))
            found = {}
            for first_row, count, keys, first, pieces in inputs.tiles.tolist():
                begin = 0
                for slot, place, rows, position in inputs.pieces[first : first + pieces].tolist():
                    assert place == begin and keys <= position
                    other = inputs.pieces[first, 0]
                    assert (slots.tables[slot, : keys // BLOCK] == slots.tables[other, : keys // BLOCK]).all()
                    found |= {first_row + place + row: (slot, position + row) for row in range(rows)}
                    begin += rows
                assert begin == count <= ROWS
            expected = zip(inputs.rows.tolist(), inputs.positions.tolist(), strict=True)
            assert found == dict(list(enumerate(expected))[: plan.num_tokens])
            checked += 1
    assert checked > 50
