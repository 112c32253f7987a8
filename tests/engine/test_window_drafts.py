"""Decode windows with drafts: how many tokens they bring is not planned; and when they are worth it."""

import random
from itertools import count, pairwise

import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.drafts import window_drafter
from rosebatch.engine.drafts.window_drafter import StepCost, WindowDrafter, expected, share_of
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import DecodeWindow
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from tests.engine.fake_runner import VOCAB, FakeRunner, fake_completion, make_sequence, random_pools
from tests.engine.schedulers import add, drain, make_scheduler, step

IDS = count()
# Weights of a gigabyte, and tokens of a tenth of a megabyte.
COST = StepCost(10**9, 10**6, 10**5, 192)


@pytest.mark.parametrize("seed", range(40))
def test_answers_are_those_without_drafts(seed):
    """Fewer tokens than planned, ends inside of a window, blocks that windows give back, and preempted rows."""
    rng = random.Random(seed)
    pools = random_pools(rng, 24, 4)
    scheduler = Scheduler(*pools, max_num_seqs=64, max_num_batched_tokens=32, policy=SeparateDecodes(4))
    runner, kinds = FakeRunner(len(pools)), set()

    class AnyQueries:
        def propose(self, scheduler):
            scheduler.planner.queries = rng.choice([1, 2, 8, 8])

    def launch(plan, masks):
        kinds.add(plan.queries if isinstance(plan, DecodeWindow) else 0)
        scheduler.check_integrity()
        return runner.launch(plan)

    scheduled = type("Runner", (), {"launch": staticmethod(launch)})()
    engine = Engine(
        scheduler,
        scheduled,
        vocab_size=VOCAB,
        max_model_len=60,
        eos_token_ids=(3,),
        async_depth=1,
        drafter=AnyQueries(),
    )
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))] for _ in range(12)]
    sampling = [SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=rng.random() < 0.5) for _ in prompts]
    for number, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add(Request(number, TokenIds.of(prompt), own))
    done = {}
    while engine.has_unfinished:
        done |= {each.request.id: list(each.token_ids) for each in engine.step()}
        scheduler.check_integrity()
    for number, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
        stop = frozenset() if own.ignore_eos else frozenset({3})
        assert done[number] == fake_completion(prompt, own.max_tokens, stop)
    assert 0 in kinds and kinds & {2, 4, 8}
    assert scheduler.blocks.num_used == 0


@pytest.mark.parametrize("sampling", [{"presence_penalty": 1.0}, {"logprobs": 2}, {}])
def test_a_row_that_comes_back_from_the_host_may_keep_drafts_away(sampling, fake_runner):
    """It joins the window after it was decided on drafts, and its logits may be more than sampled."""
    options = {"policy": SeparateDecodes(2), "host_blocks": 5, "prefix_cache": False}
    scheduler = make_scheduler(num_blocks=6, block_size=2, **options)
    _, b = add(scheduler, make_sequence([0, 0], 7, 0), make_sequence([1, 1], 7, 1, **sampling))
    while not b.waits or not b.saved_blocks:
        step(scheduler, fake_runner)
    scheduler.planner.queries = 2
    _, plans = drain(scheduler, fake_runner)
    (resuming,) = (plan for plan in plans if any(row.resumed for row in plan.rows))
    assert resuming.queries == (1 if sampling else 2)
    assert b.output_token_ids == fake_completion([1, 1], 7)


@pytest.mark.parametrize(("rows", "queries"), [(1, 4), (2, 2), (3, 1)])
def test_a_window_has_no_more_rows_than_a_step(rows, queries, fake_runner):
    """Rows may have come back from the host since drafts were decided on: the runner had no place for their drafts."""
    sequences = [make_sequence([number], max_tokens=20, id=number) for number in range(rows)]
    scheduler = make_scheduler(*sequences, seqs=4, policy=SeparateDecodes(2))
    step(scheduler, fake_runner)
    scheduler.planner.queries = 4
    plan, _ = step(scheduler, fake_runner)
    assert (len(plan.rows), plan.queries) == (rows, queries)


@pytest.mark.parametrize(("blocks", "window"), [(9, (4, 8)), (3, (1, 8)), (2, (4, 1)), (1, (2, 1))])
def test_where_blocks_are_too_short_for_drafts_steps_need_not_be_few(blocks, window, fake_runner):
    """There, windows had one step and no drafts: one token, for all the time that the host takes."""
    sequence = make_sequence([5, 6], max_tokens=100)
    scheduler = make_scheduler(sequence, num_blocks=blocks, block_size=4, policy=SeparateDecodes(8))
    step(scheduler, fake_runner)
    scheduler.planner.queries = 8
    plan = scheduler.schedule()
    assert (plan.steps, plan.queries) == window


def drafter_of(cost=COST, most_tokens=10**4):
    """For steps of 1,024 rows."""
    return WindowDrafter(cost, 1024, most_tokens)


