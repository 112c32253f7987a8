"""``--ray``: actors give the bytes of one process, whatever happens to them."""

import contextlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from rosebatch.job.workers.ray_cluster import cpus_of_each, short_reason
from tests.helpers.checkout import python_path
from tests.helpers.command_errors import require_error
from tests.helpers.listening import LOOPBACK, addresses
from tests.helpers.slow_steps import part_of, slow_steps
from tests.helpers.waiting import PATIENCE_SECONDS, until

FLAGS = ("--ray", "local", "-dp", 2)


def has_rows(target):
    """Whether the part file has a result."""
    part = part_of(target)
    return part.exists() and b"finish_reason" in part.read_bytes()


def is_guard(pid):
    """Whether this is the process that ends a Ray."""
    with contextlib.suppress(OSError):
        return b"ray_guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.mark.thorough
def test_two_actors_give_the_bytes_of_one_process(rays, start, source, expected, tmp_path):
    """Rows come back in any order, through batches of messages in both directions."""
    report, target = tmp_path / "report.json", tmp_path / "out.jsonl"
    assert start(source, "-o", target, *FLAGS, "--report", report).wait(PATIENCE_SECONDS) == 3
    assert target.read_bytes() == expected
    workers = json.loads(report.read_text())["workers"]
    assert sum(worker["requests"] for worker in workers) == 91
    for number, worker in enumerate(workers):
        # One that is not ready before the other has done all has told nothing of itself.
        silent = () if worker["requests"] else (f"Ray {number}",)
        assert worker["device"] in (f"{os.uname().nodename} CPU {number}", *silent)


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_actor_that_dies_or_hangs(rays, start, source, expected, tmp_path, how):
    """Its rows were lost, or the job waited for ever; Ray tells of the death on stdout, among the results."""
    target, limit = tmp_path / "out.jsonl", 600 if how is signal.SIGKILL else 20
    gate = slow_steps(tmp_path, target)
    with (tmp_path / "stdout").open("w") as stdout:
        kept = os.dup(1)
        os.dup2(stdout.fileno(), 1)
        try:
            # One worker: it is the one that has answered.
            flags = (*FLAGS[:2], "--max-num-seqs", 2, "--worker-timeout", limit)
            job = start(source, "-o", target, *flags, PYTHONPATH=python_path(tmp_path))
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    until(lambda: has_rows(target))
    os.kill(rays.processes("ray::WorkerActor")[0], how)
    gate.unlink()
    assert job.wait(PATIENCE_SECONDS) == 3
    assert target.read_bytes() == expected
    assert "another one computes its rows again" in (tmp_path / "stderr").read_text()
    assert (tmp_path / "stdout").read_text() == ""


@pytest.mark.thorough
def test_a_cluster_without_a_node(rays, start, source, tmp_path):
    """Ray waits for a node for ever, and so did the job."""
    target = tmp_path / "out.jsonl"
    slow_steps(tmp_path, target)
    job = start(source, "-o", target, *FLAGS, "--max-num-seqs", 2, PYTHONPATH=python_path(tmp_path))
    until(lambda: has_rows(target))
    raylet = Path(importlib.util.find_spec("ray").origin).with_name("core") / "src/ray/raylet/raylet"
    for each in (*rays.processes(str(raylet)), *rays.processes("ray::WorkerActor")):
        os.kill(each, signal.SIGKILL)
    assert job.wait(PATIENCE_SECONDS) == 1
    last = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert "the Ray cluster has no node left" in last
    assert "rerun with --resume to continue" in last


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_driver_that_is_killed_and_continued(rays, start, source, expected, tmp_path):
    """Its actors and its Ray must not outlive it, and the number of actors is no part of what a run is.

    Ray's processes listened on all interfaces, and run what they are sent.
    """
    target = tmp_path / "out.jsonl"
    slow_steps(tmp_path, target)
    job = start(source, "-o", target, *FLAGS, "--max-num-seqs", 2, PYTHONPATH=python_path(tmp_path))
    until(lambda: has_rows(target))
    found = addresses(rays.processes())
    assert found
    assert found <= LOOPBACK
    job.kill()
    job.wait()
    require_nothing_left(rays)
    assert start(source, "-o", target, "--ray", "local", "--resume").wait(PATIENCE_SECONDS) == 3
    assert target.read_bytes() == expected


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, "early"])
def test_whatever_ends_a_run_ends_its_ray(rays, start, source, tmp_path, how):
    """Two agents of Ray outlived it by a minute: they waited for the GCS, to tell it of the end of the raylet.

    Ray puts handlers of its own in the place of ours: rows were not flushed, and the exit code was another.
    """
    target = tmp_path / "out.jsonl"
    slow_steps(tmp_path, target)
    job = start(source, "-o", target, *FLAGS, "--max-num-seqs", 2, PYTHONPATH=python_path(tmp_path))
    until(lambda: rays.processes("ray::RuntimeEnvAgent") or job.poll() is not None)
    if how != "early":
        until(lambda: has_rows(target))
    number = signal.SIGTERM if how == "early" else how
    assert rays.processes("ray::")
    job.send_signal(number)
    code = job.wait(PATIENCE_SECONDS)
    require_nothing_left(rays)
    told = (tmp_path / "stderr").read_text()
    if how == "early":
        # Ray wrote a stack of C++, and the exit code was its own.
        assert code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        assert told.count("\n") <= 1
    else:
        assert code == 128 + number
        assert "rerun with --resume to continue" in told


