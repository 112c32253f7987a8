"""Groups of layers with sliding windows, block by block: what is freed, found, copied, preempted and planned."""

import random
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest

from rosebatch.core.errors import RowError
from rosebatch.core.images import PromptImage
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.cache.windows import blocks_of_window
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import GONE, NOT_FINITE, DecodeRow, DecodeWindow, StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.engine.scheduling.step_planner import MIXED, SeparateDecodes
from tests.engine.fake_runner import VOCAB, FakeRunner, fake_completion, make_sequence
from tests.engine.schedulers import add, chunks, step

SIZE = 4


def make_scheduler(*pools, seqs=8, budget=64, **options):
    """Each pool is (window, blocks)."""
    pools = [BlockPool(blocks, SIZE, window) for window, blocks in pools]
    return Scheduler(*pools, max_num_seqs=seqs, max_num_batched_tokens=budget, **options)


def make_runner(scheduler):
    return FakeRunner(len(scheduler.blocks.pools))


def serving(pools, *sequences, **options):
    """A scheduler with these sequences waiting, a runner for its plans, and the sequences."""
    scheduler = make_scheduler(*pools, **options)
    return scheduler, make_runner(scheduler), *add(scheduler, *sequences)


def used(scheduler):
    return [pool.num_blocks - pool.num_free for pool in scheduler.blocks.pools]


def drain(scheduler, runner):
    """Run to the end; sequence id -> tokens, all plans, and most blocks used in each group."""
    done, plans, limit = {}, [], [0] * len(scheduler.blocks.pools)
    while scheduler.has_unfinished:
        plan, finished = step(scheduler, runner)
        plans.append(plan)
        limit = list(map(max, limit, used(scheduler)))
        done |= {s.id: s.output_token_ids for s in finished}
    assert scheduler.blocks.num_used == 0
    return done, plans, limit


