"""Exact plans, block by block, for every situation that the scheduler knows."""

import subprocess
import sys
from array import array

import numpy as np
import pytest

from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.engine.plan import Chunk, PackedStep, StepResult
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState, Status
from tests.engine.fake_runner import fake_completion, make_sequence
from tests.engine.schedulers import add, chunks, drain, make_scheduler, next_chunks, serving, step, tables_told
from tests.helpers.checkout import python_path


@pytest.mark.parametrize(
    "module",
    ["engine", "plan", "scheduling.block_pool", "scheduling.scheduler", "scheduling.sequence", "triton_runner.slots"],
)
def test_planning_does_not_import_torch(module):
    code = f"import sys, rosebatch.engine.{module}; sys.exit('torch' in sys.modules)"
    path = {"PYTHONPATH": python_path()}
    assert subprocess.run([sys.executable, "-c", code], env=path, check=False).returncode == 0


def test_one_sequence_from_prompt_to_end(fake_runner):
    scheduler, a = serving(make_sequence(range(6), max_tokens=3))
    assert scheduler.has_unfinished
    plan, finished = step(scheduler, fake_runner)
    assert chunks(plan) == [(0, 0, 6, 1)]
    assert (plan.copies, plan.num_preempted, plan.num_tokens, finished) == ((), 0, 6, [])
    assert (a.block_ids, a.num_computed_tokens, len(a.token_ids)) == ([0, 1], 6, 7)
    assert chunks(step(scheduler, fake_runner)[0]) == [(0, 6, 1, 1)]
    plan, finished = step(scheduler, fake_runner)
    assert (chunks(plan), finished) == ([(0, 7, 1, 1)], [a])
    assert a.output_token_ids == fake_completion(range(6), 3)
    assert (a.finish_reason, a.status, a.block_ids, a.num_cached_tokens) == ("length", Status.FINISHED, [], 0)
    assert (scheduler.has_unfinished, scheduler.pool.num_free) == (False, 32)


def test_plans_have_all_that_a_runner_needs(fake_runner):
    """Specs once, tokens by value, block tables as changes: a runner that lives elsewhere has nothing else."""
    scheduler, a = serving(make_sequence(range(6), max_tokens=3, id=0))
    first, second = fake_completion(range(6), 2)
    assert step(scheduler, fake_runner)[0] == PackedStep(
        chunks=(Chunk(0, 0, array("I", range(6)), 1, ((0, 0, (0, 1)),)),), started=(a.spec,)
    )
    (b,) = add(scheduler, make_sequence(range(6), max_tokens=1, id=1))
    # b's table begins with the block that a filled.
    assert step(scheduler, fake_runner)[0] == PackedStep(
        chunks=(Chunk(0, 6, array("I", [first]), 1), Chunk(1, 4, array("I", [4, 5]), 1, ((0, 0, (0, 2)),))),
        started=(b.spec,),
    )
    assert step(scheduler, fake_runner)[0] == PackedStep(chunks=(Chunk(0, 7, array("I", [second]), 1),), released=(1,))
    (c,) = add(scheduler, make_sequence(range(8), max_tokens=2, id=2))
    plan, _ = step(scheduler, fake_runner)
    assert (plan.started, plan.released) == ((c.spec,), (0,))


def test_changes_of_a_block_table(fake_runner):
    """The copy of a block takes its place, a rollover adds one; a step without either says nothing."""
    scheduler = make_scheduler(make_sequence(range(8), id=0))
    step(scheduler, fake_runner)
    add(scheduler, make_sequence(range(8), id=1))
    plan, _ = step(scheduler, fake_runner)
    assert plan.copies == ((0, 1, 3),)
    assert tables_told(plan) == [((0, 2, (2,)),), ((0, 0, (0, 3)),)]
    assert tables_told(step(scheduler, fake_runner)[0]) == [(), ((0, 2, (4,)),)]
    assert tables_told(step(scheduler, fake_runner)[0]) == [(), ()]


def test_a_running_sequence_tells_of_a_copy(fake_runner):
    """It shares its prompt's last block with a fork, so both go on in copies: of its table one entry changes."""
    a, fork = make_sequence(range(6), id=0), make_sequence(range(6), id=1, sample=1)
    a.forks = [fork]
    scheduler = make_scheduler(a, prefix_cache=False)
    assert tables_told(step(scheduler, fake_runner)[0]) == [((0, 0, (0, 1)),)]
    plan, _ = step(scheduler, fake_runner)
    assert (chunks(plan), plan.copies) == ([(0, 6, 1, 1), (1, 5, 1, 1)], ((0, 1, 2), (0, 1, 3)))
    assert tables_told(plan) == [((0, 1, (2,)),), ((0, 0, (0, 3)),)]


