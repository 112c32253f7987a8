"""``bench -dp``: one workload over several processes."""

import json

import pytest

from tests.helpers.command_errors import require_error

SMALL = ["--num-prompts", 10, "--input-len", 6, "--output-len", 3, "--repeats", 2, "--device", "cpu"]


@pytest.fixture
def bench(cli, toy_toml):
    """Runs ``bench`` on the toy model, in two processes."""
    return lambda *flags: cli("bench", "--model", toy_toml, "--load-format", "dummy", "-dp", 2, *SMALL, *flags)


@pytest.mark.thorough
def test_figures_of_all_together(bench, tmp_path):
    """Each process ran the whole workload, or one of them all of it; the runs of one were taken for those of both."""
    result = bench("--report", tmp_path / "report.json")
    assert result.code == 0, result.err
    assert "CPU 1: 5 requests" in result.out
    (report,) = json.loads((tmp_path / "report.json").read_text())["results"]
    assert (report["completed"], report["prompt_tokens"], report["output_tokens"]) == (10, 60, 30)
    assert [worker["requests"] for worker in report["workers"]] == [5, 5]
    assert report["output_tokens_per_s"] == pytest.approx(30 / report["elapsed_s"])
    assert report["elapsed_s"] in report["seconds"] and len(report["seconds"]) == 2
    assert 0 <= report["idle_share"] < 1
    assert report["engine"]["data_parallel_size"] == 2
    assert "floor" not in report
    assert report["host_us_per_row"] == {}, "a bench reads no rows: workers waited for theirs"


@pytest.mark.parametrize("flags", [["--compare", "all"], ["--against", "vllm"], ["--profile", "parts"]])
def test_what_one_process_is_measured_by(bench, flags):
    """It would have measured the parent, or one process of several."""
    require_error(bench(*flags), 2, f"leave out {flags[0]}")


def test_the_parent_leaves_the_gpu_alone(cli, bench, monkeypatch, tmp_path):
    """It made a context on the first GPU, which took memory from the worker there."""
    from rosebatch.cli import cuda_context

    made = []
    monkeypatch.setattr(cuda_context, "create", lambda: made.append(1))
    assert cli("bench", "-dp", 2, "--compare", "all").code == 2
    assert cli("generate", tmp_path / "none", "-dp", 2).code != 0
    assert not made
    assert cli("generate", tmp_path / "none").code != 0
    assert made