def require_nothing_left(rays):
    """The guard ends last."""
    until(lambda: not any(is_guard(pid) for pid in rays.processes()))
    assert rays.processes() == []


@pytest.mark.thorough
def test_a_node_without_the_model(rays, start, source, tmp_path):
    """On which of many machines it is missing was not said. An error ends Ray, too."""
    job = start(source, "-o", tmp_path / "out.jsonl", *FLAGS, "--tokenizer", tmp_path / "none")
    assert job.wait(PATIENCE_SECONDS) == 2
    require_nothing_left(rays)
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert line.startswith(f"rosebatch: error: {os.uname().nodename}: ")
    assert str(tmp_path / "none") in line


@pytest.mark.thorough
def test_a_place_that_does_not_come(rays, start, source, tmp_path):
    """A cluster that has no GPU yet was waited for without a word."""
    job = start(source, "-o", tmp_path / "out.jsonl", *FLAGS, "--device", "cuda", "--quiet")
    until(lambda: (tmp_path / "stderr").read_text())
    job.terminate()
    job.wait(PATIENCE_SECONDS)
    told = "rosebatch: waiting for Ray to start a worker, which needs 1 GPU, 1 CPU; free in the cluster now: 0 GPU, "
    assert (tmp_path / "stderr").read_text().startswith(told)


def test_ray_is_missing(cli, source, model_folder, tmp_path, monkeypatch):
    """It was a traceback."""
    monkeypatch.setitem(sys.modules, "ray", None)
    result = cli("generate", source, "-o", tmp_path / "out", "--model", model_folder, "--ray", "local")
    require_error(result, 2, "--ray: the package is not installed; pip install 'rosebatch[ray]'\n")


def test_a_strict_check_by_another_machine(cli, source, model_folder, tmp_path):
    """It may not have the input, and its stderr is elsewhere."""
    result = cli("generate", source, "-o", tmp_path / "out", "--model", model_folder, "--ray", "local", "--strict")
    require_error(result, 2, "use rosebatch check")


@pytest.mark.parametrize(
    ("nodes", "workers", "cpus"),
    [([2], 2, 1), ([8, 8], 2, 8), ([8, 4], 4, 2), ([8, 4], 3, 4), ([1], 4, 1), ([], 1, 1), ([64], 3, 21)],
)
def test_cpus_of_each(nodes, workers, cpus):
    """Workers that together fit into the cluster, but one of them into no node, were waited for."""
    assert cpus_of_each(nodes, workers) == cpus


def test_one_line_of_a_reason():
    """Ray tells of a death in ten lines."""
    death = (
        "The actor died unexpectedly.\n\tpid: 1\nThe actor is dead because its worker process has died. Worker exit "
        "type: SYSTEM_ERROR Worker exit detail: The connection ended. End of file. Some common causes include: (1) x"
    )
    assert short_reason(death) == "The connection ended. End of file"
    assert short_reason("\x1b[36mray::A.hear()\x1b[39m\n  File x\nRuntimeError: OutOfMemoryError: much\n") == (
        "RuntimeError: OutOfMemoryError: much"
    )
    assert short_reason("") == "no reason given"