def test_generated_tokens_travel_only_where_logits_depend_on_them(fake_runner):
    """Left out, a penalty would forget the answer so far; sent for all, plans would grow with every answer."""
    a, b = make_sequence([1], id=0, presence_penalty=1.0), make_sequence([2] * 5, id=1, frequency_penalty=1.0)
    scheduler = make_scheduler(a, b, budget=4, prefix_cache=False)

    def told():
        return {chunk.id: list(chunk.output_token_ids) for chunk in step(scheduler, fake_runner)[0].chunks}

    assert told() == {0: [], 1: []}
    assert told() == {0: [a.token_ids[1]], 1: []}
    add(scheduler, make_sequence([3], id=2))
    assert told() == {0: list(a.token_ids[1:3]), 1: [b.token_ids[5]], 2: []}
    assert told() == {0: list(a.token_ids[1:4]), 1: list(b.token_ids[5:7]), 2: []}


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


def test_budget_ends_admission_in_order_of_arrival(fake_runner):
    prompts = [range(4), range(10, 14), range(20, 25), range(30, 31)]
    scheduler = make_scheduler(*(make_sequence(p, id=i) for i, p in enumerate(prompts)), budget=10)
    plan, _ = step(scheduler, fake_runner)
    # The third gets the two tokens left; the short fourth does not overtake it.
    assert (chunks(plan), plan.num_tokens) == ([(0, 0, 4, 1), (1, 0, 4, 1), (2, 0, 2, 0)], 10)
    assert chunks(step(scheduler, fake_runner)[0]) == [(0, 4, 1, 1), (1, 4, 1, 1), (3, 0, 1, 1), (2, 2, 3, 1)]


def test_budget_smaller_than_the_running_decodes(fake_runner):
    """The oldest go on, the youngest wait for their turn, and everyone gets the right tokens."""
    scheduler = make_scheduler(budget=2, prefix_cache=False)
    add(scheduler, *(make_sequence([i], max_tokens=3, id=i) for i in range(3)))
    assert next_chunks(scheduler, fake_runner, steps=2) == [[(0, i, 1, 1), (1, i, 1, 1)] for i in range(2)]
    done, _ = drain(scheduler, fake_runner)
    assert done == {i: fake_completion([i], 3) for i in range(3)}


def test_max_num_seqs(fake_runner):
    scheduler = make_scheduler(*(make_sequence([i], max_tokens=2 + i, id=i) for i in range(4)), seqs=2)
    done, plans = drain(scheduler, fake_runner)
    assert [chunks(p) for p in plans] == [
        [(0, 0, 1, 1), (1, 0, 1, 1)],
        [(0, 1, 1, 1), (1, 1, 1, 1)],
        [(1, 2, 1, 1), (2, 0, 1, 1)],
        [(2, 1, 1, 1), (3, 0, 1, 1)],
        [(2, 2, 1, 1), (3, 1, 1, 1)],
        [(2, 3, 1, 1), (3, 2, 1, 1)],
        [(3, 3, 1, 1)],
        [(3, 4, 1, 1)],
    ]
    assert done == {i: fake_completion([i], 2 + i) for i in range(4)}


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
    assert (a.block_ids, b.block_ids, a.block_hashes, b.num_cached_tokens) == ([0, 1, 2], [3, 4, 5], [], 0)


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
    assert scheduler.pool.lookup(b.block_hashes[1]) == 1
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


def test_decodes_in_one_batch_step_roll_over_into_new_blocks(fake_runner):
    """The step at the block boundary is a step like any other: one batch, one new block each."""
    scheduler, a, b = serving(*(make_sequence([i, i, i], id=i) for i in range(2)), prefix_cache=False)
    held = []
    for _ in range(4):
        plan, _ = step(scheduler, fake_runner)
        held.append((a.block_ids.copy(), b.block_ids.copy(), len(plan.chunks)))
    assert held == [([0], [1], 2), ([0], [1], 2), ([0, 2], [1, 3], 2), ([0, 2], [1, 3], 2)]


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


