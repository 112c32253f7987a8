"""What the host writes to the device's state, cell by cell."""

import struct
from array import array

import pytest

from rosebatch.engine.long_rope import LongRope
from rosebatch.engine.plan import Chunk, DecodeRow, DecodeWindow, PackedStep
from rosebatch.engine.triton_runner.slots import Slots, batch_buckets
from rosebatch_kernels.feedback import layout
from tests.engine.fake_runner import make_sequence, told

SLOTS, WIDTH = 4, 3


def cell(field, slot):
    return field * SLOTS + slot


def block_cells(slot, **blocks):
    """Cells of a row of the block table: ``_1=7`` is block 7 at index 1."""
    start = layout.NUM_FIELDS * SLOTS + slot * WIDTH
    return {start + int(index[1:]): block for index, block in blocks.items()}


def prompts(*sequences, blocks, sampled=1, **changes):
    """A plan that computes all tokens of sequences it starts. ``blocks`` has the block ids of each."""
    work = zip(sequences, blocks, strict=True)
    chunks = (Chunk(s.id, 0, s.token_ids, sampled, ((0, 0, tuple(ids)),)) for s, ids in work)
    return PackedStep(chunks=tuple(chunks), started=tuple(s.spec for s in sequences), **changes)


def decodes(*ids, steps=1, blocks=None, **changes):
    """A plan that decodes sequences of three tokens. ``blocks`` has changes of block tables, by sequence id."""
    rows = (DecodeRow(sequence_id, 3, steps, (blocks or {}).get(sequence_id, ())) for sequence_id in ids)
    return DecodeWindow(rows=tuple(rows), steps=steps, **changes)


@pytest.fixture
def filled():
    """Sequences 0 to 3 of three tokens, in slots 0 to 3 and blocks 10 to 13."""
    slots = Slots(SLOTS, WIDTH)
    sequences = [make_sequence([1, 2, 3], id=i) for i in range(SLOTS)]
    slots.update(prompts(*sequences, blocks=[[10], [11], [12], [13]]))
    assert slots.slot_of == {0: 0, 1: 1, 2: 2, 3: 3}
    return slots, sequences


def test_decode_steps_end_where_a_sequence_starts_over():
    """On the device a row went on to its last token, with short factors behind the trained length."""
    slots = Slots(SLOTS, WIDTH)
    sequences = [make_sequence([1, 2, 3], max_tokens=n, id=i) for i, n in enumerate((10, 3, 10))]
    for sequence, known in zip(sequences, (3, 3, 7), strict=True):
        sequence.restart(LongRope(6, 20).spec_for(sequence.spec, known))
    cells = told(slots.update(prompts(*sequences, blocks=[[10], [11], [12]])))
    assert [cells[cell(layout.LIMIT, slot)] for slot in range(3)] == [6, 5, 12]