def decoding(token_ids, generated, left=10**4, **sampling):
    """A sequence with so many of its last tokens generated, and so many that may follow."""
    limits = SamplingParams(max_tokens=generated + left, **sampling)
    request = Request(0, TokenIds.of(token_ids[:-generated]), limits)
    sequence = SequenceState.start(request, id=next(IDS), max_model_len=10**6, stop_ids=frozenset())
    sequence.generated.fromlist(token_ids[-generated:])
    sequence.decoding = True
    return sequence


def queries_of(drafter, sequences, plans=6, waiting=0):
    """What is decided for each of so many plans of running sequences, while others wait."""
    scheduler = Scheduler(max_num_seqs=1024, max_num_batched_tokens=64, policy=SeparateDecodes(8))
    scheduler.queues.running += sequences
    scheduler.queues.waiting += [original()] * waiting
    found = []
    for _ in range(plans):
        drafter.propose(scheduler)
        found.append(scheduler.planner.queries)
    return found


def copying(**sampling):
    numbers = random.Random(4)
    document = [numbers.randrange(10**5) for _ in range(60)]
    return decoding(document + document[:30], 30, **sampling)


def original(**sampling):
    numbers = random.Random(5)
    return decoding([numbers.randrange(10**5) for _ in range(90)], 30, **sampling)


def test_rows_that_copy_have_drafts():
    """And others have none. How many there are changes with what they bring."""
    found = queries_of(drafter_of(), [copying()] * 4)
    assert found[0] > 1 and len({*found}) == 1
    assert queries_of(drafter_of(), [original()] * 4) == [1] * 6


def test_work_ends_with_its_slowest_rows():
    """An eighth of 128 rows repeated itself: steps with drafts were longer, and no fewer. They pay if others wait."""
    rows = [original(), copying(), copying(), copying()]
    assert queries_of(drafter_of(), rows, waiting=1)[-1] > 1
    assert queries_of(drafter_of(), rows, 40) == [1] * 40


def test_a_window_shows_which_rows_are_slow():
    """What a few rows had shown was taken for all: 32 of them got a sixth fewer tokens a second, until they ended."""
    rows, drafter = [copying() for _ in range(8)], drafter_of()
    assert queries_of(drafter, rows)[-1] > 1
    scheduler = Scheduler(max_num_seqs=1024, max_num_batched_tokens=64, policy=SeparateDecodes(8))
    scheduler.queues.running += rows
    decided = []
    for lengths in [[40] * 8] * 2 + [[64] * 7 + [8]] * 6:
        scheduler.planner.queries = 8
        drafter.learn(8, 8, {row.spec.id: length for row, length in zip(rows, lengths, strict=True)})
        drafter.propose(scheduler)
        decided.append(scheduler.planner.queries > 1)
    assert decided[:2] == [True, True] and not decided[-1] and drafter.right > 0.8
    assert len(drafter._of_rows) == 8
    queries_of(drafter, [original()], 99)
    assert len(drafter._of_rows) == 1, "rows that have ended were kept"


def test_nothing_is_kept_of_rows_that_had_drafts():
    """While drafts are on there are no looks, and each row of a long job stayed in memory."""
    drafter = drafter_of()
    for first in range(0, 1000, 10):
        drafter.learn(4, 8, dict.fromkeys(range(first, first + 10), 32))
    assert len(drafter._of_rows) == 10 and drafter.right > 0.9


def test_rows_of_another_job_are_looked_at_first():
    """The last rows of a job repeated themselves, and drafts were tried on the first ones of the next, for nothing."""
    drafter = drafter_of()
    assert queries_of(drafter, [copying() for _ in range(4)])[-1] > 1
    assert queries_of(drafter, [original() for _ in range(4)]) == [1] * 6


def test_rows_whose_last_tokens_are_under_way():
    """None of their tokens were left: time was divided by none."""
    assert queries_of(drafter_of(), [copying(left=0) for _ in range(4)]) == [1] * 6


def test_a_graph_has_to_be_worth_its_capture():
    """64 tokens a row took 0.1 s without drafts, and 0.2 with graphs of drafts for each number of rows."""
    assert queries_of(drafter_of(), [copying(left=30)] * 4, 12) == [1] * 12
    assert queries_of(drafter_of(), [copying(left=600)] * 4, 12)[-1] > 1
    # Rows that wait take steps, too; and there may be a graph.
    assert queries_of(drafter_of(), [copying(left=30)] * 4, 12, waiting=200)[-1] > 1
    drafter = drafter_of()
    queries_of(drafter, [copying()] * 4, 12)
    assert queries_of(drafter, [copying(left=30)] * 4, 12)[-1] > 1


def test_a_step_has_room_for_rows_of_drafts():
    """300 sequences are padded to 512, so two rows of each are all that a step of 1,024 has."""
    drafter = drafter_of(StepCost(10**9, 0, 10**5, 10**6))
    assert queries_of(drafter, [copying()] * 300)[-1] == 2
    assert queries_of(drafter, [copying()] * 513, 1) == [1]


