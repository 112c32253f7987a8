"""Requests dropped in the middle: all blocks are free, nothing uncomputed is findable, and the engine goes on."""

import gc
import pickle
import random
import weakref
from contextlib import suppress
from functools import partial

import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import MIXED, SeparateDecodes
from rosebatch.engine.torch_runner.batch import BlockTables
from tests.engine import test_triton_runner
from tests.engine.constraint import EveryThird
from tests.engine.fake_runner import VOCAB, FakeRunner, fake_completion, make_sequence, random_pools
from tests.engine.schedulers import add, drain, make_scheduler, step
from tests.engine.small_models import device_engine, plain_engine
from tests.helpers.marks import needs_interpreter


def make_engine(scheduler, runner, async_depth=0):
    return Engine(scheduler, runner, vocab_size=VOCAB, max_model_len=24, async_depth=async_depth)


def assert_idle(scheduler):
    scheduler.check_integrity()
    assert (scheduler.has_unfinished, scheduler.num_unfinished, scheduler.blocks.num_used) == (False, 0, 0)


def starts(plan):
    return [(chunk.id, chunk.start) for chunk in plan.chunks]


def test_every_kind_of_sequence_is_dropped(fake_runner):
    """Decoding, in the middle of its prompt, preempted, and waiting."""
    prompts = [1] * 5, [2] * 3, range(8)
    sequences = (make_sequence(prompt, id=i) for i, prompt in enumerate(prompts))
    scheduler = make_scheduler(*sequences, num_blocks=4, budget=6, prefix_cache=False)
    for _ in range(3):
        plan, _ = step(scheduler, fake_runner)
    assert starts(plan) == [(0, 6), (1, 3)]
    assert [s.id for s in scheduler.queues.waiting] == [2]
    while not plan.num_preempted:
        plan, _ = step(scheduler, fake_runner)
    scheduler.add(make_sequence([3], id=3))
    scheduler.abort()
    assert_idle(scheduler)
    # A runner forgets all of them with the next plan, and is told so once.
    scheduler.add(make_sequence([4, 4], max_tokens=3, id=4))
    plan, _ = step(scheduler, fake_runner)
    assert (plan.reset, plan.released, plan.num_preempted, starts(plan)) == (True, (), 0, [(4, 0)])
    assert not step(scheduler, fake_runner)[0].reset


def test_a_prompt_half_computed_is_dropped(fake_runner):
    scheduler = make_scheduler(make_sequence(range(20), id=0), budget=6)
    step(scheduler, fake_runner)
    scheduler.abort()
    assert_idle(scheduler)
    # What was computed is still findable.
    scheduler.add(make_sequence(range(20), id=1))
    assert starts(step(scheduler, fake_runner)[0]) == [(1, 4)]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_forks_are_dropped(steps, fake_runner):
    """Before their prompt is computed, right after that, and while they wait for slots and hold blocks."""
    first, *forks = (make_sequence(range(6), id=i, sample=i) for i in range(4))
    first.forks = forks
    scheduler = make_scheduler(first, seqs=2)
    for _ in range(steps):
        step(scheduler, fake_runner)
    assert scheduler.num_unfinished == 4
    assert sum(bool(fork.block_ids) for fork in forks) == (0 if steps == 0 else 3)
    assert len(scheduler.queues.waiting) == [1, 0, 2][steps]
    scheduler.abort()
    assert_idle(scheduler)
    again, fork = (make_sequence(range(6), max_tokens=3, id=10 + i, sample=i) for i in range(2))
    again.forks = [fork]
    scheduler.add(again)
    assert scheduler.num_unfinished == 2
    drain(scheduler, fake_runner)
    assert_idle(scheduler)


def test_blocks_of_a_plan_that_was_not_committed_are_not_findable(fake_runner):
    """A forward pass was interrupted, and the next prompt with this prefix read keys that were never written."""
    scheduler = make_scheduler(make_sequence(range(8), max_tokens=1, id=0))
    step(scheduler, fake_runner)
    add(scheduler, make_sequence([*range(8), *range(20, 30)], id=1), make_sequence(range(8), id=2))
    plan = scheduler.schedule()
    assert starts(plan) == [(2, 7), (1, 8)]
    # The source of this copy is held until a commit that never comes.
    assert plan.copies == ((0, 1, 5),)
    scheduler.abort()
    assert_idle(scheduler)
    scheduler.add(make_sequence([*range(8), *range(20, 30)], id=3))
    plan = scheduler.schedule()
    assert starts(plan) == [(3, 8)], "what was committed before is found, and no more"
    # The forgotten ones are without a hash again, and taken like those that nobody has had: lowest numbers first.
    assert plan.chunks[0].blocks == ((0, 0, (0, 1, 2, 3, 4)),)


class Interruption(BaseException):
    """What an interrupt from the keyboard is to an engine."""


