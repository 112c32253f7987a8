"""A whole run: the order of its stages, what a failure costs, and what is printed."""

import io
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from rosebatch.bench import session
from rosebatch.bench.against import PEERS, run_peer
from rosebatch.bench.session import run_session, summarize
from rosebatch.bench.tables import print_results
from rosebatch.core.errors import UserError
from rosebatch.engine.metrics.roofline import Rates
from rosebatch.model.quantization.chosen import choose_quantization

OURS = {"kind": "run", "model": "tiny-llama", "elapsed_s": 2.0, "seconds": [2.0, 1.5, 3.0]}
OURS |= {"output_tokens_per_s": 60.0, "startup_s": {"import": 1.0, "load": 0.5, "warm-up": 4.0}}
THEIRS = {"version": "9.9", "startup_s": {"load": 40.0, "warm-up": 5.0}, "seconds": [4.0, 3.0, 5.0]}


@pytest.fixture
def stages(monkeypatch):
    """Replaces every stage by one that notes that it ran."""
    ran = SimpleNamespace(order=[], models=[], failing=set(), slower={})

    def run_peer(peer, cases, repeats):
        ran.order.append((peer.name, [case.name for case in cases]))
        ran.models.append([case.source.name for case in cases])
        if peer.name in ran.failing:
            return {case.name: {"error": f"{peer.name} ended"} for case in cases}
        return {case.name: {**THEIRS, "is_cold": case is cases[0]} for case in cases}

    def time_case(case, repeats, import_seconds):
        ran.order.append(("rosebatch", case.name))
        model = case.source.name
        seconds = OURS["elapsed_s"] * ran.slower.get(model, 1)
        return {**OURS, "scenario": case.name, "model": model, "elapsed_s": seconds}

    def compare_switch(case, switch, repeats):
        ran.order.append((switch, case.name))
        side = {"seconds": [1.0], "output_tokens_per_s": {"median": 12.0, "min": 11.0, "max": 13.0}, "syncs": 5}
        other = side | {"syncs": 5 if switch == "prefix_cache" else 40}
        ratio = {"median": 1.25, "min": 1.2, "max": 1.5}
        names = {"scenario": case.name, "model": case.source.name, "switch": switch}
        off = {"fused_mlp": "it hides the other"} if switch == "batched_sampling" else {}
        return {"kind": "comparison", **names, "on": side, "off": other, "ratio": ratio, "switched_off": off}

    monkeypatch.setattr(session, "require_installed", lambda peer: ran.order.append(("installed", peer.name)))
    monkeypatch.setattr(session, "run_peer", run_peer)
    monkeypatch.setattr(session, "time_case", time_case)
    monkeypatch.setattr(session, "compare_switch", compare_switch)
    return ran


def run(cases, switches=(), peers=()):
    peers = [PEERS[name] for name in peers]
    return run_session(cases, repeats=3, switches=switches, peers=peers, import_seconds=1.0)


def printed(results, cases):
    """The lines of results, with a blank between two words."""
    stream = io.StringIO()
    print_results(results, cases, stream)
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_peers_come_first(stages, make_case):
    """Peers need the GPU's memory while we hold none, and only after all of them are known to be installed."""
    cases = [make_case("a"), make_case("b")]
    results = list(run(cases, ["prefix_cache"], ["vllm", "sglang"]))
    first = [("installed", "vllm"), ("installed", "sglang"), ("vllm", ["a", "b"]), ("sglang", ["a", "b"])]
    assert stages.order == first + [(stage, name) for name in "ab" for stage in ("prefix_cache", "rosebatch")]
    kinds = ["comparison", "run", "peer", "peer"]
    assert [(r["kind"], r["scenario"]) for r in results] == [(k, name) for name in "ab" for k in kinds]


def test_the_ratio(stages, make_case):
    """The ratio is theirs over ours: their median took twice as long for the same tokens."""
    _, peer = run([make_case()], peers=["vllm"])
    expected = {"peer": "vllm", "version": "9.9", "elapsed_s": 4.0, "output_tokens_per_s": 30.0, "ratio": 2.0}
    assert {name: peer[name] for name in expected} == expected
    assert "share_of_floor" not in peer


