"""What the host tells the device, cell by cell."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rosebatch.engine.plan import Chunk, StepPlan
from rosebatch.engine.triton_runner.slots import Slots, batch_buckets
from rosebatch.request import Status
from rosebatch_kernels.feedback import layout

ROOT = Path(__file__).resolve().parents[2]
SLOTS, WIDTH = 4, 3


def cell(field, slot):
    return field * SLOTS + slot


def block_cells(slot, **blocks):
    """Cells of a row of the block table: ``_1=7`` is block 7 at index 1."""
    start = layout.NUM_FIELDS * SLOTS + slot * WIDTH
    return {start + int(index[1:]): block for index, block in blocks.items()}


def prompt(sequence, blocks, samples=True, start=0):
    """A plan's chunk of the rest of a sequence's tokens, which lie in these blocks."""
    sequence.block_ids = list(blocks)
    return Chunk(sequence, start, len(sequence.token_ids) - start, samples)


def decodes(*sequences, steps=1, preempted=()):
    chunks = tuple(Chunk(sequence, len(sequence.token_ids), steps, samples=True) for sequence in sequences)
    return StepPlan(chunks, preempted=preempted, decode_steps=steps)


@pytest.fixture
def filled(make_sequence):
    """Four sequences of three tokens, in slots 0 to 3 and blocks 10 to 13."""
    slots = Slots(SLOTS, WIDTH)
    sequences = [make_sequence([1, 2, 3], index=i) for i in range(SLOTS)]
    slots.update(StepPlan(tuple(prompt(s, [10 + i]) for i, s in enumerate(sequences))))
    assert list(slots.slot_of.values()) == [0, 1, 2, 3]
    return slots, sequences


def test_slots_do_not_import_torch():
    code = "import sys, rosebatch.engine.triton_runner.slots; sys.exit('torch' in sys.modules)"
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    assert subprocess.run([sys.executable, "-c", code], env=path, check=False).returncode == 0


def test_bucket_sizes():
    assert batch_buckets(1) == (1,)
    assert batch_buckets(3) == (1, 2, 3)
    assert batch_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert batch_buckets(65)[-2:] == (64, 65)
    assert batch_buckets(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


@pytest.mark.parametrize("most", [1, 2, 63, 64, 200, 256, 1000])
def test_buckets_are_ordered_and_hold_every_batch(most):
    """A bucket above the last slot would read past the state, none at all would stop the run."""
    sizes = batch_buckets(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == most


def test_everything_about_a_prompt_that_samples(make_sequence):
    """Each field once: a seed above 2^63 and a top-k above int32 in 32-bit words, reals as their bits."""
    slots = Slots(SLOTS, WIDTH)
    sampling = {"temperature": 0.7, "top_k": 2**40, "top_p": 0.9, "min_p": 0.05, "seed": 2**64 - 2**32 + 2**31 - 1}
    sampling |= {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.1, "min_tokens": 4}
    sequence = make_sequence([4, 5, 6, 7, 8], 6, **sampling)
    write = slots.update(StepPlan((prompt(sequence, [30, 20]),)))
    assert write.moves == []
    assert write.cells == {
        cell(layout.POSITION, 0): 4,
        cell(layout.NEXT, 0): 5,
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


def test_chunks_of_a_prompt_tell_their_blocks_and_the_last_one_the_rest(make_sequence):
    slots = Slots(SLOTS, WIDTH)
    sequence = make_sequence(range(9), 2, ignore_eos=True)
    first = slots.update(StepPlan((Chunk(prompt(sequence, [5]).sequence, 0, 4, samples=False),)))
    assert first.cells == block_cells(0, _0=5)
    last = slots.update(StepPlan((prompt(sequence, [5, 6, 7], start=4),)))
    expected = {layout.POSITION: 8, layout.NEXT: 9, layout.LIMIT: 10, layout.STOPS: 0}
    assert (
        last.cells.items()
        >= ({cell(f, 0): value for f, value in expected.items()} | block_cells(0, _1=6, _2=7)).items()
    )
    assert len(last.cells) == layout.NUM_FIELDS - 1 + 2, "the token is the device's own"


def test_decodes_tell_new_blocks_and_nothing_else(filled):
    slots, sequences = filled
    assert slots.update(decodes(*sequences)) == slots.update(decodes(*sequences))
    sequences[1].block_ids.append(40)
    sequences[3].block_ids[0] = 41
    write = slots.update(decodes(*sequences, steps=4))
    assert write.moves == []
    assert write.cells == block_cells(1, _1=40) | block_cells(3, _0=41)
    assert slots.update(decodes(*sequences)).cells == {}


@pytest.mark.parametrize("status", [Status.FINISHED, Status.ENDING])
def test_a_finished_sequence_leaves_its_slot(status, filled, make_sequence):
    """It must not be decoded on: its blocks are another's by now. The next prompt takes the lowest free slot."""
    slots, sequences = filled
    for index in (2, 0):
        sequences[index].status = status
        sequences[index].block_ids = []
    newcomer = make_sequence([1, 2], index=9)
    write = slots.update(StepPlan((prompt(newcomer, [10, 50], samples=False),)))
    assert slots.slot_of == {sequences[1]: 1, sequences[3]: 3, newcomer: 0}
    # The device knows block 10 of this row already.
    assert write.cells == {cell(layout.LIMIT, 0): 0, cell(layout.LIMIT, 2): 0} | block_cells(0, _1=50)


