"""Exact plans of prompts that are computed in chunks, and of those that may not be."""

import numpy as np
import pytest

from rosebatch.core.errors import RowError
from rosebatch.core.images import PromptImage
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.plan import StepResult
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState
from tests.engine.fake_runner import fake_completion, make_sequence
from tests.engine.schedulers import add, chunks, drain, make_scheduler, next_chunks, serving, step


def test_chunked_prefill_beside_a_running_decode(fake_runner):
    """The decode keeps its token in every step, the prompt takes what the budget leaves; it samples at its end."""
    scheduler, a = serving(make_sequence([1, 2, 3], 8, id=0), budget=5, prefix_cache=False)
    step(scheduler, fake_runner)
    (b,) = add(scheduler, make_sequence(range(10, 21), 2, id=1))
    assert next_chunks(scheduler, fake_runner, steps=5) == [
        [(0, 3, 1, 1), (1, 0, 4, 0)],
        [(0, 4, 1, 1), (1, 4, 4, 0)],
        [(0, 5, 1, 1), (1, 8, 3, 1)],
        [(0, 6, 1, 1), (1, 11, 1, 1)],
        [(0, 7, 1, 1)],
    ]
    done, _ = drain(scheduler, fake_runner)
    assert a.output_token_ids == fake_completion([1, 2, 3], 8)
    assert b.output_token_ids == fake_completion(range(10, 21), 2)
    assert done == {0: a.output_token_ids}


def test_chunks_end_where_blocks_do(fake_runner):
    """The last tile's keys are added up in an order that goes by its end: cut elsewhere, rows differed in 16 bit."""
    prompts = [make_sequence(range(length), 1, id=number) for number, length in enumerate((5, 10, 3, 2))]
    scheduler = make_scheduler(*prompts, budget=10, prefix_cache=False, replays=True)
    # Two tokens of room are no block: the third and what is left of the second wait for the next step.
    assert next_chunks(scheduler, fake_runner, steps=2) == [
        [(0, 0, 5, 1), (1, 0, 4, 0)],
        [(1, 4, 6, 1), (2, 0, 3, 1)],
    ]


def test_chunks_of_states_end_where_tiles_do_too(fake_runner):
    """A tile that begins elsewhere has other tokens, and other sums."""
    prompt = make_sequence(range(30), 1, id=0)
    scheduler = make_scheduler(prompt, budget=20, prefix_cache=False, replays=True, chunk_unit=6)
    assert next_chunks(scheduler, fake_runner, steps=2) == [[(0, 0, 12, 0)], [(0, 12, 18, 1)]]


def test_cached_prefixes_of_states_end_where_tiles_do_too(fake_runner):
    """A chunk behind a shorter prefix begins within a tile."""
    first, second = make_sequence(range(14), 1, id=0), make_sequence([*range(11), 1, 2], 1, id=1)
    scheduler = make_scheduler(first, replays=True, chunk_unit=6, block_size=4)
    step(scheduler, fake_runner)
    add(scheduler, second)
    third = make_sequence([*range(13), 5], 1, id=2)
    add(scheduler, third)
    # Eight tokens and twelve are cached.
    assert next_chunks(scheduler, fake_runner, steps=1) == [[(1, 0, 13, 1), (2, 12, 2, 1)]]


def test_a_short_prompt_serves_no_longer_one_that_tiles_divide_otherwise(fake_runner):
    """Its only tile ends early: with its blocks, and those of another prompt behind them, HP1 rows had other bits."""
    short, long, behind = (make_sequence(range(length), 1, id=id) for id, length in enumerate((7, 14, 26)))
    scheduler = make_scheduler(short, replays=True, exact_prefixes=True, chunk_unit=6, block_size=4)
    step(scheduler, fake_runner)
    found = []
    for sequence in (long, behind, make_sequence(range(7), 1, id=3)):
        add(scheduler, sequence)
        found += next_chunks(scheduler, fake_runner, steps=1)
    assert found == [[(1, 0, 14, 1)], [(2, 12, 14, 1)], [(3, 0, 7, 1)]]


def with_images(length, *places, id=0):
    """A prompt of so many tokens, with images at these places, whose tokens see each other."""
    images = tuple(
        PromptImage(begin, np.ones(end - begin, bool), (1, end - begin), bytes([begin]) * 32, None)
        for begin, end in places
    )
    request = Request(id, tuple(range(length)), SamplingParams(max_tokens=1), images=images)
    return SequenceState.start(request, id=id, max_model_len=1000)


