"""Plans are plain data: counted, pickled, and carried out again elsewhere."""

import pickle
from array import array

import pytest

from rosebatch.core.request import Logprobs, Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.engine.plan import GONE, Chunk, DecodeRow, DecodeWindow, PackedStep, SequenceSpec, StepResult
from tests.engine.small_models import plain_engine

SPEC = SequenceSpec(
    3,
    (5, 6),
    SamplingParams(seed=2**64 - 1, logit_bias={5: 1.5}, grammar=GrammarSpec("regex", "a+"), stop=["x"]),
    max_len=9,
    stop_ids=frozenset({1, 2}),
    guided=True,
    has_features=True,
)
STEP = PackedStep(
    chunks=(
        Chunk(1, 7, array("I", [4]), 1, ((0, 1, (9,)), (1, 1, (GONE,))), (8, 4)),
        Chunk(3, 0, array("I", [5, 6]), 1, ((0, 0, (2,)), (1, 1, (3, 4)))),
        Chunk(4, 2, array("I", [7] * 5), 0),
    ),
    wipes=((1, 4),),
    copies=((0, 8, 9),),
    started=(SPEC,),
    released=(0, 2),
    num_preempted=1,
    reset=True,
)
WINDOW = DecodeWindow(rows=(DecodeRow(1, 8, 4, ((0, 2, (10,)),)), DecodeRow(3, 2, 2)), steps=4, released=(4,))


def test_what_a_step_counts():
    """The sampled sequences are those of the result, in its order: a chunk that does not sample has none."""
    assert (STEP.num_tokens, STEP.num_sequences, STEP.sampled_ids) == (8, 3, [1, 3])
    assert [chunk.end for chunk in STEP.chunks] == [8, 2, 7]


def test_what_a_window_counts():
    assert (WINDOW.num_tokens, WINDOW.num_sequences, WINDOW.sampled_ids) == (6, 2, [1, 3])


@pytest.mark.parametrize(
    "value", [SPEC, STEP, WINDOW, StepResult([[4], [5]], [[Logprobs(4, -0.5, ((4, -0.5),))], []], {1: []}, seconds=0.5)]
)
def test_plans_and_results_can_be_sent(value):
    """A field that holds more than plain data is lost in another process, or shared with this one by accident."""
    again = pickle.loads(pickle.dumps(value))
    assert (again, repr(again)) == (value, repr(value))


class Recorder:
    """Carries out plans as they arrive in another process, and keeps what was sent and what came back."""

    def __init__(self, runner):
        self.runner, self.sent, self.results = runner, [], []

    def launch(self, plan, masks):
        self.sent.append(pickle.dumps(plan))
        wait = self.runner.launch(pickle.loads(self.sent[-1]), masks)

        def received():
            self.results.append(wait())
            return self.results[-1]

        return received


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_replayed_plans_bring_the_same_tokens(name):
    """By a runner that has never met the scheduler: chunks, shared prefixes, forks, penalties and reports."""
    engine = plain_engine(name)
    engine.runner = recorder = Recorder(engine.runner)
    trunk = tuple((7 * i * i + 3 * i + 1) % 50 for i in range(12))
    rows = [
        (trunk, {"max_tokens": 4}),
        (trunk[:8], {"max_tokens": 5, "temperature": 0.9, "seed": 5, "n": 3}),
        (trunk[:8], {"max_tokens": 5, "repetition_penalty": 1.6, "ignore_eos": True}),
        ((2,), {"max_tokens": 9, "logprobs": 2, "prompt_logprobs": 1}),
        (trunk[:9], {"max_tokens": 3, "prompt_logprobs": 2}),
    ]
    done = list(engine.run(Request(i, prompt, SamplingParams(**sampling)) for i, (prompt, sampling) in enumerate(rows)))
    assert len(done) == 7
    plans = [pickle.loads(sent) for sent in recorder.sent]
    assert sum(len(plan.copies) for plan in plans) > 0
    assert any(len(chunk.token_ids) > 1 and not chunk.sampled for plan in plans for chunk in plan.chunks)
    runner, names = plain_engine(name).runner, ("token_ids", "logprobs", "prompt_logprobs")
    for plan, result in zip(plans, recorder.results, strict=True):
        again = runner.launch(plan, None)()
        assert [getattr(again, name) for name in names] == [getattr(result, name) for name in names]
