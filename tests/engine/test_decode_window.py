"""Plans that run ahead of their results: windows of decode steps, late tokens, preemption in between."""

import pickle
import random

import numpy as np
import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.engine.long_rope import LongRope
from rosebatch.engine.plan import DecodeRow, DecodeWindow
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.triton_runner.results import until_ended
from rosebatch_kernels.common.tokens import NO_TOKEN
from tests.engine.fake_runner import VOCAB, FakeRunner, fake_completion, make_sequence, random_pools
from tests.engine.schedulers import make_scheduler, serving

END = 3


class AheadRunner(FakeRunner):
    """Checks each plan right after it was made, when earlier results may still be unknown to the scheduler."""

    def __init__(self, scheduler):
        super().__init__(len(scheduler.blocks.pools))
        self.scheduler = scheduler
        self.windows = []

    def launch(self, plan, masks):
        assert pickle.loads(pickle.dumps(plan)) == plan
        if isinstance(plan, DecodeWindow):
            self.windows.append(plan.steps)
        wait = super().launch(plan, masks)
        self.check(self.scheduler)
        if self.scheduler.restarts is not None:
            self.check_factors(plan, self.scheduler.restarts.trained_len)
        return wait

    def check_factors(self, plan, trained_len):
        """No token behind the trained length is computed with short factors; only longer sequences have long ones."""
        for each in plan.rows if isinstance(plan, DecodeWindow) else plan.chunks:
            end = each.start + each.length if isinstance(plan, DecodeWindow) else each.end
            is_long = bool(self.specs[each.id].salt)
            assert is_long or end <= trained_len
            assert not is_long or len(self.tokens[each.id]) > trained_len


