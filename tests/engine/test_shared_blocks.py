"""Exact plans where sequences share blocks: which are found, held by several, or copied."""

import pytest

from tests.engine.fake_runner import fake_completion, make_sequence
from tests.engine.schedulers import add, chunks, drain, findable, make_scheduler, next_chunks, serving, step


def test_prefix_hit_takes_whole_blocks(fake_runner):
    """10 tokens in common are two whole blocks of 4: the hit begins at 8, in the finished sequence's blocks."""
    scheduler = make_scheduler(make_sequence(range(10), max_tokens=1, id=0))
    step(scheduler, fake_runner)
    (b,) = add(scheduler, make_sequence([*range(10), 40, 41, 42], max_tokens=1, id=1))
    plan = scheduler.schedule()
    assert (chunks(plan), plan.copies) == ([(1, 8, 5, 1)], ())
    # Block 2 of the finished one had no hash, so it is the first to be taken again.
    assert (b.block_ids, b.num_cached_tokens) == ([0, 1, 2, 3], 8)


def test_prefix_hit_ends_at_the_first_difference(fake_runner):
    """Equal blocks behind a different one are no hit: their K and V depend on everything before."""
    scheduler = make_scheduler(make_sequence(range(13), max_tokens=1, id=0))
    step(scheduler, fake_runner)
    add(scheduler, make_sequence([0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12], max_tokens=1, id=1))
    assert chunks(scheduler.schedule()) == [(1, 4, 9, 1)]


def test_prefix_cache_off_shares_nothing(fake_runner):
    scheduler, a, b = serving(*(make_sequence(range(9), id=i) for i in range(2)), prefix_cache=False)
    plan, _ = step(scheduler, fake_runner)
    assert chunks(plan) == [(0, 0, 9, 1), (1, 0, 9, 1)]
    assert (a.block_ids, b.block_ids, findable(scheduler), b.num_cached_tokens) == ([0, 1, 2], [3, 4, 5], [], 0)


def test_prompt_cached_to_its_end_copies_one_block_and_computes_one_token(fake_runner):
    scheduler = make_scheduler(make_sequence(range(8), max_tokens=1, id=0), num_blocks=6)
    step(scheduler, fake_runner)
    (b,) = add(scheduler, make_sequence(range(8), max_tokens=2, id=1))
    plan = scheduler.schedule()
    scheduler.check_integrity()
    assert (plan.copies, chunks(plan)) == (((0, 1, 2),), [(1, 7, 1, 1)])
    assert (b.block_ids, b.num_cached_tokens) == ([0, 2], 7)
    # The source is held until the copy has run, else this very step could hand it out.
    assert scheduler.pool.num_free == 3
    scheduler.commit(plan, fake_runner.run(plan))
    scheduler.check_integrity()
    assert scheduler.pool.num_free == 4
    # The rewritten block is not the findable one: the source still is.
    assert scheduler.pool.prefixes.find(b"", b.token_ids, 2) == [0, 1]
    # The copy is full, and rolls over without another copy.
    plan, _ = step(scheduler, fake_runner)
    assert (chunks(plan), plan.copies) == ([(1, 8, 1, 1)], ())
    assert b.output_token_ids == fake_completion(range(8), 2)


def test_two_prompts_cached_to_their_end_copy_the_same_source(fake_runner):
    """Both in one step, beside the finished one: two copies of one source, no block source and copy at once."""
    scheduler = make_scheduler(make_sequence(range(4), max_tokens=1, id=0), num_blocks=6)
    step(scheduler, fake_runner)
    b, c = add(scheduler, *(make_sequence(range(4), max_tokens=4, id=i) for i in (1, 2)))
    plan, _ = step(scheduler, fake_runner)
    assert (plan.copies, chunks(plan)) == (((0, 0, 1), (0, 0, 2)), [(1, 3, 1, 1), (2, 3, 1, 1)])
    assert (b.block_ids, c.block_ids) == ([1], [2])


def test_copy_of_a_block_that_a_running_sequence_holds(fake_runner):
    scheduler, a = serving(make_sequence(range(8), max_tokens=6, id=0))
    step(scheduler, fake_runner)
    (b,) = add(scheduler, make_sequence(range(8), max_tokens=6, id=1))
    plan, _ = step(scheduler, fake_runner)
    # a rolls over into 2, b copies block 1 into 3.
    assert (plan.copies, chunks(plan)) == (((0, 1, 3),), [(0, 8, 1, 1), (1, 7, 1, 1)])
    assert (a.block_ids, b.block_ids) == ([0, 1, 2], [0, 3])
    done, plans = drain(scheduler, fake_runner)
    assert done == dict.fromkeys((0, 1), fake_completion(range(8), 6))
    assert all(plan.copies == () for plan in plans)


def test_same_prompts_in_one_step_share_blocks_in_flight(fake_runner):
    """K and V of a layer are written before any is read, so a block may be shared in the step that fills it."""
    scheduler, a, b = serving(*(make_sequence(range(10), max_tokens=2, id=i) for i in range(2)))
    plan, _ = step(scheduler, fake_runner)
    assert (chunks(plan), plan.copies) == ([(0, 0, 10, 1), (1, 8, 2, 1)], ())
    assert (a.block_ids, b.block_ids, a.num_cached_tokens, b.num_cached_tokens) == ([0, 1, 2], [0, 1, 3], 0, 8)
    done, _ = drain(scheduler, fake_runner)
    assert done == dict.fromkeys((0, 1), fake_completion(range(10), 2))


