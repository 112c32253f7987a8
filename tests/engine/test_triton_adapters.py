"""Rows with adapters in the Triton runner on its interpreter: the same tokens as the PyTorch runner's."""

from functools import partial

import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.triton_runner.steps import DeviceSteps
from tests.engine import small_models
from tests.engine import test_triton_drafts as drafts
from tests.engine.small_models import VOCAB, device_engine, plain_engine
from tests.engine.test_triton_forced import Fields
from tests.helpers import running
from tests.helpers.interpreter import add_up_exactly
from tests.helpers.marks import ON_TRITON_RUNNER

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER]
# A gate in q, states, biases and one fused product, an MLP of experts beside adapted attention.
MODELS = ["llama", "gpt2", "qwen3_next", "phi3"]
ADAPTERS = ("", "1", "2")


def requests(adapters=ADAPTERS):
    """Prompts that begin alike, some whole chunks long, each with every adapter in turn and without."""
    trunk = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(12)]
    prompts = [[*trunk[:10], 5, 9], trunk[:8], [2], [*trunk[:9], 17]]
    rows = [(prompt, adapter) for prompt in prompts for adapter in adapters]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    return [Request(i, tuple(prompt), sampling, adapter=adapter) for i, (prompt, adapter) in enumerate(rows)]


def tokens(engine, rows):
    return {i: done.token_ids for i, done in running.run(engine, rows).items()}


@pytest.fixture
def kinds(monkeypatch):
    """Whether each step was one with adapters."""
    found = []
    for name in ("decode", "packed"):
        launch = getattr(DeviceSteps, name)

        def noted(self, kind, launch=launch):
            found.append(kind.adapted)
            return launch(self, kind)

        monkeypatch.setattr(DeviceSteps, name, noted)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_tokens_equal_the_plain_runners(name, kinds):
    """Chunked, cached and mixed; rows move to other slots, and keys of one adapter are no other's."""
    rows = requests()
    expected = tokens(plain_engine(name, adapters=2), rows)
    groups = [[*expected.values()][place : place + 3] for place in range(0, len(rows), 3)]
    assert any(len({*group}) == 3 for group in groups)
    engine = device_engine(name, adapters=2)
    engine.runner.warm_up(max_num_tokens=16)
    assert tokens(engine, rows) == expected
    assert any(kinds)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_tokens_after_a_preemption(name):
    """A sequence comes back to another slot, where its adapter has to be set again."""
    rows = requests()
    engine = device_engine(name, blocks=5, adapters=2)
    assert tokens(engine, rows) == tokens(plain_engine(name, adapters=2), rows)
    assert engine.stats.preemptions > 0


FIVE = ("1", "2", "", "3", "4", "5")


@pytest.mark.thorough
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_adapters_that_do_not_fit(name, slots):
    """A row was computed with what another adapter had left in its slot, or before its own was there."""
    rows = requests(FIVE)[:12]
    expected = tokens(plain_engine(name, adapters=5), rows)
    engine = device_engine(name, adapters=5, adapter_slots=slots)
    engine.runner.warm_up(max_num_tokens=16)
    for _ in range(2):
        stats = engine.restart_stats()
        assert tokens(engine, rows) == expected
        assert stats.adapter_loads >= 5 - slots
    alone = tokens(engine, [row for row in rows if row.adapter == "5"])
    assert alone == {row.id: expected[row.id] for row in rows if row.adapter == "5"}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "slots", "saved"), [("llama", 1, 0), ("llama", 2, 0), ("gpt2", 1, 20)])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_adapters_that_do_not_fit_after_preemptions(name, slots, saved):
    """A row that lost its blocks came back while its adapter had lost its slot; forks wait behind their prompt."""
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, n=2)
    rows = [Request(each.id, each.prompt_token_ids, sampling, adapter=each.adapter) for each in requests(FIVE)[:12]]

    def outcome(engine):
        return {(each.request.id, each.sample): each.token_ids for each in engine.run(rows)}

    engine = device_engine(name, blocks=5, adapters=5, adapter_slots=slots, host_blocks=saved)
    assert outcome(engine) == outcome(plain_engine(name, adapters=5))
    assert engine.stats.preemptions > 0
    assert engine.stats.adapter_loads >= 5
    assert (engine.stats.restored_blocks > 0) == (saved > 0)


