"""``--tensor-parallel-size``: processes that hold a model together give the rows of one, and end together."""

import json
import os
import signal
import subprocess
import sys

import pytest

from rosebatch import LLM, SamplingParams
from rosebatch.config.run import RunConfig
from rosebatch.launch.launch import launch
from tests.cli.test_workers import are_gone, await_rows, children, expected, source, start  # noqa: F401 (fixtures)
from tests.helpers.checkout import python_path
from tests.helpers.command_errors import require_error
from tests.helpers.listening import LOOPBACK, addresses
from tests.helpers.slow_steps import slow_steps
from tests.helpers.waiting import PATIENCE_SECONDS, until


def rows(output):
    """Results without the numbers of log-probabilities: ranks add up in another order than one process."""
    return [json.loads(line, parse_float=lambda text: None) for line in output.splitlines()]


def followers(job, count=1):
    """The processes with a part of the model, once so many of them serve: children of the job, or of its workers."""

    def find():
        assert job.poll() is None
        found = find_followers(job)
        return found if len(found) >= count else None

    return until(find)


def find_followers(job):
    command = ["ps", "-ww", "-e", "-o", "pid=", "-o", "ppid=", "-o", "args="]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parents = {job.pid, *children(job)}
    processes = [line.split(maxsplit=2) for line in found.splitlines() if "rosebatch.launch.tp_worker" in line]
    return [int(pid) for pid, parent, _ in processes if int(parent) in parents]


@pytest.mark.thorough
def test_two_ranks_give_the_bytes_of_one_process(start, source, expected, tmp_path):  # noqa: F811
    """Every rank samples: were its random numbers or masks others, the ranks would go apart."""
    report = tmp_path / "report.json"
    job = start(source, "-o", tmp_path / "two.jsonl", "-tp", 2, "--report", report)
    assert job.wait(PATIENCE_SECONDS) == 3
    assert rows((tmp_path / "two.jsonl").read_bytes()) == rows(expected)
    assert json.loads(report.read_text())["engine"]["tensor_parallel_size"] == 2


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_to_this_machine_alone(start, source, tmp_path):  # noqa: F811
    """The store of PyTorch listened on all interfaces: whoever reached it could read it, and write to it."""
    target = tmp_path / "out.jsonl"
    slow_steps(tmp_path, target)
    job = start(source, "-o", target, "-tp", 2, "--max-num-seqs", 1, PYTHONPATH=python_path(tmp_path))
    found = followers(job)
    await_rows(job, target)
    assert addresses([job.pid, *found]) <= LOOPBACK


@pytest.mark.thorough
@pytest.mark.parametrize("lead", [False, True])
def test_a_rank_that_dies_ends_the_job(start, source, expected, tmp_path, lead):  # noqa: F811
    """The others would wait for it for ever, or leave a line of PyTorch's; what is written must stay.

    A leader that was killed left the file by which the ranks find each other.
    """
    target, temporary = tmp_path / "out.jsonl", tmp_path / "temporary"
    temporary.mkdir()
    slow_steps(tmp_path, target)
    variables = {"PYTHONPATH": python_path(tmp_path), "TMPDIR": str(temporary)}
    job = start(source, "-o", target, "-tp", 2, "--max-num-seqs", 1, **variables)
    (follower,) = followers(job)
    await_rows(job, target)
    os.kill(job.pid if lead else follower, signal.SIGKILL)
    assert job.wait(PATIENCE_SECONDS) == (-signal.SIGKILL if lead else 1)
    if not lead:
        (line,) = [line for line in (tmp_path / "stderr").read_text().splitlines() if "error" in line]
        assert line.startswith("rosebatch: error: rank 1 of 2: died (SIGKILL)")
        assert "rerun with --resume" in line
    until(lambda: are_gone([follower]))
    assert not lead or not sys.platform.startswith("linux") or not list(temporary.iterdir())
    assert start(source, "-o", target, "-tp", 2, "--resume").wait(PATIENCE_SECONDS) == 3
    assert rows(target.read_bytes()) == rows(expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks(start, source, tmp_path, number, code):  # noqa: F811
    """Ctrl-C, timeout and Slurm reach them too: they must not die before the leader, nor outlive it."""
    target = tmp_path / "out.jsonl"
    slow_steps(tmp_path, target)
    job = start(source, "-o", target, "-tp", 2, "--max-num-seqs", 1, PYTHONPATH=python_path(tmp_path))
    found = followers(job)
    await_rows(job, target)
    # It may come to them first.
    os.kill(found[0], number)
    part = target.with_name("out.jsonl.part")
    size = part.stat().st_size
    until(lambda: part.stat().st_size > size)
    os.killpg(job.pid, number)
    assert job.wait(PATIENCE_SECONDS) == code
    assert "rerun with --resume to continue" in (tmp_path / "stderr").read_text()
    until(lambda: are_gone(found))


@pytest.mark.thorough
def test_workers_of_two_ranks_each(start, source, expected, tmp_path):  # noqa: F811
    """One rank dies: its worker is replaced as a whole."""
    target = tmp_path / "out.jsonl"
    gate = slow_steps(tmp_path, target)
    flags = ("-dp", 2, "-tp", 2, "--max-num-seqs", 4)
    job = start(source, "-o", target, *flags, PYTHONPATH=python_path(tmp_path))
    victim = followers(job, 2)[0]
    await_rows(job, target)
    os.kill(victim, signal.SIGKILL)
    gate.unlink()
    assert job.wait(PATIENCE_SECONDS) == 3
    assert rows(target.read_bytes()) == rows(expected)
    assert "rank 1 of 2: died (SIGKILL)" in (tmp_path / "stderr").read_text()


def test_sizes_that_are_impossible(cli, source, model_folder, tmp_path):  # noqa: F811
    """They were an error of a kernel, or of none."""
    command = ["generate", source, "-o", tmp_path / "out", "--model", model_folder, "--device", "cpu"]
    told = "--tensor-parallel-size 3: the model has 4 heads, which cannot be divided by 3"
    require_error(cli(*command, "-tp", 3), 2, told)
    told = "transformers' own code runs this model"
    require_error(cli(*command, "-tp", 2, "--model-impl", "transformers"), 2, told)


@pytest.mark.thorough
def test_a_library_may_lead_one_model_after_the_other(model_folder):
    """Processes of a model that is closed went on, and the next one found the group of the first."""
    prompts, sampling = ["one", "two", "three"], SamplingParams(max_tokens=20, logprobs=2)

    def texts(**settings):
        with LLM(str(model_folder), device="cpu", **settings) as llm:
            return [output.outputs[0].text for output in llm.generate(prompts, sampling)]

    alone = texts()
    for _ in range(2):
        assert texts(tensor_parallel_size=2) == alone
        found = subprocess.run(["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True)
        assert "rosebatch.launch.tp_worker" not in found.stdout


@pytest.mark.thorough
def test_a_model_that_nobody_holds_makes_room(model_folder):
    """An engine in a cycle is there until Python looks for cycles: the next one was refused."""
    config = RunConfig(model=str(model_folder), device="cpu", tensor_parallel_size=2)
    launched = [launch(config)]
    launched.append(launched)
    del launched
    assert launch(config).engine.vocab_size > 0