def needed(position, window):
    """Blocks of ``position`` tokens with a key that the token behind them sees, or into which it is written."""
    seen = {key // SIZE for key in range(max(0, position + 1 - window), position + 1)}
    return sum(index < -(-position // SIZE) for index in seen)


# Blocks that left a window.


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_decode_frees_each_block_that_left_the_window(window):
    """Windows kept all blocks of a sequence, and a model with many such layers served few sequences."""
    scheduler, runner, a = serving([(0, 32), (window, 32)], make_sequence(range(3), max_tokens=40))
    for position in range(3, 42):
        step(scheduler, runner)
        # The scheduler has planned ``position`` tokens: what the token at this position sees is held, and no more.
        held = [-(-position // SIZE), needed(position, window)]
        assert (a.num_computed_tokens, used(scheduler)) == (position, held)
        assert a.tables[1].count(GONE) == len(a.tables[0]) - needed(position, window)


def test_chunks_of_a_prompt_free_what_the_next_chunk_does_not_see():
    """A long prompt held its blocks in all layers until it ended."""
    scheduler, runner, a = serving([(0, 32), (6, 32)], make_sequence(range(33), max_tokens=2), budget=10)
    for position in (10, 20, 30, 33):
        step(scheduler, runner)
        held = [-(-position // SIZE), needed(position, 6)]
        assert (a.num_computed_tokens, used(scheduler)) == (position, held)


def test_a_plan_has_all_that_it_reads():
    """A block freed before its plan was made could be handed out within it, and be written before it is read."""
    scheduler, runner, a = serving([(6, 8)], make_sequence(range(24), max_tokens=1), budget=8)
    step(scheduler, runner)
    # Token 8 sees 3 to 7: block 0 of the table is read by this plan, and free after it.
    assert [chunk.blocks for chunk in scheduler.schedule().chunks] == [((0, 2, (2, 3)),)]
    assert (a.tables, runner.blocks[a.id][0][:2]) == ([[GONE, GONE, 2, 3]], [0, 1])


def test_a_sequence_far_longer_than_the_pool_of_its_window():
    """It was refused, or preempted itself for ever: 400 tokens with room for 24 in the layers with a window."""
    scheduler, runner, _ = serving([(0, 100), (6, 6)], make_sequence(range(200), max_tokens=200))
    assert scheduler.max_sequence_len == 400
    done, plans, limit = drain(scheduler, runner)
    assert done[0] == fake_completion(range(200), 200)
    # A token of window 6 sees keys of at most three blocks. With them, a copy and the chunk's blocks have to fit.
    assert blocks_of_window(6, SIZE) == 3
    assert max(len(chunk.token_ids) for plan in plans for chunk in plan.chunks) == (6 - 3 - 1) * SIZE
    assert limit[1] <= 3 and sum(plan.num_preempted for plan in plans) == 0


def test_windows_alone_limit_no_length():
    """Mistral's kind: all layers have the window, so its blocks are all that a sequence of any length takes."""
    scheduler, runner, _ = serving([(6, 6)], make_sequence(range(100), max_tokens=60))
    assert scheduler.max_sequence_len is None
    assert drain(scheduler, runner)[0] == {0: fake_completion(range(100), 60)}


@pytest.mark.parametrize(
    ("blocks", "chunked", "limit"), [(4, True, 16), (5, True, 400), (50, False, 200), (5, False, 20)]
)
def test_the_longest_sequence_of_pools(blocks, chunked, limit):
    """A window whose pool cannot recycle, or that whole prompts must fit, limits sequences as full attention does."""
    assert make_scheduler((0, 100), (6, blocks), chunked_prefill=chunked).max_sequence_len == limit


# Too few blocks.


@pytest.mark.parametrize("pools", [((0, 64), (5, 5)), ((0, 8), (5, 64)), ((5, 5),), ((0, 9), (2, 6), (9, 7))])
@pytest.mark.parametrize("policy", [MIXED, SeparateDecodes(4)], ids=["mixed", "separate"])
def test_preemption_in_any_group(pools, policy):
    """Blocks of the other groups leaked, or a group that ran out was not seen before its pool raised."""
    scheduler = make_scheduler(*pools, budget=16, policy=policy)
    engine = Engine(scheduler, make_runner(scheduler), vocab_size=VOCAB, max_model_len=30)
    prompts = [tuple(random.Random(i).randrange(VOCAB) for _ in range(1 + i % 5)) for i in range(12)]
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    done = {}
    for index, prompt in enumerate(prompts):
        engine.add(Request(index, prompt, sampling))
    while engine.has_unfinished:
        done |= {completion.request.id: list(completion.token_ids) for completion in engine.step()}
        scheduler.check_integrity()
    assert done == {i: fake_completion(prompt, 24) for i, prompt in enumerate(prompts)}
    assert engine.stats.preemptions > 0
    assert scheduler.blocks.num_used == 0


def test_a_sequence_whose_blocks_ended_ones_held_goes_on():
    """Preempted while nothing else ran, it was not admitted again: "a step must make progress"."""
    pools, options = [BlockPool(64, 1), BlockPool(8, 1, 5)], {"policy": SeparateDecodes(1), "prefix_cache": False}
    scheduler = Scheduler(*pools, max_num_seqs=8, max_num_batched_tokens=8, **options)
    runner = make_runner(scheduler)
    add(scheduler, make_sequence(range(5), max_tokens=20, id=0))
    for _ in range(4):
        step(scheduler, runner)
    add(scheduler, make_sequence(range(4), max_tokens=1, id=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [chunks(plan) for plan in (first, second)] == [[(1, 0, 2, False)], [(1, 2, 2, True)]]
    assert pools[1].num_free == 0
    assert scheduler.schedule() is None, "sequence 0 was preempted: nothing can be planned"
    for plan in (first, second):
        scheduler.commit(plan, runner.run(plan))
    plan = scheduler.schedule()
    assert (chunks(plan), plan.num_preempted, plan.released) == ([(0, 0, 2, False)], 1, (1, 0))


def test_nobody_is_admitted_behind_a_part_of_a_prompt():
    """A window's pool cuts chunks. Who came in behind one took blocks that its rest needs, and both were preempted."""
    a, b = make_sequence(range(40), max_tokens=2, id=0), make_sequence(range(50, 70), max_tokens=2, id=1)
    scheduler, runner, *_ = serving([(0, 12), (6, 6)], a, b)
    done, plans, _ = drain(scheduler, runner)
    assert [chunks(plan) for plan in plans[:5]] == [[(0, 8 * i, 8, i == 4)] for i in range(5)]
    assert len(done) == 2 and sum(plan.num_preempted for plan in plans) == 0


def test_a_chunk_is_cut_to_the_blocks_that_others_left():
    """A long prompt that runs was preempted for a whole chunk's blocks, though a part of them was free."""
    scheduler, runner, a = serving([(0, 64), (6, 12)], make_sequence(range(96), max_tokens=2, id=0), budget=24)
    step(scheduler, runner)
    held = scheduler.blocks.pools[1].allocate(6)
    plan = scheduler.schedule()
    # 24 tokens are computed: blocks 4 and 5 of the table are held, four are free.
    assert (chunks(plan), plan.num_preempted) == ([(0, 24, 16, False)], 0)
    scheduler.blocks.pools[1].free(held)
    assert a.num_computed_tokens == 40


# Prefixes.


def filled(length):
    """A scheduler that computed a prompt of so many tokens to its end, and freed it; and its runner."""
    scheduler, runner, _ = serving([(0, 32), (6, 32)], make_sequence(range(length), max_tokens=1, id=100))
    drain(scheduler, runner)
    return scheduler, runner


def test_a_hit_holds_all_blocks_of_full_layers_and_the_last_window_of_others():
    """Holding all would keep blocks that nobody reads; holding too few, the first new token misses keys."""
    scheduler, _ = filled(20)
    (b,) = add(scheduler, make_sequence([*range(20), 7], id=1))
    plan = scheduler.schedule()
    # Token 20 sees 15 to 19, which lie in blocks 3 and 4 of the table; then only 16 to 20 are seen.
    assert chunks(plan) == [(1, 20, 1, True)]
    (*full, held), (*window, seen) = plan.chunks[0].blocks
    assert (full, held[:5]) == ([0, 0], (0, 1, 2, 3, 4))
    assert (window, seen[:5]) == ([1, 0], (GONE, GONE, GONE, 3, 4))
    assert (len(held), len(seen), b.num_cached_tokens) == (6, 6, 20)


@pytest.mark.parametrize(
    ("lost", "cached"),
    [({0, 1}, 32), ({7}, 28), ({6}, 24), ({1, 3, 5, 7}, 4), ({0, 1, 3, 5, 7}, 0), (set(range(8)), 0)],
)
def test_a_prefix_ends_where_a_whole_window_is_left(lost, cached):
    """Full layers have all of it, but a lost block of a window held another's K and V, or nothing, by then."""
    scheduler, runner = filled(32)
    # Block ids are the table's indices here. The token at 4 · end sees the five in front of it.
    for block in lost:
        scheduler.blocks.pools[1].prefixes.remove([block])
    (b,) = add(scheduler, make_sequence([*range(32), 7], max_tokens=3, id=1))
    assert chunks(step(scheduler, runner)[0]) == [(1, cached, 33 - cached, True)]
    assert b.num_cached_tokens == cached
    drain(scheduler, runner)


def test_a_prefix_of_whole_units_has_a_whole_window():
    """Four blocks were found and cut to three, whose window has one that was lost: its place was no block at all."""
    scheduler, runner = serving([(8, 10)], make_sequence(range(20), max_tokens=1), replays=True, chunk_unit=12)[:2]
    drain(scheduler, runner)
    pool = scheduler.blocks.pools[0]
    # Block ids are the table's indices.
    pool.prefixes.remove([0, 1])
    add(scheduler, make_sequence([*range(16), 7], max_tokens=3, id=1))
    assert chunks(step(scheduler, runner)[0]) == [(1, 0, 17, True)]
    pool.prefixes.remove([0])
    add(scheduler, make_sequence([*range(16), 8], max_tokens=3, id=2))
    assert (2, 12, 5, True) in chunks(step(scheduler, runner)[0])
    drain(scheduler, runner)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("sees", [True, False])
def test_chunks_end_at_units_where_blocks_are_short(sees, seed):
    """Others held the blocks of a window, and chunks ended where these did: their bits went by what ran beside."""
    numbers = random.Random(seed)
    pools = [(0, 32), (numbers.choice([8, 10]), numbers.randrange(6, 10))][numbers.randrange(2) :]
    budget, policy = numbers.choice([12, 14, 24]), numbers.choice([MIXED, SeparateDecodes(4)])
    options = {"replays": True, "chunk_unit": numbers.choice([1, 6]), "whole_images": sees, "policy": policy}
    scheduler = make_scheduler(*pools, seqs=4, budget=budget, **options)
    prompts = []
    for id in range(6):
        length = numbers.randrange(1, 48)
        begins = sorted(numbers.sample(range(length), min(length, 4))) if sees else []
        images = tuple(
            PromptImage(begin, np.ones(end - begin, bool), (1, end - begin), bytes([begin]) * 32, None)
            for begin, end in pairwise([*begins, length])
            if end - begin <= 8
        )
        sampling = SamplingParams(max_tokens=numbers.randrange(1, 8))
        tokens = tuple(numbers.randrange(5) for _ in range(length))
        request = Request(id, tokens, sampling, images=images)
        with suppress(RowError):
            scheduler.require_room(request)
            prompts.append(SequenceState.start(request, id=id, max_model_len=100))
    add(scheduler, *prompts)
    _, plans, _ = drain(scheduler, make_runner(scheduler))
    unit = 12 if options["chunk_unit"] == 6 else SIZE
    images = {sequence.id: sequence.spec.images for sequence in prompts}
    for chunk in (chunk for plan in plans for chunk in getattr(plan, "chunks", ())):
        end = chunk.start + len(chunk.token_ids)
        if not chunk.sampled:
            assert end % unit == 0 or scheduler.planner.max_chunk < unit
            assert not any(image.offset < end < image.end for image in images[chunk.id])


def test_a_prompt_cached_to_its_end_copies_its_last_block_in_every_group():
    """Copied in one group only, the others' shared block would be written."""
    scheduler, runner = filled(16)
    (b,) = add(scheduler, make_sequence(range(16), max_tokens=2, id=1))
    plan, _ = step(scheduler, runner)
    assert (chunks(plan), plan.copies) == ([(1, 15, 1, True)], ((0, 3, 4), (1, 3, 4)))
    # The next token, 16, sees 11 to 15.
    assert b.tables == [[0, 1, 2, 4], [GONE, GONE, 2, 4]]


def test_a_block_in_flight_in_one_group_is_not_copied():
    """Copies run before the first layer: one group's source would be copied before it is computed."""
    scheduler, _ = filled(16)
    window = scheduler.blocks.pools[1]
    window.free(window.allocate(32))
    # Full layers have the prompt, windows compute it anew in this step; the second cannot copy what is under way.
    add(scheduler, *(make_sequence(range(16), max_tokens=2, id=i) for i in (1, 2)))
    plan = scheduler.schedule()
    assert (chunks(plan), plan.copies) == ([(1, 0, 16, True), (2, 12, 4, True)], ())


@pytest.mark.parametrize("budget", [64, 5])
def test_completions_of_one_prompt_share_its_window(budget):
    """Forks took the blocks of the whole prompt, or those that had left the window when the prompt was computed."""
    first, *forks = (make_sequence(range(18), max_tokens=12, id=i, sample=i, seed=i) for i in range(4))
    first.forks = forks
    scheduler, runner, _ = serving([(0, 32), (6, 32)], first, budget=budget)
    while scheduler.queues.running or scheduler.queues.waiting:
        step(scheduler, runner)
        if scheduler.queues.forked:
            break
    # All four hold five blocks of the prompt, and the two that token 17 sees: 12 to 17.
    assert used(scheduler) == [5, 2]
    assert [fork.tables for fork in forks] == [[[0, 1, 2, 3, 4], [GONE] * 3 + [3, 4]]] * 3
    done, plans, _ = drain(scheduler, runner)
    assert done == {i: fake_completion(range(18), 12, seed=s.sampling.seed) for i, s in enumerate((first, *forks))}
    # All write in one step: each has a copy of the last block, in each group.
    assert sorted(copy[:2] for plan in plans for copy in plan.copies) == [(0, 4)] * 4 + [(1, 4)] * 4


# Plans.


def test_decode_windows_of_several_steps():
    """A window's rows have the blocks of all their steps in all groups; what left is freed once they are planned."""
    a = make_sequence(range(10), max_tokens=30)
    scheduler, runner, _ = serving([(0, 16), (6, 16)], a, policy=SeparateDecodes(8))
    step(scheduler, runner)
    assert a.tables == [[0, 1, 2], [GONE, 1, 2]]
    # Block 0 of the second group is free again, and handed out last.
    row = DecodeRow(0, 10, 8, ((0, 3, (3, 4)), (1, 3, (3, 4))))
    assert step(scheduler, runner)[0] == DecodeWindow(rows=(row,), steps=8)
    assert a.tables == [[0, 1, 2, 3, 4], [GONE, GONE, GONE, 3, 4]]


def test_a_group_that_is_short_shortens_the_window():
    """The full layers have room for eight steps, the window's for four: planned for eight, the pool raised."""
    a, b = (make_sequence([i] * 4, max_tokens=30, id=i) for i in range(2))
    scheduler, runner, *_ = serving([(0, 16), (6, 5)], a, b, policy=SeparateDecodes(8))
    step(scheduler, runner)
    plan, _ = step(scheduler, runner)
    assert (plan.steps, [row.length for row in plan.rows], plan.num_preempted) == (4, [4, 4], 0)


def test_one_group_gives_the_same_plans_beside_another():
    """Groups must not change what is scheduled while all have room: chunks, rows and blocks are those of one group."""

    def plans_of(windows):
        rng = random.Random(7)
        scheduler = make_scheduler(*((window, 200) for window in windows), seqs=5, budget=20, policy=SeparateDecodes(4))
        runner, plans = make_runner(scheduler), []
        trunk = [rng.randrange(VOCAB) for _ in range(40)]
        engine = Engine(scheduler, runner, vocab_size=VOCAB, max_model_len=60, async_depth=1)
        launch = runner.launch

        def noted(plan, masks):
            plans.append(plan)
            return launch(plan, masks)

        runner.launch = noted
        for index in range(20):
            prompt = trunk[: rng.randint(1, 40)]
            sampling = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True, n=rng.choice([1, 3]))
            engine.add(Request(index, tuple(prompt), sampling))
        while engine.has_unfinished:
            engine.step()
        return [first_group(plan) for plan in plans]

    def first_group(plan):
        work = plan.rows if isinstance(plan, DecodeWindow) else plan.chunks
        blocks = [tuple(change for change in each.blocks if change[0] == 0) for each in work]
        copies = [copy for copy in plan.copies if copy[0] == 0]
        rest = [(each.id, each.start, getattr(each, "length", None) or each.token_ids) for each in work]
        return rest, blocks, copies, plan.released, [spec.id for spec in plan.started]

    alone = plans_of([0])
    assert alone == plans_of([0, 50]) and len(alone) > 30


def test_a_reader_of_plans_is_not_told_what_is_gone():
    """Each block that leaves would be a write to the device's state; nobody reads these entries."""
    scheduler, runner, _ = serving([(6, 16)], make_sequence(range(3), max_tokens=30))
    told = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        told += [change for chunk in plan.chunks for change in chunk.blocks]
        scheduler.commit(plan, runner.run(plan))
    assert [first + place for _, first, blocks in told for place in range(len(blocks))] == list(range(8))
    assert GONE not in {block for *_, blocks in told for block in blocks}


def test_an_abort_forgets_what_was_in_flight_in_all_groups():
    """A plan that was never carried out left blocks findable in the second group."""
    scheduler, *_ = serving([(0, 16), (6, 16)], make_sequence(range(12), id=0))
    scheduler.schedule()
    scheduler.abort()
    assert scheduler.blocks.num_used == 0
    assert not any(run for pool in scheduler.blocks.pools for run in pool.prefixes.runs)


def test_a_sequence_that_failed_taints_all_groups():
    """NaN in blocks of the second group spread to whoever got them next."""
    scheduler, _, a = serving([(0, 4), (6, 4)], make_sequence(range(9), id=0), prefix_cache=False)
    plan = scheduler.schedule()
    assert a.tables == [[0, 1, 2], [GONE, 1, 2]]
    scheduler.commit(plan, StepResult([[NOT_FINITE]]))
    add(scheduler, make_sequence(range(16), id=1))
    # Block 0 of the second group had left the window: no token's logits speak for it.
    assert sorted(scheduler.schedule().wipes) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