def two_sequences():
    """A scheduler whose windows have up to four steps, and two sequences that it serves."""
    a, b = make_sequence([1, 2, 3], max_tokens=4, id=0), make_sequence([4, 5, 6, 7, 8], max_tokens=9, id=1)
    return serving(a, b, num_blocks=8, seqs=4, policy=SeparateDecodes(4))


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.thorough if n >= 40 else ()) for n in range(100)])
def test_tokens_do_not_depend_on_how_far_plans_run_ahead(seed, async_depth):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    pools = random_pools(rng, max(2, rng.choice([24, 48, 200]) // size), size)
    max_steps = rng.choice([1, 4, 8])
    scheduler = Scheduler(
        *pools,
        max_num_seqs=rng.choice([1, 3, 16]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        policy=SeparateDecodes(max_steps),
        prefix_cache=rng.random() < 0.6,
        restarts=rng.choice([None, LongRope(rng.randint(1, 20), 24)]),
    )
    runner = AheadRunner(scheduler)
    engine = Engine(scheduler, runner, vocab_size=VOCAB, max_model_len=24, eos_token_ids=[END], async_depth=async_depth)
    trunk = [rng.randrange(VOCAB) for _ in range(12)]
    wanted = {}
    for index in range(rng.randint(1, 12)):
        prompt = trunk[: rng.randint(1, 12)]
        limit, ends = rng.randint(1, 24 - len(prompt)), rng.random() < 0.5
        sampling = SamplingParams(max_tokens=limit, ignore_eos=not ends, n=rng.choice([1, 1, 3]))
        request = Request(index, tuple(prompt), sampling)
        engine.add(request)
        limit = min(limit, engine.max_model_len - len(prompt))
        for sample in range(sampling.n):
            own = SequenceState.start(request, id=0, sample=sample, max_model_len=24).sampling.seed
            wanted[index, sample] = tuple(fake_completion(prompt, limit, frozenset({END} if ends else ()), own))
    got = {}
    while engine.has_unfinished:
        got |= {(done.request.id, done.sample): done.token_ids for done in engine.step()}
        scheduler.check_integrity()
    assert got == wanted
    assert scheduler.blocks.num_used == 0
    assert max(runner.windows, default=0) <= max_steps


def in_flight(scheduler, runner):
    """Functions that launch the next plan, and commit the oldest one under way, whose finished sequences they give."""
    launched = []

    def launch():
        plan = scheduler.schedule()
        launched.append((plan, runner.launch(plan)))
        runner.check(scheduler)
        scheduler.check_integrity()
        return plan

    def commit():
        plan, wait = launched.pop(0)
        return scheduler.commit(plan, wait()).finished

    return launch, commit


def test_windows_block_by_block(fake_runner):
    """Rows with the blocks of the whole window; a slot is released with the window that plans the last token."""
    scheduler, a, b = two_sequences()
    launch, commit = in_flight(scheduler, fake_runner)

    assert launch().started == (a.spec, b.spec)
    # The prompts' tokens are not known yet. Three more for a, which is then at its end.
    rows = (DecodeRow(0, 3, 3, ((0, 1, (3,)),)), DecodeRow(1, 5, 4, ((0, 2, (4,)),)))
    assert launch() == DecodeWindow(rows=rows, steps=4)
    assert commit() == []
    assert launch() == DecodeWindow(rows=(DecodeRow(1, 9, 4, ((0, 3, (5,)),)),), steps=4, released=(0,))
    assert commit() == [a]
    assert scheduler.schedule() is None
    assert commit() == [b]
    assert (scheduler.has_unfinished, scheduler.pool.num_free) == (False, 8)
    scheduler.add(make_sequence([9], max_tokens=1, id=2))
    assert launch().released == (1,)


def test_a_window_ends_where_a_sequence_starts_over(fake_runner):
    """Other rows go on. It starts over once its tokens are known; one that ends there does not."""
    # The last token of b is the first behind the trained length, which nobody computes.
    a, b = make_sequence([1, 2, 3, 4], max_tokens=9, id=0), make_sequence([5, 6, 7, 8, 9], max_tokens=2, id=1)
    c = make_sequence([1, 2, 3, 4, 5, 6, 7], max_tokens=9, id=2)
    scheduler = make_scheduler(a, b, c, num_blocks=16, seqs=4, policy=SeparateDecodes(4), restarts=LongRope(6, 100))
    launch, commit = in_flight(scheduler, fake_runner)

    assert [bool(spec.salt) for spec in launch().started] == [False, False, True]
    assert [(row.id, row.start, row.length) for row in launch().rows] == [(0, 4, 2), (1, 5, 1), (2, 7, 4)]
    # The newest tokens of a are not known yet.
    assert [(row.id, row.start, row.length) for row in launch().rows] == [(2, 11, 4)]
    commit()
    assert scheduler.schedule() is None
    assert commit() == [b]
    plan = launch()
    assert (plan.released, plan.num_preempted, plan.started) == ((2, 0), 0, (a.spec,))
    assert a.spec.salt
    # The block of c has the same tokens and long factors.
    assert [(chunk.id, chunk.start, chunk.end) for chunk in plan.chunks] == [(0, 4, 7)]


def test_the_time_between_tokens(fake_runner):
    """A reader sees the tokens of a window together, so it counts once; nothing is counted before a first token."""
    scheduler, a, b = two_sequences()
    waits = []
    for now in (1.0, 3.5, 4.0):
        plan = scheduler.schedule()
        waits.append(scheduler.commit(plan, fake_runner.run(plan), now).gaps)
    assert waits == [{}, {2.5: 2}, {0.5: 1}]
    assert list(a.token_times) == [1.0, 3.5, 3.5, 3.5]
    assert list(b.token_times) == [1.0, *[3.5] * 4, *[4.0] * 4]


class Watched(FakeRunner):
    """Notes each plan, and how many were launched behind it when it was waited for."""

    def __init__(self):
        super().__init__()
        self.launched, self.waited = [], []

    def launch(self, plan, masks):
        wait, number = super().launch(plan, masks), len(self.launched)
        self.launched.append(plan)

        def watched():
            self.waited.append(len(self.launched) - 1 - number)
            return wait()

        return watched


def watched_engine(runner, *, budget, slots=4):
    scheduler = make_scheduler(num_blocks=64, seqs=slots, budget=budget, policy=SeparateDecodes(4))
    return Engine(scheduler, runner, vocab_size=VOCAB, max_model_len=24, async_depth=1)


def test_the_device_always_has_a_plan_behind_the_one_that_is_waited_for():
    """Sequences that all end at once kept their slots until their last tokens were known, and the device stood idle."""
    runner = Watched()
    engine = watched_engine(runner, budget=640)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    done = list(engine.run(Request(i, (i, 1, 2), sampling) for i in range(12)))
    assert [len(completion.token_ids) for completion in done] == [9] * 12
    assert [isinstance(plan, DecodeWindow) for plan in runner.launched] == [False, True, True] * 3
    assert runner.waited == [1] * 8 + [0]


def test_the_device_begins_before_all_prompts_are_queued():
    """It stood idle while 256 prompts were checked, hashed and planned: a tenth of a short run."""
    runner = Watched()
    engine = watched_engine(runner, budget=64, slots=8)
    begun = []

    def requests():
        for number in range(12):
            begun.append(len(runner.launched))
            yield Request(number, (number, 1, 2), SamplingParams(max_tokens=2, ignore_eos=True))

    assert len(list(engine.run(requests()))) == 12
    # Three prompts of three tokens are an eighth of a step. Those without a slot are not worth steps of their own.
    assert begun == [0] * 3 + [1] * 3 + [2] * 6


def test_the_device_works_while_thousands_of_prompts_are_queued():
    """All were queued before the next step: 2,000 rows behind 1,792 tokens took 0.1 s, and the device waited."""
    engine = watched_engine(Watched(), budget=64)
    read = 0

    def requests():
        nonlocal read
        for number in range(40):
            read += 1
            yield Request(number, (number % VOCAB, 1, 2), SamplingParams(max_tokens=2, ignore_eos=True))

    ahead = [read - number for number, _ in enumerate(engine.run(requests()))]
    assert len(ahead) == 40
    # Those that run, as many that wait, and no more than a step's that have finished.
    assert max(ahead) <= 8


def test_decode_steps_are_planned_while_the_last_prompts_run():
    """A short last step of prompts was through before its decode steps were launched."""
    runner = Watched()
    engine = watched_engine(runner, budget=8)
    for number in range(4):
        engine.add(Request(number, (number, 1, 2, 3, 4, 5), SamplingParams(max_tokens=9, ignore_eos=True)))
    while engine.has_unfinished:
        engine.step()
    assert [isinstance(plan, DecodeWindow) for plan in runner.launched] == [False] * 3 + [True] * 2
    # Two plans were behind the first ones; as ever one is behind decode steps.
    assert runner.waited == [2, 2, 1, 1, 0]


@pytest.mark.parametrize(
    ("tokens", "lengths", "expected"),
    [
        ([[5, 6], [7, 8]], [2, 2], [[5, 6], [7, 8]]),
        ([[5, NO_TOKEN], [7, 8]], [2, 2], [[5], [7, 8]]),
        ([[5, 6], [7, 8]], [2, 1], [[5, 6], [7]]),
        ([[5], [NO_TOKEN]], [1, 1], [[5], []]),
    ],
)
def test_tokens_of_a_window(tokens, lengths, expected):
    """What the device wrote behind a sequence's end is no token of it."""
    assert until_ended(np.array(tokens, np.int32), lengths) == expected
