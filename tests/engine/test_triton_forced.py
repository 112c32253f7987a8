"""Known tokens of a grammar, several in a decode step of the Triton runner: the tokens of steps that sample each."""

from functools import partial

import numpy as np
import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.triton_runner import prefix_groups
from rosebatch.engine.triton_runner.graphs import StepGraphs
from tests.engine import small_models
from tests.engine.constraint import EveryThird
from tests.engine.small_models import VOCAB, device_engine, plain_engine
from tests.helpers.marks import ON_TRITON_RUNNER

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER]

KINDS = [{}, {"temperature": 0.8, "seed": 4}, {"presence_penalty": 0.9, "temperature": 0.5, "seed": 5}, {"n": 2}]


class Fields:
    """Forces runs of tokens of several lengths, longer than a step computes too; complete after 19."""

    error, forces = None, True
    RUNS = ((1, 3), (5, 15), (17, 18))

    def __init__(self, vocab_size):
        self.tokens = []

    def forced(self):
        place = len(self.tokens)
        return (7 * place + 3) % VOCAB if any(first <= place < end for first, end in self.RUNS) else None

    @classmethod
    def fill_all(cls, constraints, masks):
        for mask, constraint in zip(masks, constraints, strict=True):
            allowed = np.zeros(32 * len(mask), bool)
            allowed[slice(None) if (token := constraint.forced()) is None else token] = True
            mask[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    def feed(self, token_id):
        assert self.forced() in (None, token_id)
        self.tokens.append(token_id)
        return len(self.tokens) == 19

    @classmethod
    def feed_all(cls, constraints, token_ids):
        return [each.feed(token_id) for each, token_id in zip(constraints, token_ids, strict=True)]

    def follow(self, token_id):
        """All of a run."""
        run, ended = [token_id], self.feed(token_id)
        while not ended and (token := self.forced()) is not None:
            run.append(token)
            ended = self.feed(token)
        return run, ended

    def rest(self):
        return ()


def run(engine, beginning=()):
    """Request id and sample -> tokens and finish reason. Every fourth row has no grammar."""
    for number in range(14):
        prompt = (*beginning, *((7 * number + 3 * i + i * i) % VOCAB for i in range(1 + number % 6)))
        sampling = SamplingParams(max_tokens=20 - number % 4, ignore_eos=True, **KINDS[number % len(KINDS)])
        engine.add(Request(number, prompt, sampling), constraint=partial(Fields, VOCAB) if number % 4 else None)
    done = {}
    while engine.has_unfinished:
        for each in engine.step():
            done[each.request.id, each.sample] = each.token_ids, each.finish_reason
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0
    return done


@pytest.fixture(scope="module")
def expected():
    """What the PyTorch runner generates, a token a step, by model."""
    return {name: run(plain_engine(name)) for name in ("llama", "gpt2", "softmaxes", "e4m3")}


LIMITS = {
    "plenty": {},
    "invariant": {"on": ("batch_invariant",)},
    "cramped": {"blocks": 17},
    "at once": {"off": ("late_results",)},
}


@pytest.mark.parametrize("name", ["llama", "gpt2", "softmaxes", "e4m3"])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_tokens_are_those_of_single_steps(name, limits, expected, monkeypatch):
    """Runs that end a block, that a limit cuts, beside rows without a grammar, of rows that are preempted."""
    monkeypatch.setattr(small_models, "SLOTS", 160)
    engine = device_engine(name, **{"blocks": 150} | limits)
    engine.scheduler.planner.forces = VOCAB
    assert run(engine) == expected[name]
    assert engine.stats.forced > 80
    assert (engine.stats.preemptions > 0) is ("blocks" in limits)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "e4m3"])
@pytest.mark.parametrize("blocks", [150, 17], ids=["plenty", "cramped"])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_some_steps_of_a_job_force_nothing(name, blocks, expected, monkeypatch):
    """More rows come and go: a step that was under way has sampled what would be forced now."""
    monkeypatch.setattr(small_models, "SLOTS", 160)
    engine, count = device_engine(name, blocks=blocks), 0
    engine.scheduler.planner.forces, step = VOCAB, engine.step

    def switching():
        nonlocal count
        count += 1
        engine.scheduler.planner.forces_up_to = 99 * (count % 5 < 2)
        return step()

    engine.step = switching
    assert run(engine) == expected[name]
    assert engine.stats.forced > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "e4m3"])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_rows_of_known_tokens_share_keys(name, monkeypatch):
    """Under one instruction, a step that reads it again for each row takes longer than the tokens that it saves."""
    monkeypatch.setattr(small_models, "SLOTS", 160)
    monkeypatch.setattr(prefix_groups, "MIN_ROWS", 2)
    monkeypatch.setattr(prefix_groups, "MIN_KEYS", 4)
    # As the kernel has it in these tests.
    monkeypatch.setattr(prefix_groups, "MEMBERS", 4)
    monkeypatch.setattr(prefix_groups, "max_items", lambda batch: 20)
    beginning = tuple(range(3, 16))
    expected = run(plain_engine(name), beginning)
    engine = device_engine(name, blocks=150)
    engine.scheduler.planner.forces = VOCAB
    kinds, run_kind = [], StepGraphs.run

    def noted(self, kind, steps=1):
        kinds.append((getattr(kind, "knows", None), kind.shares))
        return run_kind(self, kind, steps)

    monkeypatch.setattr(StepGraphs, "run", noted)
    assert run(engine, beginning) == expected
    assert (True, True) in kinds


@pytest.mark.usefixtures("few_programs")
def test_guided_rows_become_more(monkeypatch):
    """The logits of a step had room for as many rows as the first one had: a larger one ended the job."""
    monkeypatch.setattr(small_models, "SLOTS", 8)
    engine = device_engine("gpt2", blocks=80)
    for count in (1, 4):
        for number in range(count):
            sampling = SamplingParams(max_tokens=4)
            engine.add(Request(number, (3, 4), sampling), constraint=partial(EveryThird, VOCAB))
        while engine.has_unfinished:
            engine.step()
    assert engine.stats.output_tokens == 20
