"""On a GPU, greedy tokens in fp32 equal transformers' own for any batch, chunk size and cache size."""

import random
from dataclasses import fields

import pytest
import torch

from rosebatch.config.switches import Switches, hidden_by, is_on
from rosebatch.engine.triton_runner import prefix_groups, prefix_tiles
from tests.helpers.running import greedy

pytestmark = pytest.mark.gpu

NEW_TOKENS = 16
DEFAULTS = {f.name: is_on(f, "cuda") for f in fields(Switches) if "cuda" in f.metadata["devices"]}


# The reference of HP1 takes minutes: one process computes it for all tests.
_SLOW = (pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("HP1", "HP1 options"))


@pytest.fixture(scope="module", params=["GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", *_SLOW])
def golden(request, model_config, reference):
    """A family, prompts, and transformers' tokens for each of them."""
    vocab, numbers = model_config(request.param).vocab_size, random.Random(0)
    shared = [numbers.randrange(vocab) for _ in range(40)]
    prompts = [
        shared[: numbers.randrange(1, 40)] + [numbers.randrange(vocab) for _ in range(numbers.randrange(1, 60))]
        for _ in range(256)
    ]
    tokens, _ = reference(request.param, torch.float32, prompts, NEW_TOKENS)
    return request.param, prompts, tokens


@pytest.mark.parametrize("batch", [1, 7, 64, 256])
@pytest.mark.parametrize(("chunk", "blocks"), [(8192, 0), (50, 0), (50, 14)])
def test_greedy_equals_transformers(golden, batch, chunk, blocks, make_engine):
    """The CPU's tests cannot see errors of device placement, dtypes and kernel indexing."""
    family, prompts, expected = golden
    limits = {"max_num_batched_tokens": chunk, "blocks": blocks}
    engine = make_engine(family, torch.float32, seqs=batch, **limits)
    count = min(2 * batch, len(prompts))
    assert greedy(engine, prompts[:count], NEW_TOKENS) == expected[:count]
    # A window of 7 tokens takes two blocks of a sequence at most: who was admitted is never short.
    assert (engine.stats.preemptions > 0) == (family != "Mistral") or not (blocks and batch >= 64)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_switch_on_equals_off(golden, name, make_engine):
    """A switch may change only the speed. Switches that would hide it are off as well."""
    family, prompts, expected = golden
    off = dict.fromkeys(hidden_by(name, "cuda"), False)
    engine = make_engine(family, torch.float32, off | {name: not DEFAULTS[name]}, seqs=64)
    assert greedy(engine, prompts[:100], NEW_TOKENS) == expected[:100]
    assert (engine.stats.graph_replays > 0) == (name not in ("cuda_graph", "paged_attention"))


@pytest.fixture(scope="module")
def sharing(golden, model_config, reference):
    """Prompts of three beginnings, one of them inside of another, and transformers' tokens for each of them."""
    family, *_ = golden
    vocab, numbers = model_config(family).vocab_size, random.Random(1)
    system, examples, other = ([numbers.randrange(vocab) for _ in range(length)] for length in (48, 40, 70))
    beginnings = [system, system + examples, other, []]
    prompts = [
        numbers.choice(beginnings) + [numbers.randrange(vocab) for _ in range(numbers.randrange(1, 30))]
        for _ in range(256)
    ]
    tokens, _ = reference(family, torch.float32, prompts, NEW_TOKENS)
    return family, prompts, tokens


@pytest.mark.parametrize("batch", [7, 64, 256])
@pytest.mark.parametrize(("chunk", "blocks"), [(8192, 0), (50, 0), (50, 40)])
def test_rows_that_share_keys(sharing, batch, chunk, blocks, make_engine, monkeypatch):
    """By graphs, in groups inside of groups that change while rows come and go; chunks that share tiles."""
    monkeypatch.setattr(prefix_groups, "MIN_ROWS", 2)
    monkeypatch.setattr(prefix_groups, "MIN_KEYS", 16)
    monkeypatch.setattr(prefix_tiles, "MIN_KEYS", 16)
    family, prompts, expected = sharing
    limits = {"max_num_batched_tokens": chunk, "blocks": blocks}
    engine = make_engine(family, torch.float32, {"shared_prefix_attention": True}, seqs=batch, **limits)
    found: list[int] = []
    if engine.runner.prefix_groups:
        send = engine.runner.prefix_groups._send
        engine.runner.prefix_groups._send = lambda items, staging: (
            found.append(len(items.items)),
            send(items, staging),
        )
    count = min(2 * batch, len(prompts))
    assert greedy(engine, prompts[:count], NEW_TOKENS) == expected[:count]
    # All of Mistral's layers have a window here.
    assert (max(found, default=0) > 0) == (family != "Mistral")