def test_bucket_sizes():
    assert batch_buckets(1) == (1,)
    assert batch_buckets(3) == (1, 2, 3)
    assert batch_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert batch_buckets(65)[-2:] == (64, 65)
    assert batch_buckets(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


@pytest.mark.parametrize("limit", [1, 2, 63, 64, 200, 256, 1000])
def test_buckets_are_ordered_and_hold_every_batch(limit):
    """A bucket above the last slot would read past the state, none at all would stop the run."""
    sizes = batch_buckets(limit)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == limit


def test_everything_about_a_prompt_that_samples():
    """Each field once: a seed above 2^63 and a top-k above int32 in 32-bit words, reals as their bits."""
    slots = Slots(SLOTS, WIDTH)
    sampling = {"temperature": 0.7, "top_k": 2**40, "top_p": 0.9, "min_p": 0.05, "seed": 2**64 - 2**32 + 2**31 - 1}
    sampling |= {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.1, "min_tokens": 4}
    write = slots.update(prompts(make_sequence([4, 5, 6, 7, 8], 6, **sampling), blocks=[[30, 20]]))
    assert write.moves == []
    assert told(write) == {
        cell(layout.POSITION, 0): 4,
        cell(layout.NEXT, 0): 5,
        cell(layout.ADJUSTS, 0): 1,
        cell(layout.LIMIT, 0): 10,
        cell(layout.STOPS, 0): 1,
        cell(layout.TEMPERATURE, 0): struct.unpack("i", struct.pack("f", 0.7))[0],
        cell(layout.TOP_K, 0): 2**31 - 1,
        cell(layout.TOP_P, 0): struct.unpack("i", struct.pack("f", 0.9))[0],
        cell(layout.MIN_P, 0): struct.unpack("i", struct.pack("f", 0.05))[0],
        cell(layout.SEED_LOW, 0): 2**31 - 1,
        cell(layout.SEED_HIGH, 0): -1,
        cell(layout.PRESENCE, 0): struct.unpack("i", struct.pack("f", 0.5))[0],
        cell(layout.FREQUENCY, 0): struct.unpack("i", struct.pack("f", -0.25))[0],
        cell(layout.REPETITION, 0): struct.unpack("i", struct.pack("f", 1.1))[0],
        cell(layout.MIN_POSITION, 0): 5 + 4,
        **block_cells(0, _0=30, _1=20),
    }


def test_no_seed_is_seed_0():
    write = Slots(SLOTS, WIDTH).update(prompts(make_sequence([1], temperature=1.0), blocks=[[5]]))
    cells = told(write)
    assert (cells[cell(layout.SEED_LOW, 0)], cells[cell(layout.SEED_HIGH, 0)]) == (0, 0)


def test_chunks_of_a_prompt_write_their_blocks_and_the_last_one_the_rest():
    slots = Slots(SLOTS, WIDTH)
    sequence = make_sequence(range(9), 2, ignore_eos=True)
    chunk = Chunk(0, 0, array("I", range(4)), 0, ((0, 0, (5,)),))
    assert told(slots.update(PackedStep(chunks=(chunk,), started=(sequence.spec,)))) == block_cells(0, _0=5)
    last = slots.update(PackedStep(chunks=(Chunk(0, 4, array("I", range(4, 9)), 1, ((0, 1, (6, 7)),)),)))
    fields = {layout.POSITION: 8, layout.NEXT: 9, layout.LIMIT: 10, layout.STOPS: 0}
    expected = {cell(field, 0): value for field, value in fields.items()} | block_cells(0, _1=6, _2=7)
    assert told(last).items() >= expected.items()
    assert len(told(last)) == layout.NUM_FIELDS - 2 + 2, "the token is the device's own, and the place of states stays"


def test_decodes_write_new_blocks_and_nothing_else(filled):
    slots, _ = filled
    write = slots.update(decodes(0, 1, 2, 3))
    assert (write.moves, write.cells) == ([], {})
    write = slots.update(decodes(0, 1, 2, 3, steps=4, blocks={1: ((0, 1, (40,)),), 3: ((0, 1, (41, 42)),)}))
    assert (write.moves, write.cells) == ([], {})
    assert write.rollovers == block_cells(1, _1=40) | block_cells(3, _1=41, _2=42)


def test_a_copied_block_is_no_rollover(filled):
    """The first of several completions copies the last block of its prompt: that block was not full."""
    slots, _ = filled
    write = slots.update(
        decodes(0, 1, blocks={0: ((0, 0, (40,)), (0, 1, (41,))), 1: ((0, 1, (42,)),)}, copies=((0, 10, 40),))
    )
    assert write.cells == block_cells(0, _0=40)
    assert write.rollovers == block_cells(0, _1=41) | block_cells(1, _1=42)


def test_a_released_sequence_leaves_its_slot(filled):
    """It must not be decoded on: its blocks are another's by now. The next prompt takes the lowest free slot."""
    slots, _ = filled
    newcomer = make_sequence([1, 2], id=9)
    write = slots.update(prompts(newcomer, blocks=[[10, 50]], sampled=0, released=(2, 0)))
    assert slots.slot_of == {1: 1, 3: 3, 9: 0}
    assert slots.specs.keys() == {1, 3, 9} and slots.specs[9] is newcomer.spec
    assert told(write) == {cell(layout.LIMIT, 0): 0, cell(layout.LIMIT, 2): 0} | block_cells(0, _0=10, _1=50)


def test_a_slot_taken_over_at_once_is_live_again(filled):
    """The limit of 0 of the one that left must not outlast the newcomer's."""
    slots, _ = filled
    write = slots.update(prompts(make_sequence([1, 2], 5, id=9), blocks=[[60]], released=(0,)))
    assert told(write)[cell(layout.LIMIT, 0)] == 2 + 5 - 1


def test_a_preempted_sequence_leaves_its_slot_and_is_told_anew(filled):
    slots, sequences = filled
    write = slots.update(decodes(0, 1, 2, released=(3,), num_preempted=1))
    assert told(write) == {cell(layout.LIMIT, 3): 0} and 3 not in slots.slot_of
    sequences[3].generated.extend([7, 8])
    write = slots.update(prompts(sequences[3], blocks=[[33, 34]], released=(0,)))
    assert slots.slot_of[3] == 0
    assert told(write).items() >= ({cell(layout.POSITION, 0): 4} | block_cells(0, _0=33, _1=34)).items()


def test_a_sequence_that_comes_back_from_the_host(filled):
    """It decodes at once: no chunk tells the device of its last token, its place and its blocks."""
    slots, sequences = filled
    slots.update(decodes(0, 1, 2, released=(3,), num_preempted=1))
    row = DecodeRow(3, 4, 2, ((0, 0, (33, 34)),), (7, 8))
    write = slots.update(DecodeWindow(rows=(row,), steps=2, started=(sequences[3].spec,), released=(0, 1)))
    assert slots.slot_of[3] == 0
    fields = {layout.TOKEN: 8, layout.POSITION: 4, layout.NEXT: 5, layout.LIMIT: 3 + 100 - 1}
    assert told(write).items() >= {cell(field, 0): value for field, value in fields.items()}.items()
    assert write.rollovers == block_cells(0, _0=33, _1=34)


def test_the_bucket_follows_the_last_slot(filled):
    slots, _ = filled
    assert [slots.bucket(ids) for ids in ([0, 1, 2, 3], [0], [1, 2], [1, 0])] == [4, 1, 4, 2]


def test_last_rows_move_into_gaps_of_a_smaller_bucket(filled):
    """Blocks move along, so that only what is new is told afterwards; the row left behind is not decoded."""
    slots, _ = filled
    write = slots.update(decodes(1, 3, blocks={3: ((0, 1, (70,)),)}, released=(0, 2)))
    assert write.moves == [(3, 0)]
    # Row 0 takes row 3's limit with the move, which comes first: no cell may end it after that.
    assert write.cells == {cell(layout.LIMIT, 2): 0, cell(layout.LIMIT, 3): 0, cell(layout.STATE, 3): 0}
    # Row 0 takes the place of row 3's states too, and leaves its own.
    assert slots.state_of == [3, 1, 2, 0]
    assert write.rollovers == block_cells(0, _1=70)
    assert (slots.slot_of, slots.bucket([1, 3])) == ({1: 1, 3: 0}, 2)
    write = slots.update(decodes(1, 3))
    assert (write.moves, write.cells) == ([], {})


def test_a_row_that_was_moved_away_is_free(filled):
    """Two newcomers take the slots of the one that finished and of the one that moved, and are told all they need."""
    slots, _ = filled
    slots.update(decodes(1, 3, released=(0, 2)))
    second, third = make_sequence([1], id=8), make_sequence([2], id=9)
    write = slots.update(prompts(second, third, blocks=[[12], [13, 71]], sampled=0))
    assert (slots.slot_of[8], slots.slot_of[9]) == (2, 3)
    assert told(write) == block_cells(2, _0=12) | block_cells(3, _0=13, _1=71)


def test_nothing_moves_where_it_would_not_help(filled):
    slots, _ = filled
    # Three of four rows need the largest bucket anyway.
    assert slots.update(decodes(1, 2, 3, released=(0,))).moves == []
    # One decoded beside two that stand by: slot 0 is free, and one row fits a bucket of one.
    assert slots.update(decodes(3)).moves == [(3, 0)]
    # Two decoded, in rows 0 and 2, and row 1 is held by the third: no gap in the bucket of two.
    write = slots.update(decodes(3, 2))
    assert (write.moves, write.cells) == ([], {})
    assert slots.bucket([3, 2]) == 4


def test_a_reset_frees_all_slots(filled):
    """Whatever an interrupted plan has left: no old row is decoded on, and the newcomer is live."""
    slots, _ = filled
    # As after an interruption between a plan's release and its start.
    slots.slot_of.pop(2)
    newcomer = make_sequence([1, 2], 5, id=9)
    write = slots.update(prompts(newcomer, blocks=[[10]], reset=True))
    assert (slots.slot_of, slots.specs) == ({9: 0}, {9: newcomer.spec})
    assert [told(write)[cell(layout.LIMIT, slot)] for slot in range(SLOTS)] == [2 + 5 - 1, 0, 0, 0]
    slots.update(prompts(*[make_sequence([1], id=20 + i) for i in range(3)], blocks=[[1], [2], [3]]))
    assert slots.slot_of == {9: 0, 20: 1, 21: 2, 22: 3}
