"""A/B runs: both sides take turns, differ in one switch and do the same work."""

from dataclasses import fields, replace

import pytest

from rosebatch.bench.case import needed_kv_memory
from rosebatch.bench.compare import Turns, chosen_switches, compare_switch, take_turns
from rosebatch.bench.throughput import Run
from rosebatch.config.switches import SWITCH_NAMES, Switches, without_effect
from rosebatch.core.errors import FlagError
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.job.report.tally import Tally

ON_CPU, ON_CUDA = (Switches.resolve({}, device) for device in ("cpu", "cuda"))


def side(name, seconds, calls, tokens=12):
    def run(number):
        calls.append((name, number))
        return Run(seconds[number], Tally(output_tokens=tokens), EngineStats())

    return run


def test_turns():
    """Warm-ups do not count; a machine that slows down half-way slows both sides."""
    calls = []
    turns = take_turns(side("a", [99, 2, 4, 8], calls), side("b", [99, 3, 8, 8], calls), 3)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)]
    assert isinstance(turns, Turns)
    assert [[run.seconds for run in runs] for runs in (turns.on, turns.off)] == [[2, 4, 8], [3, 8, 8]]
    assert turns.ratios == [1.5, 2.0, 1.0]


def test_sides_that_do_not_do_the_same():
    """A switch that loses tokens must not look fast."""
    with pytest.raises(AssertionError, match="same work"):
        take_turns(side("a", [1, 1], []), side("b", [1, 1], [], tokens=11), 1)


def test_two_engines_one_switch_apart(make_case, monkeypatch, fake_launch):
    """Both engines get the same prompts in the same turn, and only as much KV cache as the workload needs."""
    monkeypatch.setattr("rosebatch.bench.case.launch", fake_launch.launch)
    case = make_case()
    case = replace(case, config=replace(case.config, kv_cache_memory=None))
    result = compare_switch(case, "chunked_prefill", 2)
    assert [engine for engine, _ in fake_launch.ran] == [0, 1, 0, 1, 0, 1]
    prompts = [prompts for _, prompts in fake_launch.ran]
    assert prompts[0::2] == prompts[1::2]
    assert prompts[0] != prompts[2] != prompts[4]
    on, off = fake_launch.configs
    assert on.switches == {"prefix_cache": False, "chunked_prefill": True}
    assert off.switches == {"prefix_cache": False, "chunked_prefill": False}
    assert replace(on, switches={}) == replace(off, switches={})
    assert on.kv_cache_memory == needed_kv_memory(case)
    assert result["switched_off"] == {}
    assert (result["kind"], result["scenario"], result["switch"]) == ("comparison", "small", "chunked_prefill")
    assert result["model"] == "tiny-llama"
    assert result["output_tokens"] == 12
    pairs = zip(result["on"]["seconds"], result["off"]["seconds"], strict=True)
    assert result["ratios"] == [off / on for on, off in pairs]
    assert result["ratio"]["min"] == min(result["ratios"])
    assert result["on"]["output_tokens_per_s"]["max"] == 12 / min(result["on"]["seconds"])


def test_a_switch_that_another_one_hides(make_case, monkeypatch, fake_launch):
    """With the other one on, both sides would run the same code, and every ratio would be noise about 1."""
    monkeypatch.setattr("rosebatch.bench.case.launch", fake_launch.launch)
    result = compare_switch(replace(make_case(), device="cuda"), "batched_sampling", 1)
    on, off = fake_launch.configs
    assert on.switches == {"prefix_cache": False, "fused_sampler": False, "batched_sampling": True}
    assert off.switches == {"prefix_cache": False, "fused_sampler": False, "batched_sampling": False}
    assert result["switched_off"] == {"fused_sampler": "--batched-sampling has no effect while it is on"}


def test_every_switch_is_compared_by_itself(make_case, monkeypatch, fake_launch):
    """Of ``batched-sampling`` and ``batched-kv-append``, figures were published of code that did not run."""
    monkeypatch.setattr("rosebatch.bench.case.launch", fake_launch.launch)
    case = replace(make_case(), device="cuda")
    usual = Switches.resolve(case.config.switches, "cuda")
    results = {}
    for switch in chosen_switches(["all"], "cuda", ON_CUDA, {}):
        result = results[switch] = compare_switch(case, switch, 1)
        for config, value in zip(fake_launch.configs[-2:], (True, False), strict=True):
            resolved = Switches.resolve(config.switches, "cuda")
            assert without_effect({switch: value}, resolved, "cuda") == []
            assert getattr(resolved, switch) is value
        off = {name for name in SWITCH_NAMES if getattr(usual, name) and not getattr(resolved, name)}
        assert set(result["switched_off"]) == off - {switch}
    assert set(results["batched_kv_append"]["switched_off"]) == {"fused_rotary", "fused_kv_append"}


