"""Timed runs of one engine: what counts, and what must not flatter it. No test measures time."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rosebatch.bench import throughput
from rosebatch.bench.case import needed_kv_memory, spread
from rosebatch.bench.scenario import Sampling
from rosebatch.bench.throughput import against_floor, run_once, time_case
from rosebatch.bench.workload import Workload
from rosebatch.core.errors import UserError
from rosebatch.engine.metrics.roofline import Rates


def test_the_report_is_of_the_run_in_the_middle(make_case, monkeypatch, fake_launch, capsys):
    """Counters are those of the median run alone, the warm-up is start-up, and every run has its own ids."""
    clock = iter([0, 100, 0, 3, 0, 1, 0, 2])
    monkeypatch.setattr("rosebatch.bench.case.launch", fake_launch.launch)
    # Not of the module itself: threads of other tests look at the clock, too.
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    case = make_case()
    report = time_case(case, 3, 0.25)
    prompts = [[tuple(prompt) for prompt in case.workload(run).prompts] for run in range(4)]
    assert [each for _, each in fake_launch.ran] == prompts
    assert fake_launch.configs == [case.config]
    expected = {"kind": "run", "scenario": "small", "model": "tiny-llama", "completed": 3, "steps": 1}
    expected |= {"seconds": [3, 1, 2], "elapsed_s": 2, "output_tokens_per_s": 6.0}
    expected |= {"startup_s": {"import": 0.25, "load": 0.5, "warm-up": 100}, "graph_replays": 0, "graph_captures": 0}
    assert {name: report[name] for name in expected} == expected
    assert report["workload"]["input_len"] == 6
    assert "floor" not in report
    assert json.loads(json.dumps(report)) == report
    assert capsys.readouterr().err == "rosebatch: fake fits\n", "no start of a bench said how it fits"


def test_the_share_of_the_floor(make_case, monkeypatch, fake_launch):
    """It refers to the reported seconds."""
    monkeypatch.setattr("rosebatch.bench.case.launch", fake_launch.launch)
    case = make_case()
    report = time_case(case, 1, 0.0)
    report |= against_floor(case, report["elapsed_s"], Rates(copy=1e6, matmul=1e6))
    floor = case.floor(Rates(copy=1e6, matmul=1e6))
    assert report["floor"]["seconds"] == floor.seconds == report["floor"]["prefill_s"] + report["floor"]["decode_s"]
    assert report["share_of_floor"] == floor.seconds / report["elapsed_s"]


def test_a_real_engine_gets_no_help_from_its_cache(make_case):
    """With the ids of the run before, two of the prompt's three blocks would be cached."""
    report = time_case(make_case(input_len=48, prefix_cache=True), 2, 0.0)
    assert (report["completed"], report["prompt_tokens"], report["cached_tokens"]) == (3, 144, 0)
    assert report["output_tokens"] == 12
    assert report["engine"]["toggles"]["prefix_cache"] is True


def test_a_shared_prefix_is_computed_once_in_each_run(make_case):
    """The second and third prompt reuse two blocks, in later runs too."""
    report = time_case(make_case(shared_prefix_len=32, prefix_cache=True), 2, 0.0)
    assert (report["prompt_tokens"], report["cached_tokens"]) == (3 * 38, 2 * 32)


def test_sequences_that_give_way(make_case):
    """With a KV cache too small for the outputs, sequences still reach their full length."""
    case = make_case(input_len=30, output_len=40)
    config = replace(case.config, kv_cache_memory=needed_kv_memory(case) // 6)
    report = time_case(replace(case, config=config), 1, 0.0)
    assert report["output_tokens"] == 120
    assert report["preemptions"] > 0


def test_a_short_completion_is_no_result(fake_launch, make_case):
    """Fewer tokens would look like more speed."""
    engine = fake_launch.launch(make_case().config).engine
    engine.short_by = 1
    with pytest.raises(AssertionError, match="3 tokens instead of 4"):
        run_once(engine, Workload([[1, 2]], [4]), Sampling())


def test_a_lost_completion_is_no_result(fake_launch, make_case):
    """A request that never finishes would look like more speed."""
    engine = fake_launch.launch(make_case().config).engine
    run, engine.run = engine.run, lambda requests: list(run(requests))[1:]
    with pytest.raises(AssertionError, match="every request"):
        run_once(engine, Workload([[1, 2], [3]], [4, 4]), Sampling())


def test_a_workload_longer_than_the_engine_holds(fake_launch, make_case):
    """Found before anything runs."""
    engine = fake_launch.launch(make_case().config).engine
    with pytest.raises(UserError, match="514 tokens, but the engine holds at most 512"):
        run_once(engine, Workload([[1] * 510], [4]), Sampling())
    assert fake_launch.ran == []


def test_needed_kv_memory(make_case):
    """Blocks of 64 tokens for the longest sequences that run together, with a spare one for each."""
    token = 2 * 2 * 2 * 16 * 4
    assert needed_kv_memory(make_case()) == 3 * 2 * 64 * token
    assert needed_kv_memory(make_case(input_len=(60, 100, 1), max_num_seqs=2)) == (3 + 2) * 64 * token


@pytest.mark.parametrize(("values", "median"), [([1.0], 1.0), ([3.0, 1.0, 2.0], 2.0), ([4.0, 3.0, 1.0, 2.0], 2.0)])
def test_spread(values, median):
    """The median is a measured value, because the report is that run's."""
    assert spread(values) == {"median": median, "min": min(values), "max": max(values)}


def test_more_rows_than_seats_go_in_the_order_of_a_job(make_case):
    """One process began the longest row last, and the workers of -dp did not: two seemed to make more than two."""
    report = time_case(make_case(num_prompts=40, input_len=3, output_len=[2] * 39 + [60], max_num_seqs=4), 1, 0.0)
    assert report["completed"] == 40
    assert report["steps"] < 75