def test_a_slot_taken_over_at_once_is_live_again(filled, make_sequence):
    """The limit of 0 of the one that left must not outlast the newcomer's."""
    slots, sequences = filled
    sequences[0].status = Status.FINISHED
    write = slots.update(StepPlan((prompt(make_sequence([1, 2], 5), [60]),)))
    assert write.cells[cell(layout.LIMIT, 0)] == 2 + 5 - 1


def test_a_preempted_sequence_leaves_its_slot_and_is_told_anew(filled):
    slots, sequences = filled
    write = slots.update(decodes(*sequences[:3], preempted=(sequences[3],)))
    assert write.cells == {cell(layout.LIMIT, 3): 0}
    assert sequences[3] not in slots.slot_of
    sequences[0].status = Status.FINISHED
    sequences[3].token_ids += [7, 8]
    write = slots.update(StepPlan((prompt(sequences[3], [33]),)))
    assert slots.slot_of[sequences[3]] == 0
    assert write.cells[cell(layout.POSITION, 0)] == 4
    assert write.cells.items() >= block_cells(0, _0=33).items()


def test_preempted_before_it_ever_had_a_slot(filled, make_sequence):
    slots, sequences = filled
    assert slots.update(decodes(*sequences, preempted=(make_sequence([1]),))).cells == {}


def test_the_bucket_follows_the_last_slot(filled):
    slots, sequences = filled
    chunks = decodes(*sequences).chunks
    assert slots.bucket(chunks) == 4
    assert slots.bucket(chunks[:1]) == 1
    assert slots.bucket(chunks[1:3]) == 4
    assert slots.bucket((chunks[1], chunks[0])) == 2


def test_last_rows_move_into_gaps_of_a_smaller_bucket(filled):
    """Blocks move along, so that only what is new is told afterwards; the row left behind is not decoded."""
    slots, sequences = filled
    sequences[0].status = sequences[2].status = Status.FINISHED
    sequences[3].block_ids.append(70)
    write = slots.update(decodes(sequences[1], sequences[3]))
    assert write.moves == [(3, 0)]
    # Row 0 takes row 3's limit with the move, which comes first: no cell may end it after that.
    assert write.cells == {cell(layout.LIMIT, 2): 0, cell(layout.LIMIT, 3): 0} | block_cells(0, _1=70)
    assert slots.slot_of == {sequences[1]: 1, sequences[3]: 0}
    assert slots.bucket(decodes(sequences[1], sequences[3]).chunks) == 2
    assert slots.update(decodes(sequences[1], sequences[3])).cells == {}


def test_a_row_that_was_moved_away_is_told_what_differs(filled, make_sequence):
    """Knowledge of blocks is each row's own: the source of a move still holds what it held."""
    slots, sequences = filled
    sequences[0].status = sequences[2].status = Status.FINISHED
    slots.update(decodes(sequences[1], sequences[3]))
    sequences[3].block_ids.append(70)
    slots.update(decodes(sequences[1], sequences[3]))
    second, third = make_sequence([1], index=8), make_sequence([2], index=9)
    write = slots.update(StepPlan((prompt(second, [12], samples=False), prompt(third, [13, 71], samples=False))))
    assert (slots.slot_of[second], slots.slot_of[third]) == (2, 3)
    assert write.cells == block_cells(3, _1=71)


def test_nothing_moves_where_it_would_not_help(filled):
    slots, sequences = filled
    sequences[0].status = Status.FINISHED
    # Three of four rows need the largest bucket anyway.
    assert slots.update(decodes(*sequences[1:])).moves == []
    # One decoded beside two that stand by: slot 0 is free, and one row fits a bucket of one.
    assert slots.update(decodes(sequences[3])).moves == [(3, 0)]
    # Two decoded, in rows 0 and 2, and row 1 is held by the third: no gap in the bucket of two.
    write = slots.update(decodes(sequences[3], sequences[2]))
    assert (write.moves, write.cells) == ([], {})
    assert slots.bucket(decodes(sequences[3], sequences[2]).chunks) == 4
