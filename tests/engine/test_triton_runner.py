"""The whole Triton runner on its interpreter, but for CUDA graphs: the same tokens as the PyTorch runner's.

Each run mixes what the path treats differently: prompts in chunks with a prefix in common, one of them cached to its
very end, greedy and sampled rows, rows that end at an end token, a stop token or their limit, more sequences than
slots. Memory that was never written is NaN, in the KV cache too: a token that depends on any of it would change.
"""

import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.triton_runner import prefix_groups, prefix_tiles, runner
from rosebatch.engine.triton_runner.graphs import StepGraphs
from rosebatch.engine.triton_runner.prefix_groups import PrefixGroupState
from rosebatch_kernels.paged_attention import sizes
from tests.engine.small_models import MODELS, SLOTS, VOCAB, device_engine, plain_engine
from tests.helpers import running
from tests.helpers.marks import ON_TRITON_RUNNER
from tests.helpers.sizes import change_table

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER]

# Tokens that the models do generate.
STOP_TOKENS = {"llama": 7, "gpt2": 15, "hp1": 10, "uneven": 40, "softmaxes": 24, "e4m3": 27}


def requests(name):
    trunk = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(12)]
    rows = [
        ([*trunk[:10], 5, 9], {"max_tokens": 4, "ignore_eos": True}),
        (trunk[:8], {"max_tokens": 5, "temperature": 0.9, "top_k": 6, "top_p": 0.9, "seed": 2**63 + 5}),
        ([2], {"max_tokens": 9}),
        ([*trunk[:5], 44, 3], {"max_tokens": 9, "stop_token_ids": (STOP_TOKENS[name],), "ignore_eos": True}),
        (trunk[:8], {"max_tokens": 5, "ignore_eos": True}),
        ([*trunk[:9], 17], {"max_tokens": 1}),
        ([4, 8], {"max_tokens": 6, "temperature": 0.8, "seed": 2**40 + 3}),
    ]
    return [Request(i, tuple(prompt), SamplingParams(**sampling)) for i, (prompt, sampling) in enumerate(rows)]


def run(name, engine):
    """Request id -> tokens and finish reason."""
    return {i: (done.token_ids, done.finish_reason) for i, done in running.run(engine, requests(name)).items()}


@pytest.fixture(scope="module")
def expected():
    """What the PyTorch runner generates, by model."""
    return {name: run(name, plain_engine(name)) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_the_requests_end_in_every_way(name, expected):
    """Or the runs below would compare little: by an end token, by a stop token, and past ends that are ignored."""
    (end,), done = MODELS[name].eos_token_ids, expected[name]
    assert {reason for _, reason in done.values()} == {"stop", "length"}
    assert done[2][0][-1] == end and done[2][1] == "stop"
    assert done[3][0][-1] == STOP_TOKENS[name] and done[3][1] == "stop"
    assert name != "gpt2" or end in done[4][0][:-1]
    assert len({tokens for tokens, _ in done.values()}) == len(done)


@pytest.mark.parametrize("name", ["gpt2", "llama", "hp1", "softmaxes", "uneven", "e4m3"])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_tokens_equal_the_plain_runners_after_a_warm_up(name, expected):
    """Kernels that another engine has loaded do run then: a step counted or a key written would change tokens.

    Without a warm-up, all switches are on where rows share keys, below.
    """
    engine = device_engine(name)
    engine.runner.warm_up(max_num_tokens=16)
    assert run(name, engine) == expected[name]
    assert engine.stats.copied_blocks > 0
    assert engine.stats.max_running == SLOTS


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("llama", ("fused_kv_append", "late_results")),
        ("llama", ("fused_rotary", "fused_kv_append", "prefix_cache", "batched_rollover")),
        ("gpt2", ("fused_kv_append", "batched_kv_append", "fused_norm")),
        ("gpt2", ("fused_sampler", "fused_mlp")),
        ("llama", ("fused_sampler", "late_results", "batched_sampling")),
        ("llama", ("fused_qk_norm", "split_keys")),
        ("uneven", ("fused_qk_norm", "fused_kv_append")),
        ("hp1", ("fused_qk_norm",)),
        ("hp1", ("fused_rotary", "fused_kv_append", "fused_norm", "fused_mlp", "sparse_values")),
        ("uneven", ("fused_rotary", "fused_kv_append", "batched_kv_append", "late_results")),
        ("softmaxes", ("fused_qk_norm", "split_keys")),
        ("softmaxes", ("fused_kv_append",)),
        ("e4m3", ("fused_kv_append",)),
        ("e4m3", ("fused_rotary", "fused_kv_append", "batched_kv_append")),
        ("softmaxes", ("fused_rotary",)),
        ("softmaxes", ("fused_rotary", "fused_kv_append")),
    ],
    ids=lambda value: value if isinstance(value, str) else "no " + ", ".join(value) if value else "all on",
)
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_tokens_equal_the_plain_runners(name, off, expected):
    """Switches that lie apart are off together: each pair of paths is taken once."""
    engine = device_engine(name, off)
    assert run(name, engine) == expected[name]
    assert (engine.stats.copied_blocks > 0) == ("prefix_cache" not in off)
    assert engine.stats.max_running == SLOTS


