"""Exact plans, block by block: what a plan holds, who is admitted, and how sequences end."""

import subprocess
import sys
from array import array

import pytest

from rosebatch.engine.plan import Chunk, PackedStep, StepResult
from rosebatch.engine.scheduling.sequence import Status
from tests.engine.fake_runner import fake_completion, make_sequence
from tests.engine.schedulers import add, chunks, drain, make_scheduler, serving, step, tables_told
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
        chunks=(
            Chunk(0, 6, array("I", [first]), 1, decodes=True),
            Chunk(1, 4, array("I", [4, 5]), 1, ((0, 0, (0, 2)),)),
        ),
        started=(b.spec,),
    )
    assert step(scheduler, fake_runner)[0] == PackedStep(
        chunks=(Chunk(0, 7, array("I", [second]), 1, decodes=True),), released=(1,)
    )
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


def test_budget_ends_admission_in_order_of_arrival(fake_runner):
    prompts = [range(4), range(10, 14), range(20, 25), range(30, 31)]
    scheduler = make_scheduler(*(make_sequence(p, id=i) for i, p in enumerate(prompts)), budget=10)
    plan, _ = step(scheduler, fake_runner)
    # The third gets the two tokens left; the short fourth does not overtake it.
    assert (chunks(plan), plan.num_tokens) == ([(0, 0, 4, 1), (1, 0, 4, 1), (2, 0, 2, 0)], 10)
    assert chunks(step(scheduler, fake_runner)[0]) == [(0, 4, 1, 1), (1, 4, 1, 1), (3, 0, 1, 1), (2, 2, 3, 1)]


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


def test_decodes_in_one_batch_step_roll_over_into_new_blocks(fake_runner):
    """The step at the block boundary is a step like any other: one batch, one new block each."""
    scheduler, a, b = serving(*(make_sequence([i, i, i], id=i) for i in range(2)), prefix_cache=False)
    held = []
    for _ in range(4):
        plan, _ = step(scheduler, fake_runner)
        held.append((a.block_ids.copy(), b.block_ids.copy(), len(plan.chunks)))
    assert held == [([0], [1], 2), ([0], [1], 2), ([0, 2], [1, 3], 2), ([0, 2], [1, 3], 2)]


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
