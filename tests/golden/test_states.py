"""Layers that keep a state beside the KV cache: a slot for each seat, through preemptions, aborts and completions."""

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.scoring import Scoring
from rosebatch.engine.cache import memory
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.cache.state_pool import StatePool, state_bytes
from rosebatch.launch.plan import plan_launch
from rosebatch.model.source import find_model
from tests.golden.conftest import NEW_TOKENS
from tests.helpers.running import run_choices
from tests.helpers.threads_group import make_tensor_parallel_engine

# In place of K and V; in Falcon-H1 beside them.
WITH_STATES = ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h", "falcon_h1"]


def requests_of(prompts, **sampling):
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **sampling)
    return [Request(i, tuple(prompt), params) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("name", WITH_STATES)
def test_a_preempted_sequence_starts_over(name, goldens, make_engine, greedy_tokens):
    """Its slot holds the state of tokens that are computed again: going on from it would count them twice."""
    golden = goldens(name)
    engine = make_engine(golden.folder, seqs=5, chunk=50, block_size=4, blocks=40)
    assert greedy_tokens(engine, golden.prompts[:32]) == golden.expected[:32]
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize("limits", [{}, {"seqs": 2}, {"chunk": 7}, {"blocks": 90, "seqs": 6}], ids=str)
def test_completions_of_a_request_copy_its_states(name, limits, goldens, make_engine):
    """The prompt is computed once. Each further completion begins behind its last token but one, in a slot of its own.

    One that went on in another's slot, or from a snapshot that was overwritten, would have other tokens.
    """
    golden = goldens(name)
    engine = make_engine(golden.folder, **{"seqs": 5, "block_size": 4, "prefix_cache": False, **limits})
    prompts = golden.prompts[:10]
    done = run_choices(engine, requests_of(prompts, n=3))
    assert len(done) == 30
    for (request, _), completion in done.items():
        assert list(completion.token_ids) == golden.expected[request]
    if "blocks" not in limits:
        own = 2 + 3 * (NEW_TOKENS - 1)
        assert engine.stats.computed_tokens == sum(len(prompt) + own for prompt in prompts)


@pytest.mark.parametrize("name", WITH_STATES)
def test_a_beginning_is_computed_once(name, goldens, make_engine, greedy_tokens):
    """Rows part in the middle of a block: the whole blocks in front of that are shared.

    All begin with 41 common tokens, those of a group with five more.
    """
    golden = goldens(name)
    common = max(golden.prompts, key=len)[:41]
    prompts = [[*common, *[group] * 5, *[7] * (row % 3), row] for group in range(3) for row in range(4)]
    alone = make_engine(golden.folder, block_size=4, prefix_cache=False)
    wanted = greedy_tokens(alone, prompts)
    assert alone.stats.computed_tokens == sum(map(len, prompts)) + len(prompts) * (NEW_TOKENS - 1)
    for limits in ({}, {"chunk": 9}, {"seqs": 1}):
        engine = make_engine(golden.folder, block_size=4, **limits)
        assert greedy_tokens(engine, prompts) == wanted
        # 40 of the 41 tokens once, and 4 of each group's; what is behind 44 by each row.
        own = sum(len(prompt) - 44 for prompt in prompts) + len(prompts) * (NEW_TOKENS - 1)
        assert engine.stats.computed_tokens == 40 + 3 * 4 + own
        # Now all is there.
        assert greedy_tokens(engine, prompts[::-1]) == wanted[::-1]


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize("limits", [{}, {"chunk": 50, "seqs": 5, "blocks": 40}, {"chunk": 16, "seqs": 2}], ids=str)
def test_rows_with_a_common_beginning(name, limits, goldens, make_engine, greedy_tokens):
    """Beginnings of all lengths, in no order, chunked and preempted: others' states would give other tokens."""
    golden = goldens(name)
    engine = make_engine(golden.folder, block_size=4, **limits)
    for _ in range(2):
        assert greedy_tokens(engine, golden.prompts) == golden.expected
    if "blocks" not in limits:
        assert engine.stats.computed_tokens < 2 * sum(len(p) + NEW_TOKENS - 1 for p in golden.prompts)
    assert engine.stats.preemptions > 0 or "blocks" not in limits


def test_few_snapshots(goldens, make_engine, greedy_tokens, monkeypatch):
    """One that is overwritten is found no more, and its rows begin with the next shorter one, or with zeros."""
    monkeypatch.setattr(memory, "_FEWEST_SNAPSHOTS", 1)
    golden = goldens("qwen3_5")
    prompts = [[*[5] * 20, *[k // 4] * 20, k] for k in range(24)]
    wanted = greedy_tokens(make_engine(golden.folder, prefix_cache=False), prompts)
    engine = make_engine(golden.folder, block_size=4, seqs=3)
    assert engine.runner.states.num_snapshots == 1
    assert greedy_tokens(engine, prompts) == wanted
    own = len(prompts) * NEW_TOKENS
    assert engine.stats.computed_tokens <= 7 * 40 + own


@pytest.mark.parametrize("name", WITH_STATES)
def test_ranks_copy_their_own_part(name, goldens):
    """Plans say which slots: a rank that copied nothing, or with other numbers of slots, would have other tokens."""
    golden = goldens(name)
    source = find_model(RunConfig(model=str(golden.folder), dtype="float32"), torch.device("cpu"))
    limits = RunConfig(max_num_seqs=5, kv_cache_memory=1 << 24, block_size=4, tensor_parallel_size=2)
    engine = make_tensor_parallel_engine(source, limits, Switches.resolve({}, "cpu"), 2)
    prompts = golden.prompts[:10]
    done = run_choices(engine, requests_of(prompts, n=2))
    assert {key: list(each.token_ids) for key, each in done.items()} == {
        (number, sample): golden.expected[number] for number in range(10) for sample in (0, 1)
    }
    assert engine.stats.computed_tokens < sum(len(prompt) + 1 + 2 * (NEW_TOKENS - 1) for prompt in prompts)


def test_continuations_and_vectors_share_their_beginning(goldens, make_engine):
    """Log-probabilities of a continuation are of the states behind its prompt; a mean is of all hidden states."""
    golden = goldens("qwen3_5")
    prompt = max(golden.prompts, key=len)[:42]
    scored = [Request(k, (*prompt, k, k + 1), scoring=Scoring(42, (k + 2,))) for k in range(4)]
    last, mean = (
        [Request(k, (*prompt, k, k + 1), pooling=PoolingParams(pooling=kind)) for k in range(4)]
        for kind in ("last", "mean")
    )
    for requests, computed in ((scored, 40 + 4 * 4), (last, 40 + 4 * 4), (mean, 4 * 44)):
        found = []
        for switches in ({}, {"prefix_cache": False}):
            engine = make_engine(golden.folder, block_size=4, **switches)
            done = run_choices(engine, requests)
            found.append({key: (each.pooled, [*each.prompt_logprobs]) for key, each in done.items()})
            assert engine.stats.computed_tokens == (4 * 44 if switches else computed)
        assert found[0] == found[1]


def test_an_abort_frees_all_slots(goldens, make_engine, greedy_tokens):
    """A slot that is lost leaves a later sequence without a seat."""
    golden = goldens("qwen3_5")
    engine = make_engine(golden.folder, seqs=3, chunk=20)
    for request in requests_of(golden.prompts[:9]):
        engine.add(request)
    for _ in range(4):
        engine.step()
    engine.abort()
    assert greedy_tokens(engine, golden.prompts[:9]) == golden.expected[:9]


def test_nothing_is_shared_without_chunks(goldens, make_engine):
    """A chunk ends where a snapshot is. The switches are on in this engine."""
    golden = goldens("qwen3_5")
    engine = make_engine(golden.folder, block_size=4, prefix_cache=True, chunked_prefill=False)
    for _ in range(2):
        done = run_choices(engine, requests_of(golden.prompts[:8], n=2))
        assert all(list(each.token_ids) == golden.expected[request] for (request, _), each in done.items())
    assert not engine.prefix_cache
    assert engine.stats.computed_tokens == 4 * sum(len(p) + NEW_TOKENS - 1 for p in golden.prompts[:8])


def test_the_run_says_why_the_prefix_cache_is_off(goldens, capsys):
    """Without a word, a shared beginning would cost as much as many."""
    folder = str(goldens("qwen3_5").folder)
    assert plan_launch(RunConfig.of(folder, device="cpu", prefix_cache=True)).switches.prefix_cache
    assert not capsys.readouterr().err
    plan = plan_launch(RunConfig.of(folder, device="cpu", prefix_cache=True, chunked_prefill=False))
    assert not plan.switches.prefix_cache
    assert "--prefix-cache has no effect: layers of this model keep states" in capsys.readouterr().err


ATTENDING = [("qwen3_next", 1), ("kimi_linear", 2), ("nemotron_h", 1), ("falcon_h1", 2)]


@pytest.mark.parametrize(("name", "attending"), ATTENDING)
def test_layers_with_a_state_take_no_blocks(name, attending, goldens, make_engine):
    """A quarter of the layers has K and V: counting all would leave most of the KV cache's memory unused."""
    engine = make_engine(goldens(name).folder)
    cache, states = engine.runner.cache, engine.runner.states
    specs = engine.runner.model.mixers
    layers = [spec.planes for spec in specs if spec.planes]
    assert len(layers) == attending
    assert cache.nbytes == sum(cache.num_blocks) * bytes_per_block(layers, cache.block_size, torch.float32)
    kept = [spec.states for spec in specs if spec.states]
    assert states.nbytes == (engine.max_num_seqs + states.num_snapshots) * state_bytes(kept, torch.float32)
    assert isinstance(states, StatePool)