class InterruptedRunner(FakeRunner):
    """Is interrupted in one launch or wait: before the plan was looked at, in the middle of it, or while waiting."""

    def __init__(self, scheduler, at, where):
        super().__init__(len(scheduler.blocks.pools))
        self.scheduler, self.at, self.where = scheduler, at, where
        self.launches = 0

    def launch(self, plan, masks):
        assert pickle.loads(pickle.dumps(plan)) == plan
        self.launches += 1
        interrupted = self.launches == self.at and self.where
        if interrupted == "before":
            raise Interruption
        wait = super().launch(plan, masks)
        if interrupted == "during":
            # Some of the plan's sequences are unknown by now, others were never forgotten.
            self.specs.pop(next(iter(self.specs)))
            raise Interruption
        self.check(self.scheduler)

        def interruptible():
            if interrupted == "wait":
                raise Interruption
            return wait()

        return interruptible


@pytest.mark.parametrize("policy", [MIXED, SeparateDecodes(4)], ids=["mixed", "separate"])
@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.thorough if n >= 40 else ()) for n in range(100)])
def test_an_engine_goes_on_after_an_abort(seed, policy):
    """With or without an interruption somewhere; with plans under way, forks waiting, chunks and preemptions."""
    rng = random.Random(seed)
    async_depth = 0 if policy is MIXED else rng.randint(0, 2)
    size = rng.choice([1, 2, 4])
    pools = random_pools(rng, rng.choice([24, 48, 200]) // size, size)
    scheduler = Scheduler(
        *pools,
        max_num_seqs=rng.choice([1, 3, 16]),
        max_num_batched_tokens=rng.choice([4, 64]),
        policy=policy,
        prefix_cache=rng.random() < 0.7,
        host_blocks=0 if len(pools) > 1 or pools[0].window else 100,
    )
    runner = InterruptedRunner(scheduler, at=rng.randint(1, 12), where=rng.choice([None, "before", "during", "wait"]))
    engine = make_engine(scheduler, runner, async_depth)
    trunk = [rng.randrange(VOCAB) for _ in range(12)]
    requests = []
    for index in range(rng.randint(2, 10)):
        prompt = tuple(trunk[: rng.randint(1, 12)])
        requests.append(Request(index, prompt, SamplingParams(max_tokens=rng.randint(1, 12), n=rng.choice([1, 3]))))
    for request in requests:
        engine.add(request)
    with suppress(Interruption):
        for _ in range(rng.randint(0, 12)):
            if engine.has_unfinished:
                engine.step()
    # An abort waits itself; interrupted, it leaves an idle engine all the same.
    with suppress(Interruption):
        engine.abort()
    assert_idle(scheduler)
    assert engine.num_unfinished == 0
    runner.where = None
    done = {(c.request.id, c.sample): c for c in engine.run(requests)}
    assert len(done) == sum(request.sampling.n for request in requests)
    for (index, sample), completion in done.items():
        prompt, limit = requests[index].prompt_token_ids, requests[index].sampling.max_tokens
        seed = sample * 0x9E3779B97F4A7C15 % 2**64
        assert completion.token_ids == tuple(fake_completion(prompt, limit, seed=seed))
    assert_idle(scheduler)


def test_a_runner_forgets_what_was_aborted():
    """No plan releases them any more: their tables stayed for ever, and on a device their slots."""
    tables, scheduler = BlockTables(), make_scheduler(make_sequence(range(6), id=0))
    tables.update(scheduler.schedule())
    assert tables.blocks == {0: [[0, 1]]}
    scheduler.abort()
    (other,) = add(scheduler, make_sequence(range(3), id=1))
    tables.update(scheduler.schedule())
    assert (tables.blocks, tables.specs) == ({1: other.tables}, {1: other.spec})


def test_grammars_are_dropped():
    """Each holds a parser and a mask: those of aborted requests would stay as long as the engine."""
    engine = make_engine(make_scheduler(), FakeRunner())
    kept = weakref.WeakSet()

    def constraint():
        made = EveryThird(VOCAB)
        kept.add(made)
        return made

    engine.add(Request(0, (1, 2), SamplingParams(n=2)), constraint=constraint)
    assert len(kept) == 2
    engine.abort()
    gc.collect()
    assert len(kept) == 0


def test_an_abort_that_is_interrupted_itself():
    """It waits for the oldest of two plans. The other one's result would be recorded for sequences that are gone."""
    scheduler = make_scheduler(policy=SeparateDecodes(4))
    runner = InterruptedRunner(scheduler, at=1, where="wait")
    engine = make_engine(scheduler, runner, async_depth=2)
    request = Request(0, (1, 2), SamplingParams(max_tokens=12))
    engine.add(request)
    assert engine.step() == engine.step() == []
    with pytest.raises(Interruption):
        engine.abort()
    assert_idle(scheduler)
    assert [done.token_ids for done in engine.run([request])] == [tuple(fake_completion([1, 2], 12))]


def test_an_error_in_a_result_that_nobody_reads():
    """The abort raised it, and so hid the error that had ended the run."""

    class Failing(FakeRunner):
        def launch(self, plan, masks):
            wait = super().launch(plan, masks)
            return (lambda: 1 // 0) if plan.started and plan.started[0].id == 0 else wait

    engine = make_engine(make_scheduler(policy=SeparateDecodes(4)), Failing(), async_depth=1)
    request = Request(0, (1, 2), SamplingParams(max_tokens=6))
    engine.add(request)
    assert engine.step() == []
    engine.abort()
    assert_idle(engine.scheduler)
    assert [done.token_ids for done in engine.run([request])] == [tuple(fake_completion([1, 2], 6))]


def test_an_abort_of_an_idle_engine():
    engine = make_engine(make_scheduler(), FakeRunner())
    engine.abort()
    (done,) = engine.run([Request(0, (1, 2), SamplingParams(max_tokens=2))])
    engine.abort()
    assert [again.token_ids for again in engine.run([done.request])] == [done.token_ids]


def test_an_error_while_results_are_recorded():
    """One sequence has finished, the matcher of the next one fails: the first was finished a second time."""

    class Broken:
        def feed(self, token_id):
            raise ZeroDivisionError

    engine = make_engine(make_scheduler(), FakeRunner())
    engine.add(Request(0, (1, 2), SamplingParams(max_tokens=1)))
    engine.add(Request(1, (3, 4)), stop_matcher=Broken)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.abort()
    assert_idle(engine.scheduler)
    (done,) = engine.run([Request(2, (1, 2), SamplingParams(max_tokens=4))])
    assert done.token_ids == tuple(fake_completion([1, 2], 4))


def interrupt(monkeypatch, model, call):
    """Interrupt the n-th forward pass of a model in its last layer: some K and V are written, others are not."""
    forward, calls, last = model.forward, [], len(model.mixers) - 1

    def interrupted(input_ids, positions, attention, wanted=None):
        calls.append(None)

        def mix(spec, *inputs, wanted=None):
            if len(calls) == call and spec.layer == last:
                raise Interruption
            return attention(spec, *inputs, wanted=wanted)

        return forward(input_ids, positions, mix, wanted)

    monkeypatch.setattr(model, "forward", interrupted)


def assert_recovers(name, engine, expected):
    """Until the interruption, an abort, and then everything once more."""
    with pytest.raises(Interruption):
        test_triton_runner.run(name, engine)
    engine.abort()
    assert_idle(engine.scheduler)
    assert test_triton_runner.run(name, engine) == expected


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("call", [1, 2, 3, 6, 9])
def test_a_forward_pass_that_was_interrupted(name, call, monkeypatch):
    """On a CPU, an interrupt nearly always comes in one. Its blocks were found by the next prompt, half written."""
    engine = plain_engine(name)
    interrupt(monkeypatch, engine.runner.model, call)
    assert_recovers(name, engine, test_triton_runner.run(name, plain_engine(name)))


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
@pytest.mark.matrix
class TestOnADevice:
    @pytest.mark.parametrize("call", [1, 4, 12])
    def test_a_launch_that_was_interrupted(self, call, monkeypatch):
        """In a prompt's chunk or within a window of steps, with a plan under way whose tokens nobody reads."""
        engine = device_engine("llama")
        interrupt(monkeypatch, engine.runner.model, call)
        assert_recovers("llama", engine, test_triton_runner.run("llama", plain_engine("llama")))

    @pytest.mark.thorough
    @pytest.mark.parametrize("interrupted", [False, True])
    def test_plans_under_way(self, interrupted, monkeypatch):
        """Dropped again and again, with their tokens read or unread: all buffers are free in the next run."""
        engine = device_engine("llama")
        launch, aborting = engine.runner.launch, False

        def interruptible(plan, masks):
            wait = launch(plan, masks)

            def waiting():
                if interrupted and aborting:
                    raise Interruption
                return wait()

            return waiting

        monkeypatch.setattr(engine.runner, "launch", interruptible)
        for steps in range(1, 6):
            # The first one's tokens are sampled when somebody waits for them.
            engine.add(Request(9, (1, 2), SamplingParams()), constraint=partial(EveryThird, 50))
            for request in test_triton_runner.requests("llama")[:2]:
                engine.add(request)
            for _ in range(steps):
                engine.step()
            aborting = True
            with suppress(Interruption):
                engine.abort()
            aborting = False
            assert_idle(engine.scheduler)
        assert test_triton_runner.run("llama", engine) == test_triton_runner.run("llama", plain_engine("llama"))
