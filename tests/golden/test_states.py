"""Layers that keep a state beside the KV cache: a slot for each seat, through preemptions, aborts and completions."""

import torch

from rosebatch.config.run import RunConfig
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.cache.state_pool import StatePool, state_bytes
from rosebatch.launch.plan import plan_launch
from tests.golden.conftest import NEW_TOKENS
from tests.helpers.running import run_choices


def requests_of(prompts, **sampling):
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **sampling)
    return [Request(i, tuple(prompt), params) for i, prompt in enumerate(prompts)]


def test_a_preempted_sequence_starts_over(goldens, make_engine, greedy_tokens):
    """Its slot holds the state of tokens that are computed again: going on from it would count them twice."""
    golden = goldens("qwen3_5")
    engine = make_engine(golden.folder, seqs=5, chunk=50, block_size=4, blocks=40)
    assert greedy_tokens(engine, golden.prompts[:32]) == golden.expected[:32]
    assert engine.stats.preemptions > 0


def test_completions_of_a_request_compute_its_prompt_each(goldens, make_engine):
    """They cannot share blocks: the state at the prompt's end would be missing."""
    golden = goldens("qwen3_5")
    engine = make_engine(golden.folder, seqs=4, block_size=4)
    done = run_choices(engine, requests_of(golden.prompts[:6], n=3))
    assert len(done) == 18
    for (request, _), completion in done.items():
        assert list(completion.token_ids) == golden.expected[request]
    assert engine.stats.computed_tokens == 3 * sum(len(p) + NEW_TOKENS - 1 for p in golden.prompts[:6])


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


def test_no_prefix_is_found(goldens, make_engine, greedy_tokens):
    """Blocks of a prefix hold no state; the switch is on in this engine."""
    golden = goldens("qwen3_5")
    engine = make_engine(golden.folder, block_size=4, prefix_cache=True)
    for _ in range(2):
        assert greedy_tokens(engine, golden.prompts[:8]) == golden.expected[:8]
    assert not engine.prefix_cache
    assert engine.stats.computed_tokens == 2 * sum(len(p) + NEW_TOKENS - 1 for p in golden.prompts[:8])


def test_the_run_says_why_the_prefix_cache_is_off(goldens, capsys):
    plan = plan_launch(RunConfig.of(str(goldens("qwen3_5").folder), device="cpu", prefix_cache=True))
    assert not plan.switches.prefix_cache
    assert "--prefix-cache has no effect: a prefix of this model is a state" in capsys.readouterr().err


def test_layers_with_a_state_take_no_blocks(goldens, make_engine):
    """A quarter of the layers has K and V: counting all would leave most of the KV cache's memory unused."""
    engine = make_engine(goldens("qwen3_next").folder)
    cache, states = engine.runner.cache, engine.runner.states
    specs = engine.runner.model.mixers
    layers = [spec.planes for spec in specs if spec.planes]
    assert len(layers) == 1
    assert cache.nbytes == sum(cache.num_blocks) * bytes_per_block(layers, cache.block_size, torch.float32)
    kept = [spec.states for spec in specs if spec.states]
    assert states.nbytes == engine.max_num_seqs * state_bytes(kept, torch.float32)
    assert isinstance(states, StatePool)