def test_no_chunk_ends_inside_of_an_image(fake_runner):
    """Its first tokens would not have seen its last ones."""
    prompts = [with_images(30, (6, 16), (16, 20), (22, 30)), with_images(12, (0, 3), (5, 12), id=1)]
    scheduler = make_scheduler(*prompts, budget=10, prefix_cache=False, whole_images=True)
    assert next_chunks(scheduler, fake_runner, steps=6) == [
        [(0, 0, 6, 0)],
        [(0, 6, 10, 0)],
        # Two tokens of text, and no part of the image behind them.
        [(0, 16, 6, 0)],
        # Nor are the two left a part of the next prompt's.
        [(0, 22, 8, 1)],
        [(1, 0, 5, 0)],
        [(1, 5, 7, 1)],
    ]


def test_chunks_beside_images_end_where_tiles_do_too(fake_runner):
    """A multiple of the unit may be inside of an image, and the last one before the image behind it."""
    prompt = with_images(40, (6, 13), (13, 16), (21, 26), (31, 33))
    scheduler = make_scheduler(prompt, budget=14, prefix_cache=False, replays=True, whole_images=True)
    assert next_chunks(scheduler, fake_runner, steps=4) == [
        [(0, 0, 4, 0)],
        [(0, 4, 12, 0)],
        [(0, 16, 12, 0)],
        [(0, 28, 12, 1)],
    ]


@pytest.mark.parametrize(
    ("budget", "places", "told"),
    [
        (9, [(6, 16)], "an image has 10 tokens, and is computed in one step; --max-num-batched-tokens leaves 9"),
        (10, [(6, 16), (20, 30)], None),
        (9, [(30, 40)], "an image has 10 tokens, and is computed in one step; --max-num-batched-tokens leaves 9"),
        (40, [(0, 40)], None),
    ],
)
def test_an_image_that_no_step_has_room_for(budget, places, told):
    """Nothing was planned for it, and the run ended."""
    sequence = with_images(40, *places)
    scheduler = make_scheduler(budget=budget, whole_images=True)
    if told is None:
        scheduler.require_room(sequence.request)
        return
    with pytest.raises(RowError) as error:
        scheduler.require_room(sequence.request)
    assert (error.value.code, str(error.value)) == ("image_too_large", told)
    # Whole prompts are computed whole, and models whose tokens see none after them cut images.
    make_scheduler(budget=budget, whole_images=True, chunked_prefill=False).require_room(sequence.request)
    make_scheduler(budget=budget).require_room(sequence.request)


def test_images_between_which_no_chunk_ends():
    """The message said that an image of 5 tokens is too large for 6."""
    sequence = with_images(40, (2, 7), (7, 12))
    with pytest.raises(RowError) as error:
        make_scheduler(budget=6, replays=True, whole_images=True).require_room(sequence.request)
    told = "between images, no chunk ends at a multiple of 4 tokens; --max-num-batched-tokens leaves 6"
    assert (error.value.code, str(error.value)) == ("image_too_large", told)


def test_a_budget_below_a_block_cuts_it(fake_runner):
    """Else nothing would ever be planned."""
    scheduler = make_scheduler(make_sequence(range(5), 1, id=0), budget=3, prefix_cache=False, replays=True)
    assert next_chunks(scheduler, fake_runner, steps=2) == [[(0, 0, 3, 0)], [(0, 3, 2, 1)]]


def test_blocks_are_reserved_chunk_by_chunk(fake_runner):
    """A chunk reserves only what it writes: a long prompt must not hold blocks for later chunks."""
    scheduler, a = serving(make_sequence(range(14)), budget=5)
    held = []
    for _ in range(3):
        step(scheduler, fake_runner)
        held.append(list(a.block_ids))
    assert held == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_single_tokens_stand_before_chunks(fake_runner):
    """Decodes first, whatever the order of arrival: a one-token end of a prompt counts as a decode."""
    scheduler = make_scheduler(budget=8, prefix_cache=False)
    add(scheduler, make_sequence(range(7), id=0), make_sequence(range(20, 23), id=1))
    assert chunks(step(scheduler, fake_runner)[0]) == [(1, 0, 1, 0), (0, 0, 7, 1)]
    add(scheduler, make_sequence(range(30, 35), id=2))
    assert chunks(step(scheduler, fake_runner)[0]) == [(0, 7, 1, 1), (1, 1, 2, 1), (2, 0, 5, 1)]


def test_budget_smaller_than_the_running_decodes(fake_runner):
    """The oldest go on, the youngest wait for their turn, and everyone gets the right tokens."""
    scheduler = make_scheduler(budget=2, prefix_cache=False)
    add(scheduler, *(make_sequence([i], max_tokens=3, id=i) for i in range(3)))
    assert next_chunks(scheduler, fake_runner, steps=2) == [[(0, i, 1, 1), (1, i, 1, 1)] for i in range(2)]
    done, _ = drain(scheduler, fake_runner)
    assert done == {i: fake_completion([i], 3) for i in range(3)}