def test_preemption_takes_the_youngest_and_resumes_it_first(fake_runner):
    scheduler = make_scheduler(num_blocks=6, block_size=2, prefix_cache=False, seqs=2)
    a, b, *others = add(scheduler, *(make_sequence([i, i], max_tokens=7, id=i) for i in range(6)))
    for _ in range(4):
        plan, _ = step(scheduler, fake_runner)
        assert (plan.num_preempted, plan.released) == (0, ())
    # Both have 6 tokens, 5 computed, in 3 blocks each.
    assert (a.block_ids, b.block_ids) == ([0, 2, 4], [1, 3, 5])
    step(scheduler, fake_runner)
    # 7 tokens: a needs a fourth block.
    plan = scheduler.schedule()
    scheduler.check_integrity()
    assert (plan.num_preempted, plan.released, chunks(plan)) == (1, (b.id,), [(0, 6, 1, 1)])
    assert (b.status, b.block_ids, b.num_computed_tokens) == (Status.WAITING, [], 0)
    # Before those that have waited longer than it.
    assert list(scheduler.queues.waiting) == [b, *others]
    # Of the blocks that came back, the head of the sequence is the first to be used again.
    assert a.block_ids == [0, 2, 4, 1]
    scheduler.commit(plan, fake_runner.run(plan))
    before = b.output_token_ids
    assert before == fake_completion([1, 1], 5)
    step(scheduler, fake_runner)
    assert a.finish_reason == "length"
    plan, _ = step(scheduler, fake_runner)
    # Prompt and generated tokens are computed again in one chunk, and the next token is sampled at its end.
    assert chunks(plan) == [(1, 0, 7, 1), (2, 0, 2, 1)]
    assert b.output_token_ids[:-1] == before
    drain(scheduler, fake_runner)
    for i, sequence in enumerate((a, b, *others)):
        assert sequence.output_token_ids == fake_completion([i, i], 7)


def test_towards_the_end_a_preempted_sequence_lets_longer_ones_go_first(fake_runner):
    """Those that had not begun were begun last, and ran on in a cache that was empty otherwise."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, prefix_cache=False, seqs=2)
    limits = [7, 7, 7, 2, 7]
    _, b, c, short, d = add(scheduler, *(make_sequence([i, i], max_tokens=n, id=i) for i, n in enumerate(limits)))
    while b.status is not Status.WAITING or not b.output_token_ids:
        step(scheduler, fake_runner)
    # Two tokens are left to b, as many as to the short one: sequences are not sorted, so d stays behind that.
    assert (b.num_remaining_tokens, list(scheduler.queues.waiting)) == (2, [c, b, short, d])
    _, plans = drain(scheduler, fake_runner)
    assert [spec.id for plan in plans for spec in plan.started] == [c.id, b.id, short.id, d.id]


def test_a_sequence_preempts_itself_when_it_is_the_youngest(fake_runner):
    scheduler = make_scheduler(num_blocks=4, block_size=2, prefix_cache=False)
    a, b = add(scheduler, make_sequence([0], max_tokens=6, id=0), make_sequence([1, 1], max_tokens=6, id=1))
    for _ in range(3):
        step(scheduler, fake_runner)
    assert (a.block_ids, b.block_ids) == ([0, 3], [1, 2])
    plan, _ = step(scheduler, fake_runner)
    # a still has room for its fourth token, b has none for its fifth.
    assert (plan.num_preempted, plan.released, chunks(plan)) == (1, (b.id,), [(0, 3, 1, 1)])
    done, _ = drain(scheduler, fake_runner)
    assert done == {0: fake_completion([0], 6), 1: fake_completion([1, 1], 6)}


def test_no_admission_in_a_step_that_preempts(fake_runner):
    """What was just taken back must not be handed to someone who waits behind its owner."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, prefix_cache=False)
    a, b = add(scheduler, make_sequence([0], id=0), make_sequence([1, 1], id=1))
    for _ in range(3):
        step(scheduler, fake_runner)
    add(scheduler, make_sequence([2], id=2))
    plan, _ = step(scheduler, fake_runner)
    assert (plan.num_preempted, plan.released, [c.id for c in plan.chunks]) == (1, (b.id,), [a.id])