def test_the_first_run(stages, make_case):
    """A job runs once: start-up and the first run are a figure of their own, of the first scenario of each process."""
    ours, peer, later, other = run([make_case("a"), make_case("b")], peers=["vllm"])
    assert (ours["cold_s"], ours["first_over_warm"]) == (1.0 + 0.5 + 4.0, 4.0 / 2.0)
    assert (peer["cold_s"], peer["first_over_warm"], peer["cold_ratio"]) == (45.0, 5.0 / 4.0, 45.0 / 5.5)
    assert later["first_over_warm"] == 2.0 and other["first_over_warm"] == 1.25
    assert not any(name in entry for entry in (later, other) for name in ("cold_s", "cold_ratio", "is_cold"))
    ours = next(result for result in run([make_case()], ["prefix_cache"], ["vllm"]) if result["kind"] == "run")
    assert "cold_s" not in ours, "a comparison ran before it"


def test_rates_are_measured_behind_the_cold_run(stages, make_case, monkeypatch):
    """Else the GPU is started before the clock is."""
    monkeypatch.setattr(session, "measure_rates", lambda device: stages.order.append(("rates", device)))
    list(run([make_case("a"), make_case("b")]))
    assert stages.order == [("rosebatch", "a"), ("rates", "cpu"), ("rosebatch", "b")]


def test_peers_are_held_against_the_floor(stages, make_case, monkeypatch):
    """The floor is the same as ours."""
    monkeypatch.setattr(session, "measure_rates", lambda device: Rates(copy=1e6, matmul=1e6))
    case = make_case()
    _, peer = run([case], peers=["vllm"])
    assert peer["share_of_floor"] == case.floor(Rates(copy=1e6, matmul=1e6)).seconds / 4.0


def test_comparisons_alone(stages, make_case):
    """Our engine by itself was not requested, so it does not run."""
    assert [r["kind"] for r in run([make_case()], ["prefix_cache", "chunked_prefill"])] == ["comparison"] * 2
    assert stages.order == [("prefix_cache", "small"), ("chunked_prefill", "small")]


def test_a_peer_that_fails_costs_itself_only(stages, make_case):
    """Its error is kept, and the minutes of the others are not lost."""
    stages.failing = {"vllm"}
    ours, vllm, sglang = run([make_case()], peers=["vllm", "sglang"])
    assert (ours["kind"], sglang["ratio"]) == ("run", 2.0)
    assert vllm["error"] == "vllm ended"
    assert summarize([ours, vllm, sglang])["tiny-llama"]["ratios"] == {"sglang": pytest.approx(2.0)}