def test_what_was_off_anyway_is_not_switched_off(make_case, monkeypatch, fake_launch):
    """The PyTorch runner samples by itself, whatever the fused sampler's switch says."""
    monkeypatch.setattr("rosebatch.bench.case.launch", fake_launch.launch)
    case = replace(make_case(), device="cuda")
    for name in ("fused_sampler", "paged_attention"):
        config = replace(case.config, switches={**case.config.switches, name: False})
        assert compare_switch(replace(case, config=config), "batched_sampling", 1)["switched_off"] == {}


def test_on_real_engines(make_case):
    """A given --kv-cache-memory is kept."""
    result = compare_switch(make_case(), "batched_sampling", 1)
    # 3 rows of 4 tokens in 4 steps: one read a step, or each row's as well.
    assert (result["on"]["syncs"], result["off"]["syncs"]) == (4, 4 + 3 * 4)
    result = compare_switch(make_case(), "prefix_cache", 1)
    assert result["engine"]["toggles"]["prefix_cache"] is True
    assert result["engine"]["kv_cache_bytes"] == 2**20
    assert len(result["ratios"]) == 1


def test_chosen_switches():
    """Names are those of the command line; 'all' leaves out switches that the device does not support."""
    served = [f.name for f in fields(Switches) if "cpu" in f.metadata["devices"]]
    assert chosen_switches([], "cpu", ON_CPU, {}) == []
    chosen = chosen_switches(["chunked-prefill", "prefix-cache", "chunked-prefill"], "cpu", ON_CPU, {})
    assert chosen == ["chunked_prefill", "prefix_cache"]
    assert chosen_switches(["all"], "cpu", ON_CPU, {}) == served
    assert "batch_invariant" not in chosen_switches(["all"], "cuda", ON_CUDA, {})
    with pytest.raises(FlagError, match=r"^--compare warp-drive: no such switch; choose from prefix-cache, .*, all$"):
        chosen_switches(["all", "warp-drive"], "cpu", ON_CPU, {})


def test_a_switch_without_effect_is_refused_before_anything_runs():
    """It was found only when its turn came, after the minutes of the comparisons before it."""
    with pytest.raises(FlagError, match=r"^--compare cuda-graph: this switch does nothing on cpu; leave it out"):
        chosen_switches(["prefix-cache", "cuda-graph"], "cpu", ON_CPU, {})


def test_a_switch_that_changes_nothing_for_the_models_is_refused():
    """A ratio of 1.00 was noise, and read as a result."""
    idle = {"prefix_cache": "a prefix is a state", "quantized_linear": "the model's weights are not quantized"}
    with pytest.raises(FlagError, match=r"^--compare quantized-linear: this .* effect: .* weights are not quantized$"):
        chosen_switches(["quantized-linear"], "cuda", ON_CUDA, idle)
    assert not idle.keys() & set(chosen_switches(["all"], "cuda", ON_CUDA, idle))


def test_a_switch_that_misses_another_one_is_refused():
    """Both sides would run the PyTorch runner, and the ratio would be noise."""
    gathered = Switches.resolve({"paged_attention": False}, "cuda")
    with pytest.raises(FlagError, match=r"^--compare cuda-graph: this switch has no effect with --no-paged-attention$"):
        chosen_switches(["cuda-graph"], "cuda", gathered, {})
    chosen = chosen_switches(["all"], "cuda", gathered, {})
    assert {"paged_attention", "fused_mlp", "batched_sampling"} <= set(chosen)
    assert not {"cuda_graph", "fused_rotary", "fused_qk_norm", "late_results"} & set(chosen)


def test_a_switch_that_the_device_cannot_serve(make_case):
    """Ignoring it would compare an engine with itself."""
    unserved = [f.name for f in fields(Switches) if "cpu" not in f.metadata["devices"]]
    with pytest.raises(FlagError, match="has no meaning on cpu"):
        compare_switch(make_case(), unserved[0], 1)