def test_rows_that_share_their_keys_have_dear_drafts():
    """A step with drafts reads the keys of each row, where one without reads those of a common prompt once."""
    cost, rows = StepCost(10**9, 0, 10**7, 10**4), [copying() for _ in range(16)]

    def first(sharing_rows, used):
        scheduler = make_scheduler(num_blocks=40, block_size=64, policy=SeparateDecodes(8))
        scheduler.pool.allocate(used)
        scheduler.queues.running += rows
        WindowDrafter(cost, 1024, 10**4, sharing_rows).propose(scheduler)
        return scheduler.planner.queries

    # They have 1,440 tokens together.
    assert first(None, 3) > 1 and first(17, 3) > 1 and first(16, 25) > 1
    assert first(16, 3) == 1


def test_rows_that_are_too_long_for_drafts_tell_nothing():
    """The device finds none in them: windows with drafts would take their price for nothing, again and again."""
    assert queries_of(drafter_of(most_tokens=89), [copying()] * 4) == [1] * 6
    assert queries_of(drafter_of(most_tokens=90), [copying()] * 4)[0] > 1


@pytest.mark.parametrize("sampling", [{"presence_penalty": 1.0}, {"logprobs": 2}])
def test_a_row_whose_logits_are_more_than_sampled_keeps_drafts_away(sampling):
    """A step with drafts has neither counts of tokens nor places for log-probabilities."""
    assert queries_of(drafter_of(), [copying(), copying(**sampling)]) == [1] * 6


def test_rows_are_looked_at_less_and_less(monkeypatch):
    """Each look takes some microseconds of the host, which open text has no use for."""
    looked, plans = [], []
    real = window_drafter.find_ending
    monkeypatch.setattr(window_drafter, "find_ending", lambda *args: looked.append(len(plans)) or real(*args))
    drafter, rows = drafter_of(), [original(), original()]
    for _ in range(60):
        queries_of(drafter, rows, 1)
        plans.append(1)
    assert sorted({*looked}) == [0, 2, 5, 10, 19, 36, 53]


def test_drafts_that_are_wrong_end():
    """They came back after every look at rows that would have been right: each time, a window took longer."""
    drafter = drafter_of()
    scheduler = Scheduler(max_num_seqs=64, max_num_batched_tokens=64, policy=SeparateDecodes(8))
    rows = [copying() for _ in range(8)]
    scheduler.queues.running += rows
    decided = []
    for _ in range(200):
        drafter.propose(scheduler)
        decided.append(scheduler.planner.queries)
        if decided[-1] > 1:
            # No draft was right.
            drafter.learn(decided[-1], 8, {row.spec.id: 8 for row in rows})
    tried = [number for number, queries in enumerate(decided) if queries > 1]
    pauses = [later - earlier for earlier, later in pairwise(tried) if later - earlier > 1]
    assert pauses == sorted(pauses) and max(pauses) > 64 and len(tried) < 20
    # Once they are right, they stay.
    for _ in range(80):
        drafter.propose(scheduler)
        if scheduler.planner.queries > 1:
            drafter.learn(scheduler.planner.queries, 8, {row.spec.id: 8 * scheduler.planner.queries for row in rows})
    assert scheduler.planner.queries == 8


def test_rows_that_end_in_a_window_tell_nothing():
    """They got fewer tokens than steps, though all drafts were right."""
    drafter = drafter_of()
    drafter.learn(4, 8, dict(enumerate([32, 3, 32, 1])))
    assert drafter.right == pytest.approx(0.5, abs=0.001)
    drafter.learn(4, 8, {5: 3, 6: 1})
    assert drafter.right == pytest.approx(0.5, abs=0.001)


def test_shares_and_tokens_fit_each_other():
    """So what a window brought tells how many drafts are right."""
    for queries in (2, 4, 8):
        for share in (0.0, 0.2, 0.7, 0.95):
            assert share_of(expected(share, queries), queries) == pytest.approx(share, abs=0.001)
    assert expected(1.0, 8) == 8 and expected(0.0, 8) == 1


@pytest.mark.parametrize(
    ("rows", "length", "queries", "milliseconds"),
    [
        (1, 192, 1, 0.87),
        (32, 192, 1, 0.97),
        (32, 192, 2, 1.33),
        (32, 192, 4, 1.69),
        (32, 320, 4, 1.87),
        (8, 1200, 1, 1.13),
        (128, 80, 1, 1.39),
        (128, 80, 2, 2.16),
    ],
)
def test_the_price_of_a_step(rows, length, queries, milliseconds):
    """Seconds on an H200, of Qwen3-0.6B: drafts were thought to cost a fifth of a step, where it was three quarters."""
    cost = StepCost(1_192_099_840, 48 * 151_936, 114_688, 192)
    assert cost.of(rows, rows * length, queries) * 1e3 == pytest.approx(milliseconds, rel=0.2)
