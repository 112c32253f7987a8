"""Exact plans where blocks run out: who is preempted, who resumes, and who is not admitted."""

import pytest

from rosebatch.engine.scheduling.sequence import Status
from tests.engine.fake_runner import fake_completion, make_sequence
from tests.engine.schedulers import add, chunks, drain, make_scheduler, next_chunks, serving, step


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
