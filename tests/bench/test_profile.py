"""Profiles after the timed runs: what they run, what they write, and what a mistake costs."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rosebatch.bench import profile
from rosebatch.bench.parts import PARTS, STEPS, ranges
from rosebatch.bench.profile import Profile, attribute_case, choose_profile, profile_case
from rosebatch.bench.profile_tables import profile_text
from rosebatch.core.errors import FlagError, UserError
from rosebatch.launch.launch import launch


def test_an_attribution_is_of_a_warm_engine(make_case, monkeypatch, fake_launch):
    """Compiling and capturing must not count; the ids must be unknown to any cache."""

    def attribute(engine, requests, *, cuda):
        fake_launch.ran += [("attributed", [request.prompt_token_ids for request in requests(run)]) for run in (1, 2)]
        return {"decode_kernels": 3, "cuda": cuda}

    monkeypatch.setattr("rosebatch.bench.case.launch", fake_launch.launch)
    monkeypatch.setattr(profile, "attribute", attribute)
    case = make_case()
    names = {"kind": "attribution", "scenario": "small", "model": "tiny-llama", "toggles": {}}
    assert attribute_case(case) == {**names, "decode_kernels": 3, "cuda": False}
    assert [name for name, _ in fake_launch.ran] == [0, "attributed", "attributed"]
    expected = [[tuple(prompt) for prompt in case.workload(run).prompts] for run in range(3)]
    assert [ids for _, ids in fake_launch.ran] == expected


def test_a_trace_for_a_browser(make_case, tmp_path):
    """It has the steps and all parts as ranges, and is JSON in the form that Perfetto reads."""
    output = tmp_path / "trace.json"
    entry = profile_case(make_case(), Profile("torch", output), alone=True)
    events = json.loads(output.read_bytes())["traceEvents"]
    ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {*PARTS, *STEPS} - {"activations", "router", "experts"} <= ranges
    expected = {"kind": "profile", "scenario": "small", "model": "tiny-llama", "profile": "torch"}
    assert entry == {**expected, "output": str(output), "events": len(events)}
    line = f"small, tiny-llama: {output}, {len(events)} events; open it in Perfetto or chrome://tracing\n"
    assert profile_text(entry) == line


def test_each_case_has_its_own_trace(make_case, tmp_path, monkeypatch):
    """The second case would overwrite the first one's trace."""
    monkeypatch.setattr(profile, "trace_beginning", lambda engine, requests, *, cuda, path: [path.write_text("[]")])
    case = make_case()
    for each in (case, replace(case, name="a/b")):
        profile_case(each, Profile("torch", tmp_path / "trace.json"), alone=False)
    expected = ["trace-a-b-tiny-llama.json", "trace-small-tiny-llama.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


def test_a_trace_that_cannot_be_written(make_case, tmp_path):
    """One line that names the file, not a traceback."""
    with pytest.raises(UserError, match=rf"^{tmp_path}: Is a directory$"):
        profile_case(make_case(), Profile("torch", tmp_path), alone=True)


def test_nvtx_ranges_of_one_run(make_case, monkeypatch):
    """Another profiler would record warm-up and captures too, or a run without its ranges."""
    seen = []

    @contextmanager
    def nvtx_range(name):
        seen.append(name)
        yield

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    entry = profile_case(make_case(output_len=3), Profile("nvtx", Path("unused")), alone=True)
    assert entry == {"kind": "profile", "scenario": "small", "model": "tiny-llama", "profile": "nvtx"}
    expected = ["start", "prompt step", "decode step", "decode step", "stop"]
    assert [name for name in seen if name in expected] == expected
    assert {*PARTS} - {"activations", "router", "experts"} <= {*seen}
    assert "NVTX" in profile_text(entry)


def test_choosing_a_profile():
    """A missing folder is found before the timed runs, not after them; a CPU has no NVTX ranges."""
    here, nowhere = Path("trace.json"), Path("no-such-folder/trace.json")
    assert choose_profile(None, here, "cpu") is None
    assert choose_profile("parts", nowhere, "cpu") is None
    assert choose_profile("torch", here, "cpu") == Profile("torch", here)
    assert choose_profile("nvtx", here, "cuda") == Profile("nvtx", here)
    with pytest.raises(FlagError, match=r"^--profile nvtx: there are no NVTX ranges on cpu; use --profile torch$"):
        choose_profile("nvtx", here, "cpu")
    told = r"^--profile-output no-such-folder/trace\.json: no-such-folder is not a folder$"
    with pytest.raises(FlagError, match=told):
        choose_profile("torch", nowhere, "cuda")


def test_ranges_nest_and_leave_nothing_behind(make_case):
    """Any profiler can mark the ranges; outside of them an engine pays nothing."""
    case = make_case(num_prompts=1, output_len=2)
    engine = launch(case.config).engine
    opened, depth = [], []

    @contextmanager
    def mark(name):
        opened.append((len(depth), name))
        depth.append(name)
        yield
        assert depth.pop() == name

    requests = case.workload().requests(case.scenario.sampling)
    with ranges(engine, mark):
        (first,) = engine.run(requests)
    layer = [(1, "qkv projection"), (1, "attention"), (2, "KV and rotary"), (2, "KV and rotary"), (2, "attention")]
    layer += [(1, "out projection"), (1, "norms"), (1, "gate, up projection"), (1, "down projection"), (1, "norms")]
    step = [(1, "norms"), *layer, *layer, (1, "logits"), (1, "sampling")]
    steps = [(0, "prompt step"), *step, (0, "decode step"), *step]
    # The calls of attention on gathered keys have no range of their own.
    assert opened == [each for each in steps if each != (2, "attention")]
    opened.clear()
    (second,) = engine.run(requests)
    assert opened == []
    assert first.token_ids == second.token_ids