@pytest.mark.parametrize("name", ["llama", "softmaxes", "gpt2", "e4m3"])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_tokens_after_a_preemption(name, expected):
    """A sequence comes back to another slot and other blocks, between windows that are under way."""
    engine = device_engine(name, blocks=5)
    assert run(name, engine) == expected[name]
    assert engine.stats.preemptions > 0


@pytest.fixture
def pairs_share(monkeypatch):
    """Two rows and one block are worth a group or a tile; returns the numbers of rows of each that were found."""
    monkeypatch.setattr(prefix_groups, "MIN_ROWS", 2)
    monkeypatch.setattr(prefix_groups, "MIN_KEYS", 4)
    sent, tiled = [], []
    send, group_tiles = PrefixGroupState._send, prefix_tiles.group_tiles

    def noted(self, found, staging):
        sent.extend(found.items[:, 1].tolist())
        send(self, found, staging)

    def noted_tiles(*args):
        tiles = group_tiles(*args)
        tiled.extend([] if tiles is None else tiles.counts.tolist())
        return tiles

    monkeypatch.setattr(PrefixGroupState, "_send", noted)
    monkeypatch.setattr(prefix_tiles, "MIN_KEYS", 4)
    monkeypatch.setattr(runner, "group_tiles", noted_tiles)
    return sent, tiled


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("llama", ()),
        ("gpt2", ()),
        ("uneven", ()),
        ("softmaxes", ()),
        ("llama", ("fused_kv_append", "prefix_cache")),
        ("uneven", ("fused_rotary", "fused_kv_append")),
        ("softmaxes", ("fused_rotary", "late_results")),
        ("e4m3", ()),
        ("e4m3", ("fused_rotary", "fused_kv_append")),
        ("hp1", ()),
        ("hp1", ("fused_rotary", "fused_kv_append")),
    ],
)
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_tokens_of_rows_that_share_keys(name, off, expected, pairs_share):
    """By a prefix in common, or as forks of one prompt; layers with windows read their own keys beside."""
    assert run(name, device_engine(name, off)) == expected[name]
    shared, tiled = pairs_share
    assert ("prefix_cache" in off) == (not shared)
    # A layer with a window or a gate keeps the model's tiles apart: all models here but two have such a layer.
    assert (max(tiled, default=1) > 1) == (name in ("gpt2", "e4m3"))
    shared.clear()
    forks = Request(0, tuple(range(3, 14)), SamplingParams(max_tokens=6, n=3, temperature=0.7, seed=5, ignore_eos=True))
    plain, found = (
        {completion.sample: completion.token_ids for completion in engine.run([forks])}
        for engine in (plain_engine(name), device_engine(name, off))
    )
    assert plain == found and len(set(plain.values())) == 3
    assert 3 in shared


@pytest.fixture
def noted_kinds(monkeypatch):
    """Two splits from 16 keys each on; notes what decode steps share and divide, in turn."""
    change_table(monkeypatch, sizes, "decode", splits=((0, 2),), min_keys=((0, 16),))
    kinds, run = [], StepGraphs.run

    def noted(self, kind, steps=1):
        kinds.extend([(kind.shares, kind.divided)] * steps if hasattr(kind, "divided") else [])
        return run(self, kind, steps)

    monkeypatch.setattr(StepGraphs, "run", noted)
    return kinds


def assert_plain_tokens(prompts, **sampling):
    rows = [Request(i, tuple(p), SamplingParams(ignore_eos=True, **sampling)) for i, p in enumerate(prompts)]
    found, expected = (running.run(make("llama"), rows) for make in (device_engine, plain_engine))
    assert {i: each.token_ids for i, each in found.items()} == {i: each.token_ids for i, each in expected.items()}


@pytest.mark.thorough
@pytest.mark.usefixtures("unwritten_is_nan")
def test_graphs_have_splits_once_a_row_is_long_enough(noted_kinds):
    """128 short rows spent 3 % of a step on programs without work. The first row to be divided ends that."""
    prompts = [(3 + i, 5, 7) for i in range(2)]
    assert_plain_tokens(prompts, max_tokens=18)
    # Windows of four steps from position 3 on; a program attends to 16 keys.
    assert noted_kinds == [(False, False)] * 12 + [(False, True)] * 5


@pytest.mark.thorough
@pytest.mark.usefixtures("unwritten_is_nan", "pairs_share")
def test_keys_that_rows_share_are_not_divided_for_any(noted_kinds):
    """256 rows with 1,024 keys in common and few of their own had three idle programs for each that worked."""
    prompts = [(*range(3, 15), 20 + i) for i in range(3)]
    assert_plain_tokens(prompts, max_tokens=8)
    assert noted_kinds == [(True, False)] * 7