@pytest.mark.parametrize("exact", [False, True])
def test_resuming_finds_its_own_blocks(exact, fake_runner):
    """With the prefix cache a preempted sequence gets back what nobody has overwritten; the first count stays."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, seqs=2, exact_prefixes=exact)
    a, b = add(scheduler, make_sequence([0, 0], max_tokens=6, id=0), make_sequence([1, 1], max_tokens=7, id=1))
    for _ in range(5):
        step(scheduler, fake_runner)
    plan, finished = step(scheduler, fake_runner)
    assert (plan.num_preempted, plan.released, finished) == (1, (b.id,), [a])
    plan, _ = step(scheduler, fake_runner)
    assert (plan.started, plan.released) == ((b.spec,), (a.id,))
    # Seven tokens are known; a took b's tail, the two blocks before it are still b's.
    assert chunks(plan) == [(1, 4, 3, 1)]
    assert b.num_cached_tokens == 0
    drain(scheduler, fake_runner)
    assert b.output_token_ids == fake_completion([1, 1], 7)


def test_admission_leaves_a_block_for_everyone_running(fake_runner):
    """Else the newcomer would be preempted in the next step, its prefill wasted."""
    scheduler = make_scheduler(num_blocks=4, block_size=2, prefix_cache=False)
    add(scheduler, make_sequence([0, 0], max_tokens=2, id=0), make_sequence([1] * 5, max_tokens=2, id=1))
    assert next_chunks(scheduler, fake_runner, steps=3) == [[(0, 0, 2, 1)], [(0, 2, 1, 1)], [(1, 0, 5, 1)]]


def test_a_failed_admission_gives_its_hits_back(fake_runner):
    scheduler, a = serving(make_sequence([0, 0, 0], max_tokens=4, id=0), num_blocks=4, block_size=2)
    step(scheduler, fake_runner)
    (b,) = add(scheduler, make_sequence([0, 0, 1, 1, 1, 1, 1], max_tokens=1, id=1))
    plan, _ = step(scheduler, fake_runner)
    assert (chunks(plan), a.block_ids, scheduler.pool.num_free) == ([(0, 3, 1, 1)], [0, 1], 2)
    assert (b.block_ids, b.num_computed_tokens, b.status, b.num_cached_tokens) == ([], 0, Status.WAITING, None)


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
    assert (b.num_cached_tokens, len(b.block_hashes)) == (4, 3)
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
    same.token_ids, longer.token_ids = a.token_ids[:], a.token_ids[:]
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


def test_commit_hands_tokens_to_the_chunks_that_sample():
    """A chunk that does not reach the end of its prompt takes no token: the next one's must not slip to it."""
    scheduler, a, b = serving(make_sequence([1, 2], id=0), make_sequence(range(9), id=1), budget=6, prefix_cache=False)
    plan = scheduler.schedule()
    assert chunks(plan) == [(0, 0, 2, 1), (1, 0, 4, 0)]
    scheduler.commit(plan, StepResult([[41]]))
    assert (a.output_token_ids, b.output_token_ids) == ([41], [])
    assert (a.num_uncomputed_tokens, b.num_uncomputed_tokens) == (1, 5)
    plan = scheduler.schedule()
    assert chunks(plan) == [(0, 2, 1, 1), (1, 4, 5, 1)]
    scheduler.commit(plan, StepResult([[42], [43]]))
    assert (a.output_token_ids, b.output_token_ids) == ([41, 42], [43])


def test_finished_sequences_leave_at_once():
    """Reasons stop and length; blocks are free in the same commit, the others run on in order."""
    a = make_sequence([1], max_tokens=5, id=0, eos=frozenset({9}))
    b, c = make_sequence([2], max_tokens=5, id=1), make_sequence([3], max_tokens=1, id=2)
    scheduler = make_scheduler(a, b, c, prefix_cache=False)
    assert scheduler.commit(scheduler.schedule(), StepResult([[9], [9], [9]])).finished == [a, c]
    assert (a.finish_reason, b.finish_reason, c.finish_reason) == ("stop", None, "length")
    assert (scheduler.queues.running, scheduler.pool.num_free) == ([b], 31)
    scheduler.check_integrity()


def test_check_integrity_notices_a_lost_block(fake_runner):
    scheduler, a = serving(make_sequence(range(6)))
    step(scheduler, fake_runner)
    a.block_ids.pop()
    with pytest.raises(AssertionError, match="block 1"):
        scheduler.check_integrity()


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
