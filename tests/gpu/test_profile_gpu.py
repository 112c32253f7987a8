"""What a real profiler's trace says of the parts of a step: with graphs, and with switches off."""

import json
from dataclasses import replace

import pytest

from rosebatch.bench.attribution import attribute, trace_beginning
from rosebatch.bench.case import Case
from rosebatch.bench.parts import DOWN, KV, LOGITS, OUT, QKV, REST, SAMPLING, UP
from rosebatch.bench.scenario import Scenario, configs_dir
from rosebatch.bench.throughput import run_once
from rosebatch.config.run import RunConfig
from rosebatch.launch.launch import launch
from rosebatch.model.source import find_model

pytestmark = pytest.mark.gpu

_SCENARIO = Scenario(num_prompts=8, input_len=40, output_len=64, dtype="bfloat16")


def _case(device, model, **switches):
    path = str(configs_dir() / "models" / f"{model}.toml")
    config = RunConfig.of(
        path, load_format="dummy", dtype="bfloat16", prefix_cache=False, kv_cache_memory=2**28, **switches
    )
    return Case("small", _SCENARIO, config, find_model(config, device), "cuda")


def _warm(case):
    engine = launch(case.config).engine
    run_once(engine, case.workload(0), case.scenario.sampling)
    return engine


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-hp1"])
@pytest.mark.parametrize("off", [None, "cuda_graph", "fused_norm", "fused_mlp", "fused_rotary", "fused_sampler"])
def test_products_have_names(device, model, off):
    """The rows of a graph were one lump of products; a fallback's kernels were of no part."""
    case = _case(device, model, **({} if off is None else {off: False}))
    engine = _warm(case)
    found = attribute(engine, lambda run: case.workload(run).requests(case.scenario.sampling), cuda=True)
    for name in ("prefill_us", "decode_step_us"):
        assert {QKV, OUT, UP, DOWN, "attention", "norms"} <= found[name].keys(), found[name]
        assert "matrix products" not in found[name]
    step = found["decode_step_us"]
    assert {LOGITS, SAMPLING} <= step.keys()
    assert (KV in step) == (off == "fused_rotary")
    assert step.get(REST, 0.0) < 0.35 * sum(step.values())
    assert any("LaunchKernel" in name for name in found["api_us"])
    if off == "cuda_graph":
        assert found["replays"] == {}
        assert found["decode_waiting_us"] > 0
    else:
        assert found["api_us"]["cudaGraphLaunch"]["calls"] > 0
        run = run_once(engine, case.workload(4), case.scenario.sampling)
        assert sum(times["number"] for times in found["replays"].values()) == run.stats.graph_replays
        times = found["replays"]["decode"]
        assert times["mean_us"] == pytest.approx(times["total_us"] / times["number"])


def test_without_our_attention(device):
    """The PyTorch runner has no feedback kernel to split the steps by."""
    case = _case(device, "tiny-llama", paged_attention=False)
    found = attribute(_warm(case), lambda run: case.workload(run).requests(case.scenario.sampling), cuda=True)
    for name in ("prefill_us", "decode_step_us"):
        assert {QKV, OUT, UP, DOWN, "attention", "norms", KV, LOGITS, SAMPLING} <= found[name].keys()


def test_a_trace_of_kernels_for_a_browser(device, tmp_path):
    """It has kernels and ranges, and tracing changes no token."""
    case = replace(_case(device, "tiny-llama"), name="traced")
    engine = _warm(case)
    path = tmp_path / "trace.json"
    trace_beginning(engine, case.workload(1).requests(case.scenario.sampling), cuda=True, path=path)
    categories = {event.get("cat") for event in json.loads(path.read_bytes())["traceEvents"]}
    assert {"kernel", "cuda_runtime", "user_annotation"} <= categories
    assert not engine.has_unfinished