def test_out_of_gpu_memory(stages, make_case, monkeypatch):
    """One line that says what to do, not a traceback."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has")
    monkeypatch.setattr(session, "time_case", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"^CUDA out of memory: choose a smaller scenario"):
        list(run([make_case()]))


def test_summary():
    """Geometric means; the share of the floor only if every run has one."""
    runs = [
        {**OURS, "share_of_floor": 0.5},
        {**OURS, "elapsed_s": 8.0, "output_tokens_per_s": 240.0, "share_of_floor": 0.125},
        {"kind": "peer", "peer": "vllm", "beside": "tiny-llama", "ratio": 2.0},
        {"kind": "peer", "peer": "vllm", "beside": "tiny-llama", "ratio": 8.0},
        {"kind": "comparison", "model": "tiny-llama"},
    ]
    assert summarize(runs) == {
        "tiny-llama": {
            "elapsed_s": pytest.approx(4.0),
            "output_tokens_per_s": pytest.approx(120.0),
            "share_of_floor": pytest.approx(0.25),
            "ratios": {"vllm": pytest.approx(4.0)},
        }
    }
    assert "share_of_floor" not in summarize([OURS, runs[0]])["tiny-llama"]
    assert summarize(runs[4:]) == {}


@pytest.fixture
def two_models(make_case):
    """Two scenarios, each with HP1 and softmax attention."""
    return [make_case(name, model=model) for name in "ab" for model in ("tiny-hp1", "tiny-llama")]


def test_models_side_by_side(stages, two_models):
    """A further model is compared with the first one on the same scenario, not with the last run."""
    stages.slower = {"tiny-llama": 1.5}
    results = list(run(two_models))
    expected = [(name, *each) for name in "ab" for each in (("tiny-hp1", None), ("tiny-llama", 1.5))]
    assert [(r["scenario"], r["model"], r.get("time_over_first")) for r in results] == expected
    means = summarize(results)
    seconds = {model: values["elapsed_s"] for model, values in means.items()}
    assert seconds == pytest.approx({"tiny-hp1": 2.0, "tiny-llama": 3.0})
    assert means["tiny-llama"]["time_over_first"] == pytest.approx(1.5)
    assert "time_over_first" not in means["tiny-hp1"]


def test_peers_run_what_they_have(stages, two_models, monkeypatch):
    """Peers run each scenario once, with softmax attention, because HP1 would fail; our HP1 is compared with that."""
    stages.slower = {"tiny-llama": 1.25}
    monkeypatch.setattr(session, "measure_rates", lambda device: Rates(copy=1e6, matmul=1e6))
    results = list(run(two_models, peers=["vllm"]))
    assert (stages.order[1], stages.models) == (("vllm", ["a", "b"]), [["tiny-llama", "tiny-llama"]])
    peers = [r for r in results if r["kind"] == "peer"]
    assert [(r["scenario"], r["model"], r["beside"], r["ratio"]) for r in peers] == [
        (name, "tiny-llama", *beside) for name in "ab" for beside in (("tiny-hp1", 2.0), ("tiny-llama", 1.6))
    ]
    # The floor of the model that the peers ran.
    floor = two_models[1].floor(Rates(copy=1e6, matmul=1e6)).seconds
    assert {r["share_of_floor"] for r in peers} == {floor / 4.0}
    means = summarize(results)
    expected = {"tiny-hp1": {"vllm": pytest.approx(2.0)}, "tiny-llama": {"vllm": pytest.approx(1.6)}}
    assert {model: values["ratios"] for model, values in means.items()} == expected


def test_peers_of_hp1_alone(stages, make_case, monkeypatch):
    """Peers can run nothing here: the error says so, and our own figures are not lost."""
    monkeypatch.setattr(session, "run_peer", run_peer)
    ours, vllm = run([make_case(model="tiny-hp1")], peers=["vllm"])
    assert (ours["kind"], ours["model"]) == ("run", "tiny-hp1")
    assert vllm["error"] == "--against: other engines cannot run models of the family hp1"


def test_lines_of_several_models(stages, two_models):
    """Every line names its model, also the mean."""
    stages.slower = {"tiny-llama": 1.5}
    lines = printed(run(two_models, ["prefix_cache"], ["vllm"]), two_models)
    assert lines[0].startswith("a tiny-hp1 prefix-cache on 12")
    assert lines[1].startswith("scenario model engine seconds (min-max) output tok/s of floor time/first ours/theirs")
    assert lines[2] == "a tiny-hp1 rosebatch 2.0000 (1.5000-3.0000) 60 - 1.5 4.00"
    assert lines[3] == "a tiny-llama vllm 9.9 4.0000 (3.0000-5.0000) 30 - 2.00 40.0 5.00 45.0"
    assert lines[4].startswith("a tiny-llama prefix-cache on 12")
    assert lines[5] == "a tiny-llama rosebatch 2.0000 (1.5000-3.0000) 60 - 1.50 1.5 4.00"
    assert lines[-2:] == [
        "geometric mean tiny-hp1 rosebatch 2.0000 60 - vllm 2.00",
        "geometric mean tiny-llama rosebatch 3.0000 60 - 1.50 vllm 1.33",
    ]


def test_lines_of_one_scenario_have_no_means(stages, two_models):
    """The mean of a single figure would repeat the line."""
    assert "geometric" not in "\n".join(printed(run(two_models[:2]), two_models[:2]))


def test_attributions_come_last(stages, make_case, monkeypatch):
    """A profiler that goes on working would slow down later timed runs; some cases have no attribution."""
    cases = [replace(make_case(name), attribution=name != "b") for name in "abc"]
    monkeypatch.setattr(session, "attribute_case", lambda case: {"kind": "attribution", "scenario": case.name})
    expected = [*(("run", name) for name in "abc"), ("attribution", "a"), ("attribution", "c")]
    assert [(entry["kind"], entry["scenario"]) for entry in run(cases)] == expected


def test_lines_of_an_attribution(make_case):
    """Below all runs, largest shares first; what is no part of the layers has no time a layer."""
    attribution = {
        "kind": "attribution",
        "scenario": "a",
        "model": "tiny-llama",
        "num_layers": 2,
        "prefill_us": {"qkv projection": 300.0, "attention": 100.0},
        "decode_step_us": {"attention": 7.0, "sampling": 3.0},
        "decode_waiting_us": 12.0,
        "decode_kernels": 5,
        "decode_kernel_us": [{"name": "_decode", "part": "attention", "number": 2, "us": 7.0, "duration_us": 9.0}],
        "replays": {"decode": {"number": 10, "total_us": 2500.0, "mean_us": 250.0}},
        "api_us": {"cudaGraphLaunch": {"calls": 8, "us": 1500.0}},
        "api_decode_steps": 40,
    }
    results = [{**OURS, "scenario": "a"}, {**OURS, "scenario": "b"}, attribution]
    lines = printed(results, [make_case("a"), make_case("b")])
    assert lines[3:-1] == [
        "a, tiny-llama, 2 layers",
        "all prompt steps µs share a layer",
        "qkv projection 300.0 75.0% 150.00",
        "attention 100.0 25.0% 50.00",
        "in all 400.0 100.0% 200.00",
        "a decode step, 5 kernels µs share a layer",
        "attention 7.0 70.0% 3.50",
        "sampling 3.0 30.0%",
        "in all 10.0 100.0% 3.50",
        "beside this, the GPU waited 12 µs for the host",
        "kernels of the decode step number µs each duration part",
        "_decode 2 3.50 4.50 attention",
        "decode graphs: 10 replays, 2.5 ms in all, 250.0 µs each, 125.0 µs a layer",
        "calls of CUDA until 40 decode steps were done, under the profiler:",
        "cudaGraphLaunch 8 1.50 ms",
    ]
    assert lines[-1].startswith("geometric mean")


def test_lines(stages, make_case):
    """Results of several scenarios are lines under one header, with means at the end."""
    stages.failing = {"sglang"}
    cases = [make_case("a"), make_case("b")]
    results = list(run(cases, ["prefix_cache"], ["vllm", "sglang"]))
    assert [r["kind"] for r in results] == ["comparison", "run", "peer", "peer"] * 2
    lines = printed(results, cases)
    assert lines[0] == "a prefix-cache on 12 (11-13) tok/s, off 12 (11-13) tok/s, on/off 1.250 (1.200-1.500)"
    assert lines[1].startswith("scenario engine seconds")
    assert lines[2] == "a rosebatch 2.0000 (1.5000-3.0000) 60 - 1.5 4.00"
    assert lines[3] == "a vllm 9.9 4.0000 (3.0000-5.0000) 30 - 2.00 40.0 5.00 45.0"
    assert lines[4] == "a sglang failed"
    expected = [["b", name] for name in ("prefix-cache", "rosebatch", "vllm", "sglang")]
    assert [line.split()[:2] for line in lines[5:9]] == expected
    assert lines[9:] == ["geometric mean rosebatch 2.0000 60 - vllm 2.00"]


def test_what_was_switched_off_is_printed(stages, make_case):
    """A ratio without the fused sampler is no ratio of a run with it."""
    stream = io.StringIO()
    cases = [make_case("a"), make_case("b")]
    print_results(run(cases, ["batched_sampling"]), cases, stream)
    lines = stream.getvalue().splitlines()
    assert all(line.endswith(", on/off 1.250 (1.200-1.500), syncs 5, 40") for line in lines[::2])
    assert lines[1::2] == ["    --no-fused-mlp on both sides: it hides the other"] * 2


def test_results_are_printed_as_they_come(stages, make_case):
    """A run that is cut off after an hour must have shown its results so far."""
    stream = io.StringIO()

    def results():
        yield {**OURS, "scenario": "a"}
        assert "a  " in stream.getvalue()
        yield {**OURS, "scenario": "b"}

    print_results(results(), [make_case("a"), make_case("b")], stream)


def test_a_peer_with_another_form_is_named_once(stages, make_case, capsys):
    """Its ratio would be read as one between equals."""
    case = make_case()
    case = replace(case, source=replace(case.source, quantization=choose_quantization("fp8", None)))
    list(run([case, replace(case, name="other")], peers=["vllm", "transformers"]))
    assert capsys.readouterr().err == "rosebatch: warning: --against transformers: its weights are not in fp8\n"