@pytest.mark.thorough
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_adapters_after_an_abort():
    """What an interrupted step was to load was taken for loaded."""
    rows = requests(FIVE)[:6]
    expected = tokens(plain_engine("llama", adapters=5), rows)
    engine = device_engine("llama", adapters=5, adapter_slots=1)
    load, adapters = engine.runner.adapters.load, engine.runner.adapters

    def fails(adapter, slot):
        raise MemoryError

    for row in rows[:2]:
        engine.add(row)
    adapters.load = fails
    with pytest.raises(MemoryError):
        engine.step()
    adapters.load = load
    engine.abort()
    assert tokens(engine, rows) == expected


@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_steps_without_such_rows_are_those_of_the_model_alone(kinds):
    """They went by slower kernels, or computed what nobody asked for."""
    rows = requests([""])
    assert tokens(device_engine("llama", adapters=2), rows) == tokens(device_engine("llama"), rows)
    assert kinds and not any(kinds)


@pytest.mark.parametrize("slots", [0, 1])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_drafts_have_the_adapter_of_their_row(monkeypatch, slots):
    """The right ones would be taken for wrong, and the other way round."""
    monkeypatch.setattr(small_models, "SLOTS", 64)
    expected = drafts.run(plain_engine("llama", adapters=2), requests())
    engine = device_engine("llama", blocks=150, adapters=2, adapter_slots=slots)
    engine.drafter = drafts.Varying(4, 2)
    drafts.draft_answers(engine, expected)
    assert drafts.run(engine, requests()) == expected
    assert engine.stats.accepted > 10


@pytest.mark.thorough
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_known_tokens_have_the_adapter_of_their_row(monkeypatch):
    """A step of known tokens has rows of its own."""
    monkeypatch.setattr(small_models, "SLOTS", 160)

    def run(engine):
        sampling = SamplingParams(max_tokens=19, ignore_eos=True)
        for each in requests():
            request = Request(each.id, each.prompt_token_ids, sampling, adapter=each.adapter)
            engine.add(request, constraint=partial(Fields, VOCAB))
        done = {}
        while engine.has_unfinished:
            done |= {each.request.id: each.token_ids for each in engine.step()}
        return done

    engine = device_engine("llama", blocks=150, adapters=2)
    engine.scheduler.planner.forces = VOCAB
    assert run(engine) == run(plain_engine("llama", adapters=2))
    assert engine.stats.forced > 80


@pytest.mark.thorough
@pytest.mark.parametrize("off", [("trim_last_layer",), ("fused_mlp",), ("fused_norm", "streamed_linear")], ids=str)
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_without_switches(off):
    """The last layer may have all rows; products are activated, or reach the norm, in other ways."""
    rows = requests()
    assert tokens(device_engine("llama", off, adapters=2), rows) == tokens(plain_engine("llama", adapters=2), rows)


@pytest.mark.thorough
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_the_same_bits_in_any_company(monkeypatch):
    """With ``--batch-invariant``."""
    monkeypatch.setattr("rosebatch_kernels.linear.invariant.ROWS", (1, 2, 7, 33, 64))
    monkeypatch.setattr("rosebatch.engine.sampling.features.MAX_LOGPROBS", 2)
    add_up_exactly(monkeypatch)

    def outcome(rows):
        engine = device_engine("llama", on=("batch_invariant",), adapters=2)
        done = running.run(engine, rows)
        return {i: (each.token_ids, [list(some) for some in each.logprobs]) for i, each in done.items()}

    sampling = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)
    rows = [Request(each.id, each.prompt_token_ids, sampling, adapter=each.adapter) for each in requests()[:6]]
    together = outcome(rows)
    for row in rows:
        assert outcome([row]) == {row.id: together[row.id]}
