"""Replayed arrivals: who waits how long. Time is the test's own, so every figure is exact."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rosebatch.bench.against import Peer, replay_peer
from rosebatch.bench.page import bench_page
from rosebatch.bench.replay import replay, short_windows
from rosebatch.bench.scenario import Sampling
from rosebatch.bench.session import run_replays
from rosebatch.bench.tables import print_replays, ranks
from rosebatch.bench.trace import Arrivals
from rosebatch.bench.workload import Workload
from rosebatch.core.errors import UserError
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import MIXED, SeparateDecodes
from tests.bench.test_against import take_log
from tests.job.fake_model import FakeModel, make_engine

HERE = Path(__file__).parent


class VirtualTime:
    """A clock that moves only when somebody sleeps or a step is computed."""

    def __init__(self):
        self.time = 100.0
        self.slept = []

    def perf_counter(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds


@pytest.fixture
def virtual(monkeypatch):
    clock = VirtualTime()
    for module in ("rosebatch.engine.engine", "rosebatch.bench.replay"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock


def run(virtual, times, lengths, scale=1.0):
    """Replays prompts of 4 tokens. A step takes a second."""

    def step(plan):
        virtual.time += 1.0

    engine = make_engine(FakeModel(before_step=step), seqs=4, budget=64, blocks=64)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    requests = [Request(i, (65 + i, 66, 67, 68), each) for i, each in enumerate(params)]
    return replay(engine, [at / scale for at in times], requests)


def test_exact_figures(virtual):
    """Steps end at 1, 2, 3, 4 and 11. The second request comes within a step and waits from then on."""
    found = run(virtual, [0.0, 1.5, 10.0], [3, 2, 1])
    assert found.seconds == 11.0
    assert virtual.slept == [6.0]
    assert found.tally.ttft.percentiles((66, 67)) == pytest.approx({"p66": 1.0, "p67": 1.5}, rel=0.003)
    assert found.tally.e2e.summary()["mean"] == pytest.approx((3.0 + 2.5 + 1.0) / 3)
    assert found.tally.tpot.summary()["mean"] == pytest.approx(1.0)
    assert (len(found.tally.tpot), len(found.stats.itl)) == (2, 3)
    assert found.stats.itl.summary()["mean"] == pytest.approx(1.0)


def test_the_scale_divides_times(virtual):
    """Twice as fast: the last request comes at 5, and nothing else changes its own times."""
    found = run(virtual, [0.0, 3.0, 10.0], [3, 2, 1], scale=2.0)
    assert found.seconds == 6.0
    assert found.tally.ttft.summary()["mean"] == pytest.approx((1.0 + 1.5 + 1.0) / 3)


def test_requests_that_come_together(virtual):
    """They share steps, as in a batch."""
    found = run(virtual, [0.0, 0.0, 0.0], [2, 2, 2])
    assert found.seconds == 2.0
    assert found.tally.e2e.summary()["p99"] == pytest.approx(2.0, rel=0.003)


@pytest.mark.parametrize(("policy", "inside"), [(SeparateDecodes(8), 2), (SeparateDecodes(1), 1), (MIXED, None)])
def test_windows_are_short_meanwhile(policy, inside):
    """A request that came waited for two windows of eight steps."""
    scheduler = Scheduler(BlockPool(8, 4), max_num_seqs=4, max_num_batched_tokens=64, policy=policy)
    with pytest.raises(RuntimeError), short_windows(scheduler):
        assert getattr(scheduler.planner.policy, "max_steps", None) == inside
        raise RuntimeError
    assert scheduler.planner.policy is policy


@pytest.fixture
def peer(tmp_path):
    return Peer("fake", "fake_peer", "json", path=str(HERE), args={"log": str(tmp_path / "log")})


@pytest.fixture
def arrivals():
    return Arrivals("burst", [0.0, 0.0, 0.01], lambda run: Workload([[run + 1, 2, 3]] * 3, [4, 2, 1]))


def test_what_a_peer_is_sent(peer, make_case, arrivals):
    """The same prompts at the same times, and its latencies in the names of ours."""
    case = make_case(sampling=Sampling(temperature=1.0))
    found = replay_peer(peer, case, arrivals, [1.0, 2.0])
    spec = json.loads(Path(peer.args["log"]).read_text())["spec"]
    assert spec["replays"] == {
        "prompts": [arrivals.workload(i).prompts for i in range(3)],
        "output_lens": [4, 2, 1],
        "sampling": {"temperature": 1.0},
        "times": [[0.0, 0.0, 0.01], [0.0, 0.0, 0.005]],
    }
    assert "workloads" not in spec
    assert [each["version"] for each in found] == ["1.2", "1.2"]
    for each in found:
        assert each["elapsed_s"] >= 0.005
        assert each["output_tokens_per_s"] == pytest.approx(7 / each["elapsed_s"])
        # Percentiles are rounded.
        assert 0 <= each["ttft_s"]["p50"] <= each["e2e_s"]["p99"] < 1.01 * each["elapsed_s"]
        assert each["itl_s"].keys() == {"mean", "p50", "p90", "p95", "p99"}


def test_a_peer_that_loses_tokens(peer, make_case, arrivals):
    """Fewer tokens would look like speed."""
    peer = replace(peer, args={**peer.args, "short_by": 1})
    with pytest.raises(UserError, match="does not have the requested length") as caught:
        replay_peer(peer, make_case(), arrivals, [1.0])
    take_log(caught.value)


def test_ours_beside_peers(peer, make_case, arrivals, capsys):
    """A line for each scale and engine, a page with four plots; a peer that fails costs its own lines only."""
    bad = replace(peer, name="bad", args={**peer.args, "crash": True})
    entries = list(run_replays(make_case(), arrivals, [1.0, 4.0], [peer, bad], 0.5))
    names = [(entry["scale"], entry.get("peer", "rosebatch"), "error" in entry) for entry in entries]
    order = [("rosebatch", False), ("fake", False), ("bad", True)]
    assert names == [(scale, *each) for scale in (1.0, 4.0) for each in order]
    own = entries[0]
    assert own["startup_s"]["import"] == 0.5
    assert own["completed"] == 3
    assert all(own[f"{kind}_s"]["p90"] > 0 for kind in ("ttft", "tpot", "itl", "e2e"))
    print_replays(entries, sys.stdout)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "burst, tiny-llama, 3 requests"
    engines = ("rosebatch", "fake", "bad")
    assert [line.split()[:2] for line in lines[2:]] == [[scale, engine] for scale in "14" for engine in engines]
    assert lines[4].endswith("failed")
    page = bench_page(entries)
    assert page.count("<polyline") == 4 * 2
    assert page.count("<circle") == 4 * 2 * 2 * 2
    assert page.count("rx=") == 4, "a bar for each result"
    for error in {entry["error"] for entry in entries if "error" in entry}:
        take_log(error)


def test_latencies_keep_the_digits_that_are_read():
    """Guards against a column of E2E that is cut off: 28360.58/32622.43/33115.45 was wider than the page."""
    assert ranks({"p50": 0.0123456, "p90": 0.0999, "p99": 33.11545}) == "12.35/99.90/33115"
    assert ranks({}) == "-"