def test_prompt_that_fills_the_whole_cache(fake_runner):
    """The last free block is the copy that a prompt cached to its end needs: the engine must not get stuck."""
    scheduler = make_scheduler(*(make_sequence(range(8), max_tokens=4, id=i) for i in range(3)), num_blocks=3)
    done, plans = drain(scheduler, fake_runner)
    assert done == dict.fromkeys(range(3), fake_completion(range(8), 4))
    # The second one's third block is the source of its copy, so the third one finds half of the prompt only.
    assert [plan.copies for plan in plans if plan.copies] == [((0, 1, 2),)]


def test_without_chunking_a_prompt_is_computed_whole_above_the_budget(fake_runner):
    scheduler, a = serving(make_sequence(range(20), id=0), budget=8, chunked_prefill=False)
    assert chunks(step(scheduler, fake_runner)[0]) == [(0, 0, 20, 1)]
    assert a.block_ids == [0, 1, 2, 3, 4]


def test_without_chunking_only_the_first_of_a_step_may_exceed_the_budget(fake_runner):
    scheduler = make_scheduler(budget=8, chunked_prefill=False)
    add(scheduler, *(make_sequence(range(20 * i, 20 * i + 20), id=i) for i in range(2)))
    assert next_chunks(scheduler, fake_runner, steps=2) == [[(0, 0, 20, 1)], [(0, 20, 1, 1), (1, 0, 20, 1)]]


def test_without_chunking_a_prompt_waits_until_it_fits_the_rest_of_the_budget(fake_runner):
    scheduler = make_scheduler(budget=8, chunked_prefill=False)
    add(scheduler, make_sequence(range(5), id=0), make_sequence(range(10, 16), id=1))
    assert next_chunks(scheduler, fake_runner, steps=2) == [[(0, 0, 5, 1)], [(0, 5, 1, 1), (1, 0, 6, 1)]]
    # A long one comes second: it may exceed the budget only if it is the first admitted.
    add(scheduler, make_sequence(range(20, 24), id=2), make_sequence(range(30, 50), id=3))
    assert chunks(step(scheduler, fake_runner)[0]) == [(0, 6, 1, 1), (1, 6, 1, 1), (2, 0, 4, 1)]


def test_without_chunking_a_resumed_sequence_is_computed_whole(fake_runner):
    scheduler = make_scheduler(num_blocks=6, block_size=2, budget=4, chunked_prefill=False, prefix_cache=False)
    add(scheduler, *(make_sequence([i, i], max_tokens=8, id=i) for i in range(2)))
    done, plans = drain(scheduler, fake_runner)
    assert sum(plan.num_preempted for plan in plans) > 0
    assert max(len(chunk.token_ids) for plan in plans for chunk in plan.chunks) > 4
    assert all(chunk.sampled for plan in plans for chunk in plan.chunks)
    assert done == {i: fake_completion([i, i], 8) for i in range(2)}


def test_whole_prompts_without_blocks():
    """A part of a prompt would not see the rest. One over the budget has a step of its own, first in its turn."""
    options = {"max_num_batched_tokens": 10, "chunked_prefill": False, "prefix_cache": False}
    scheduler, pooling = Scheduler(max_num_seqs=4, **options), PoolingParams(pooling="mean")
    for number, length in enumerate((4, 6, 3, 25, 2, 1, 1, 1, 1)):
        request = Request(number, tuple(range(length)), pooling=pooling)
        scheduler.add(SequenceState.start(request, id=number, max_model_len=25))
    planned = []
    while (plan := scheduler.schedule()) is not None:
        scheduler.check_integrity()
        planned.append([(chunk.id, chunk.start, len(chunk.token_ids), chunk.pools) for chunk in plan.chunks])
        pooled = {number: np.ones(2, np.float32) for number in range(len(plan.chunks))}
        finished = scheduler.commit(plan, StepResult([], pooled=pooled)).finished
        assert [each.id for each in finished] == [chunk.id for chunk in plan.chunks]
    # Chunks of one token come first in a plan.
    assert planned == [
        [(0, 0, 4, True), (1, 0, 6, True)],
        [(2, 0, 3, True)],
        [(3, 0, 25, True)],
        [(5, 0, 1, True), (6, 0, 1, True), (7, 0, 1, True), (4, 0, 2, True)],
        [(8, 0, 1, True)],
    ]
    assert not scheduler.has_unfinished
