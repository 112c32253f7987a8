"""On a GPU: the switches that no CPU can show act in the scenarios that they name (see tests/bench)."""

from dataclasses import fields, replace
from typing import Any

import pytest
from msgspec import structs

from rosebatch.bench.scenario import configs_dir, load_scenarios
from rosebatch.bench.workload import make_workload
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.engine.torch_runner.runner import TorchRunner
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.launch.launch import launch

pytestmark = pytest.mark.gpu


def run(switch, on):
    """A part of the switch's scenario, with it on or off."""
    (field,) = (each for each in fields(Switches) if each.name == switch)
    (chosen,) = load_scenarios([field.metadata["scenario"]])
    scenario = chosen.scenario
    config = RunConfig.of(
        str(configs_dir() / "models" / f"{scenario.model}.toml"),
        load_format="dummy",
        device="cuda",
        dtype=scenario.dtype,
        max_num_seqs=scenario.max_num_seqs,
        kv_cache_memory=1 << 30,
        prefix_cache=scenario.prefix_cache,
    )
    launched = launch(replace(config, switches={**config.switches, switch: on}))
    requests: list[Any] = make_workload(scenario, 1000).requests(scenario.sampling)[:8]
    short = [structs.replace(each, sampling=replace(each.sampling, max_tokens=24)) for each in requests]
    assert len(list(launched.engine.run(short))) == 8
    return launched.engine


def test_cuda_graph():
    """Steps are replayed, or launched kernel by kernel."""
    on, off = run("cuda_graph", True), run("cuda_graph", False)
    assert on.stats.graph_replays > 0 == off.stats.graph_replays
    assert on.stats.graph_captures > 0 == off.stats.graph_captures


def test_paged_attention():
    """Blocks are read in place by the one runner, gathered by the other."""
    on, off = run("paged_attention", True), run("paged_attention", False)
    assert isinstance(on.runner, TritonRunner) and isinstance(off.runner, TorchRunner)


def test_parallel_compile(tmp_path, monkeypatch):
    """The warm-up of a model runs once on a machine, or never."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run("parallel_compile", False)
    assert list(tmp_path.glob("rosebatch-*")) == []
    run("parallel_compile", True)
    (mark,) = tmp_path.glob("rosebatch-*")
    written = mark.stat().st_mtime_ns
    run("parallel_compile", True)
    assert list(tmp_path.glob("rosebatch-*")) == [mark] and mark.stat().st_mtime_ns == written