def test_a_block_in_flight_is_never_copied(fake_runner):
    """Copies run before the first layer, so the block would be copied empty: the hit leaves it out."""
    scheduler, a, b = serving(*(make_sequence(range(8), id=i) for i in range(2)))
    plan, _ = step(scheduler, fake_runner)
    assert (chunks(plan), plan.copies) == ([(0, 0, 8, 1), (1, 4, 4, 1)], ())
    assert (a.block_ids, b.block_ids) == ([0, 1], [0, 2])
    # One step later it is complete, and is copied.
    (c,) = add(scheduler, make_sequence(range(8), id=2))
    plan, _ = step(scheduler, fake_runner)
    # 3 and 4 are what a and b rolled over into.
    assert plan.copies == ((0, 1, 5),)
    assert c.block_ids == [0, 5]


def test_one_block_in_flight_is_left_out_entirely(fake_runner):
    scheduler, a, b = serving(*(make_sequence(range(4), id=i) for i in range(2)))
    plan, _ = step(scheduler, fake_runner)
    assert (chunks(plan), plan.copies, a.block_ids, b.block_ids) == ([(0, 0, 4, 1), (1, 0, 4, 1)], (), [0], [1])


def test_shared_full_last_block_gets_a_successor_for_each_and_no_copy(fake_runner):
    """Article S1's case: two holders, block full. Neither writes into it, so neither needs a copy of it."""
    prompts = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]
    scheduler, a, b = serving(*(make_sequence(prompts[i], max_tokens=2, id=i) for i in range(2)), budget=4)
    plan, _ = step(scheduler, fake_runner)
    assert (chunks(plan), a.block_ids) == ([(0, 0, 4, 0)], [0])
    plan = scheduler.schedule()
    scheduler.pool.check_integrity([[0, 1], [0, 2]])
    assert (chunks(plan), plan.copies) == ([(0, 4, 1, 1), (1, 4, 1, 1)], ())
    assert (a.block_ids, b.block_ids) == ([0, 1], [0, 2])


def test_generated_blocks_are_findable(fake_runner):
    """The next turn of a conversation starts behind the last one's answer."""
    scheduler, a = serving(make_sequence([1, 2, 3], max_tokens=6, id=0))
    drain(scheduler, fake_runner)
    assert list(a.token_ids) == [1, 2, 3, *fake_completion([1, 2, 3], 6)]
    (b,) = add(scheduler, make_sequence([*a.token_ids, 7, 7], max_tokens=1, id=1))
    assert chunks(scheduler.schedule()) == [(1, 8, 3, 1)]
    assert b.num_cached_tokens == 8


@pytest.mark.parametrize("length", [4, 6])
def test_with_exact_prefixes_a_prompt_finds_no_generated_tokens(length, fake_runner):
    """Prompt tokens are computed in other shapes than generated ones: their last bits may differ.

    So the next turn of a conversation finds the last turn's prompt only, up to the block in which the answer begins.
    """
    scheduler, a = serving(make_sequence(range(length), max_tokens=13 - length, id=0), exact_prefixes=True)
    drain(scheduler, fake_runner)
    (b,) = add(scheduler, make_sequence([*a.token_ids, 7, 7], max_tokens=1, id=1))
    assert chunks(step(scheduler, fake_runner)[0]) == [(1, 4, 11, 1)]
    assert b.num_cached_tokens == 4
    # Another prompt finds those of b, 3 and 4. Block 5 was not full, so it is free to be taken first.
    (c,) = add(scheduler, make_sequence([*a.token_ids, 8], max_tokens=1, id=2))
    assert chunks(scheduler.schedule()) == [(2, 12, 2, 1)]
    assert c.block_ids == [0, 3, 4, 5]


def test_with_exact_prefixes_generated_tokens_are_found_behind_a_prompt_of_the_same_length(fake_runner):
    """What a resumed sequence computes again has the shapes of the first time; an equal one's blocks do as well."""
    scheduler, a = serving(make_sequence(range(6), max_tokens=7, id=0), exact_prefixes=True)
    drain(scheduler, fake_runner)
    same, longer = add(scheduler, make_sequence(range(6), id=1), make_sequence(a.token_ids[:7], id=2))
    # As after a preemption: all of a's tokens are known.
    same.generated, longer.generated = a.token_ids[6:], a.token_ids[7:]
    assert chunks(scheduler.schedule()) == [(1, 12, 1, 1), (2, 4, 9, 1)]
    assert (same.block_ids, longer.block_ids) == ([0, 1, 2, 3], [0, 4, 5, 6])


def test_last_token_of_a_completion_is_not_findable(fake_runner):
    """Its K and V were never computed: a block that it would fill is not full."""
    scheduler, a = serving(make_sequence([1, 2, 3], max_tokens=5, id=0))
    drain(scheduler, fake_runner)
    assert len(a.token_ids) == 8
    (b,) = add(scheduler, make_sequence([*a.token_ids, 7], max_tokens=1, id=1))
    assert chunks(scheduler.schedule()) == [(1, 4, 5, 1)]
    assert b.num_cached_tokens == 4


def test_a_partly_computed_prompt_is_findable_up_to_its_last_full_block(fake_runner):
    scheduler = make_scheduler(make_sequence(range(12), id=0), make_sequence(range(12), id=1), budget=6)
    # The first fills blocks 1 and 2 in the second step; its budget leaves none for the other one.
    assert next_chunks(scheduler, fake_runner, steps=2) == [[(0, 0, 6, 0)], [(0, 6, 6, 1)]]
    plan, _ = step(scheduler, fake_runner)
    assert (chunks(plan), plan.copies) == ([(0, 12, 1, 1), (1, 11, 1, 1)], ((0, 2, 4),))
