"""``--data-parallel-size``: several processes give the bytes of one, whatever happens to them."""

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.cli.app import main
from rosebatch.job.workers import service
from rosebatch.job.workers.reading import ReadingProcess
from tests.helpers.checkout import environment, python_path
from tests.helpers.command_errors import require_error
from tests.helpers.forked_jobs import ForkedJob, python
from tests.helpers.json_lines import write_lines
from tests.helpers.slow_steps import count_lines, part_of, slow_steps
from tests.helpers.waiting import PATIENCE_SECONDS, until

# Python runs a module of this name at its start. In a worker, one row ends the process.
DEADLY_ROW = """
import os, signal, sys

if "rosebatch.job.workers.child" in sys.orig_argv:
    from rosebatch.io.parse import RowParser

    parse = RowParser.parse

    def parse_or_die(self, record):
        if record.number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return parse(self, record)

    RowParser.parse = parse_or_die
"""


# A worker stops at its start once there is this file. For the parent, time flies then.
HANGING_START = """
import os, signal, sys

if "rosebatch.job.workers.child" in sys.orig_argv and os.path.exists({0!r}):
    signal.pause()
elif "generate" in sys.orig_argv:
    from rosebatch.job.workers.pool import Pool

    require_one = Pool._require_one
    Pool._require_one = lambda self, passed: require_one(self, passed * (1e9 if os.path.exists({0!r}) else 1))
"""


# For the parent, an hour has passed when it is continued.
SUSPENDED_FOR_AN_HOUR = """
import signal, sys, time

if "generate" in sys.orig_argv:
    clock, hours = time.perf_counter, []
    signal.signal(signal.SIGCONT, lambda *_: hours.append(3600.0))
    time.perf_counter = lambda: clock() + sum(hours)
"""


# Notes what the parent imports.
NOTED_IMPORTS = """
import pathlib, sys

class Noted:
    def find_spec(self, name, *_):
        if name.startswith(("torch.", "transformers.", "rosebatch.job.workers.service")):
            with pathlib.Path("imported").open("a") as file:
                file.write(name)

if "generate" in sys.orig_argv:
    sys.meta_path.insert(0, Noted())
"""


def lines(count):
    """Rows of all kinds: greedy, sampled, several completions, a grammar, log-probabilities, bad ones."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"n": 2, "temperature": 1.0},
        {"structured_outputs": {"regex": "[ab]{2,9}"}},
        {"logprobs": 2, "stop": ["e"]},
        {"seed": 5, "temperature": 1.5, "top_k": 20},
    ]
    rows: list[dict[str, Any]] = []
    for index in range(count):
        chance = random.Random(index)
        text = "the same beginning " * (index % 3) + chr(97 + index % 26) * chance.randint(1, 30)
        rows.append({"id": index, "kept": [index], "prompt": text, "max_tokens": chance.randint(1, 60)})
        rows[-1] |= kinds[index % len(kinds)]
    for index, change in ((3, {"prompt": ""}), (7, {"id": 2}), (11, {"temperature": -1})):
        rows[index] |= change
    return rows


def await_rows(job, target, rows=1):
    """Wait until the part file has so many rows: its first line is the manifest."""

    def has_rows():
        assert job.poll() is None
        return count_lines(part_of(target)) > rows

    until(has_rows)


@pytest.fixture
def source(tmp_path):
    """A file of 90 rows."""
    return write_source(tmp_path)


def write_source(folder):
    path = write_lines(folder / "in.jsonl", lines(90))
    path.write_text(path.read_text() + "{broken\n")
    return path


@pytest.fixture
def start(model_folder, tmp_path):
    """Starts ``generate`` on the small model as a process group of its own, stderr in a file; ends what still runs."""
    jobs: list[ForkedJob] = []

    def run(*args, model=model_folder, **variables):
        arguments = ["generate", *map(str, args), "--model", str(model)]
        jobs.append(ForkedJob(arguments, environment(**variables), tmp_path))
        return jobs[-1]

    yield run
    # A test that failed in between: its job would slow or break those behind it.
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


@pytest.fixture(scope="module")
def expected(model_folder, tmp_path_factory):
    """The output of one process, which the tests of a file share."""
    folder = tmp_path_factory.mktemp("expected")
    target = folder / "one.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(write_source(folder)), "-o", str(target), "--model", str(model_folder), "--quiet"])
    assert ended.value.code == 3
    return target.read_bytes()


def children(parent):
    """The worker processes."""
    found = subprocess.run(["ps", "--ppid", str(parent.pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def are_gone(pids):
    """Whether the processes have ended; nobody may have asked yet how."""
    return not any(map(is_alive, pids))


def is_alive(pid):
    """A process that ended has no command line, or no folder."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_stopped(pid):
    """Whether a process waits for SIGCONT."""
    found = subprocess.run(["ps", "-p", str(pid), "-o", "stat="], capture_output=True, text=True, check=False)
    return found.stdout.startswith("T")


@pytest.mark.thorough
def test_two_processes_give_the_bytes_of_one(source, expected, model_folder, tmp_path):
    """Rows come back in any order, from processes with their own random numbers, threads and batches.

    PyTorch in the parent would take seconds and half a gigabyte for nothing.
    """
    report, target = tmp_path / "report.json", tmp_path / "two.jsonl"
    (tmp_path / "sitecustomize.py").write_text(NOTED_IMPORTS)
    command = [sys.executable, "-m", "rosebatch", "generate", source, "-o", target, "--model", model_folder, "-dp", "2"]
    env = environment(PYTHONPATH=python_path(tmp_path))
    assert subprocess.run([*command, "--report", report], env=env, cwd=tmp_path, check=False).returncode == 3
    assert (tmp_path / "imported").read_text() == "rosebatch.job.workers.service"
    assert target.read_bytes() == expected
    found = json.loads(report.read_text())
    assert (found["completed"], found["failed"]) == (87, 4)
    assert [worker["device"] for worker in found["workers"]] == ["CPU 0", "CPU 1"]
    assert sum(worker["requests"] for worker in found["workers"]) == 91
    assert sum(worker["output_tokens"] for worker in found["workers"]) == found["output_tokens"]
    assert found["peak_memory_bytes"]["host"] > 0


@pytest.mark.thorough
def test_a_process_that_reads_for_many(cli, monkeypatch, source, expected, model_folder, tmp_path):
    """With many workers, rows pass through the parent packed: bad ones, repeated ids, the last few of each worker."""
    monkeypatch.setattr(service, "MANY_WORKERS", 2)
    read = []
    whole = ReadingProcess.read
    monkeypatch.setattr(ReadingProcess, "read", lambda self, reader: read.append(reader) or whole(self, reader))
    target = tmp_path / "two.jsonl"
    assert cli("generate", source, "-o", target, "--model", model_folder, "-dp", 2, "--quiet").code == 3
    assert target.read_bytes() == expected
    assert len(read) == 1


@pytest.mark.thorough
def test_workers_that_are_killed(start, source, expected, tmp_path):
    """Their rows were lost, came twice, or came out of order."""
    chance, kills, target = random.Random(1), 0, tmp_path / "out.jsonl"
    part = part_of(target)
    while kills < 4:
        job = start(source, "-o", target, "-dp", 2, "--max-num-seqs", 4, "--worker-timeout", PATIENCE_SECONDS)
        # No more: a worker that dies three times while it loads ends the job. One in three may die then.
        for _ in range(2):
            if chance.random() < 1 / 3:
                time.sleep(chance.uniform(0.5, 3))
            else:
                rows = chance.randrange(1, 80)
                until(lambda job=job, rows=rows: job.poll() is not None or count_lines(part) > rows)
            if (found := children(job)) and job.poll() is None:
                # A job near its end may have ended the worker since it was listed.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(found), signal.SIGKILL)
                    kills += 1
        assert job.wait(PATIENCE_SECONDS) == 3
        assert target.read_bytes() == expected
        target.unlink()


@pytest.mark.thorough
def test_a_parent_that_is_killed_and_continued_by_another_number(start, source, expected, tmp_path):
    """The workers must end with it, and the number of processes is no part of what a run is."""
    target = tmp_path / "out.jsonl"
    for size, rows in ((2, 5), (3, 30), (1, 60)):
        slow_steps(tmp_path, target, rows)
        job = start(
            source, "-o", target, "-dp", size, "--resume", "--max-num-seqs", 2, PYTHONPATH=python_path(tmp_path)
        )
        await_rows(job, target, rows)
        found = children(job)
        job.kill()
        job.wait()
        until(lambda found=found: are_gone(found))
    assert start(source, "-o", target, "-dp", 2, "--resume").wait(PATIENCE_SECONDS) == 3
    assert target.read_bytes() == expected


@pytest.mark.thorough
def test_a_row_that_kills_each_worker(start, source, expected, tmp_path):
    """It becomes an error row. Those beside it must not, and the job must end."""
    target = tmp_path / "out.jsonl"
    (tmp_path / "sitecustomize.py").write_text(DEADLY_ROW)
    job = start(source, "-o", target, "-dp", 2, "--max-num-seqs", 8, PYTHONPATH=python_path(tmp_path))
    assert job.wait(PATIENCE_SECONDS) == 3
    found, others = target.read_text().split("\n"), expected.decode().split("\n")
    error = json.loads(found.pop(20))["error"]
    assert error["code"] == "worker_died" and error["message"].startswith("line 21: ")
    del others[20]
    assert found == others


@pytest.mark.thorough
def test_a_worker_that_would_load_another_model(start, source, expected, model_folder, tmp_path):
    """The folder got other weights while the job ran. The next process loaded them: one output had two models."""
    model = shutil.copytree(model_folder, tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()
    (tmp_path / "other").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    other, own = str(tmp_path / "other"), str(model / "model.safetensors")
    replaced = f"os.path.exists({other!r}) and os.replace({other!r}, {own!r})"
    # Others are done before this one is read: without any, there is no part file.
    late = DEADLY_ROW.replace("== 20", "== 85").replace("os.kill(", f"{replaced}; os.kill(")
    (tmp_path / "sitecustomize.py").write_text(late)
    target = tmp_path / "out.jsonl"
    job = start(source, "-o", target, "-dp", 2, "--max-num-seqs", 2, model=model, PYTHONPATH=python_path(tmp_path))
    assert job.wait(PATIENCE_SECONDS) == 1
    told = (tmp_path / "stderr").read_text()
    # The second worker may still be loading, and finds it by itself.
    found = ("the model's files are not those that the run began with", "the model's files changed while they were")
    assert any(each in told for each in found), told
    part = target.with_name("out.jsonl.part")
    assert not target.exists() and part.exists()
    # With the weights of before, the run goes on.
    (model / "model.safetensors").write_bytes(weights)
    (tmp_path / "sitecustomize.py").unlink()
    assert start(source, "-o", target, "--resume", model=model).wait(PATIENCE_SECONDS) == 3
    assert target.read_bytes() == expected


@pytest.mark.thorough
def test_a_worker_that_hangs(start, source, expected, tmp_path):
    """It sends nothing and does not end: without a limit the job would wait for ever."""
    target = tmp_path / "out.jsonl"
    gate = slow_steps(tmp_path, target)
    flags = ("-dp", 2, "--max-num-seqs", 2, "--worker-timeout", 20)
    job = start(source, "-o", target, *flags, PYTHONPATH=python_path(tmp_path))
    await_rows(job, target)
    # One of them may have no rows.
    for pid in children(job):
        os.kill(pid, signal.SIGSTOP)
    gate.unlink()
    assert job.wait(PATIENCE_SECONDS) == 3
    assert target.read_bytes() == expected
    assert "no sign of life for " in (tmp_path / "stderr").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("whole", [True, False])
def test_a_run_that_is_suspended(start, source, expected, tmp_path, whole):
    """For longer than its workers may be silent, by Ctrl-Z or by Slurm: they were ended as workers that hang.

    Or the parent alone is stopped, as by a debugger, while its workers go on.
    """
    target = tmp_path / "out.jsonl"
    gate = slow_steps(tmp_path, target, code=SUSPENDED_FOR_AN_HOUR)
    flags = ("-dp", 2, "--max-num-seqs", 2, "--worker-timeout", 3000)
    job = start(source, "-o", target, *flags, PYTHONPATH=python_path(tmp_path))
    send = os.killpg if whole else os.kill
    for rows in (1, 30):
        gate.write_text(str(rows))
        await_rows(job, target, rows)
        send(job.pid, signal.SIGSTOP)
        until(lambda: is_stopped(job.pid))
        send(job.pid, signal.SIGCONT)
    gate.unlink()
    assert job.wait(PATIENCE_SECONDS) == 3
    assert target.read_bytes() == expected
    assert "died" not in (tmp_path / "stderr").read_text()


@pytest.mark.thorough
def test_nobody_comes_back(start, source, expected, tmp_path):
    """The process in the place of the only worker hung at its start: the run waited for ever."""
    target, hangs = tmp_path / "out.jsonl", tmp_path / "hangs"
    gate = slow_steps(tmp_path, target, code=HANGING_START.format(str(hangs)))
    flags = ("-o", target, "-dp", "auto", "--max-num-seqs", 2, "--device", "cpu")
    job = start(source, *flags, PYTHONPATH=python_path(tmp_path))
    await_rows(job, target)
    gate.unlink()
    hangs.touch()
    for pid in children(job):
        os.kill(pid, signal.SIGKILL)
    assert job.wait(PATIENCE_SECONDS) == 1
    last = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert last.startswith("rosebatch: error: no worker is left: none has come back within ")
    assert last.endswith("rerun with --resume to continue")
    hangs.unlink()
    assert start(source, *flags, "--resume").wait(PATIENCE_SECONDS) == 3
    assert target.read_bytes() == expected


@pytest.mark.thorough
def test_a_stream_comes_in_order(start, source, expected, model_folder, tmp_path):
    """Rows of two processes finish in any order, and stdin can be read once."""
    with source.open("rb") as stdin, (tmp_path / "out").open("wb") as stdout:
        command = [python(), "-m", "rosebatch", "generate", "-", "--model", str(model_folder), "-dp", "2", "-q"]
        done = subprocess.run(command, stdin=stdin, stdout=stdout, env=environment(), check=False)
    assert done.returncode == 3
    assert (tmp_path / "out").read_bytes() == expected


@pytest.mark.thorough
def test_columns_of_a_table(start, cli, model_folder, tmp_path):
    """Rows of Parquet are values, not lines: dates and bytes have to reach another process and come back."""
    table = pa.table(
        {
            "prompt": [f"row {i}" for i in range(40)],
            "max_tokens": pa.array([i % 9 + 1 for i in range(40)]),
            "when": pa.array([i * 86_400_000 for i in range(40)], pa.timestamp("ms")),
            "raw": pa.array([bytes([i]) for i in range(40)]),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    common = ["--result-column", "answer"]
    one = cli("generate", tmp_path / "in.parquet", "-o", tmp_path / "one.parquet", "--model", model_folder, *common)
    assert one.code == 0
    assert start(tmp_path / "in.parquet", "-o", tmp_path / "two.parquet", "-dp", 2, *common).wait(PATIENCE_SECONDS) == 0
    assert (tmp_path / "two.parquet").read_bytes() == (tmp_path / "one.parquet").read_bytes()


@pytest.mark.thorough
def test_a_signal_ends_all(start, source, tmp_path):
    """Ctrl-C reaches the workers too: they must not die before the parent has their rows, nor outlive it."""
    target = tmp_path / "out.jsonl"
    slow_steps(tmp_path, target)
    job = start(source, "-o", target, "-dp", 2, "--max-num-seqs", 2, PYTHONPATH=python_path(tmp_path))
    await_rows(job, target)
    found = children(job)
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(PATIENCE_SECONDS) == 130
    assert "rerun with --resume to continue" in (tmp_path / "stderr").read_text()
    until(lambda: are_gone(found))


def test_settings_that_are_impossible(cli, toy_toml, tmp_path):
    """They were an error of a worker, or of none."""
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [1]}\n')
    command = ["generate", tmp_path / "in.jsonl", "--model", toy_toml, "--load-format", "dummy", "--device", "cpu"]
    for value in (0, "none", 1.5):
        require_error(cli(*command, "-dp", value), 2)


@pytest.mark.thorough
def test_a_file_that_is_missing_in_a_worker(cli, toy_toml, tmp_path):
    """It was an error of a worker, or of none."""
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [1]}\n')
    command = ["generate", tmp_path / "in.jsonl", "--model", toy_toml, "--load-format", "dummy", "--device", "cpu"]
    require_error(cli(*command, "-dp", 2, "--chat-template", tmp_path / "none"), 2, f"{tmp_path / 'none'}: ")


@pytest.mark.thorough
def test_strict_names_all_bad_rows(cli, model_folder, tmp_path):
    """The worker that was ready first wrote them to its own stderr. Only the first worker's is seen by anybody."""
    write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b", "top_p": 5}, {"prompt": ""}])
    command = ["generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--model", model_folder, "--strict"]
    one, two = cli(*command, "--quiet"), cli(*command, "--quiet", "-dp", 2)
    assert one.err.startswith("line 2: invalid_sampling: top_p must be in (0, 1], got 5.0\nline 3: empty_prompt")
    assert (two.code, two.err) == (one.code, one.err)


@pytest.mark.thorough
def test_compressed_files_and_named_columns(start, cli, model_folder, tmp_path):
    """Rows of a CSV file and names of columns reach the workers, and the process that reads for many of them."""
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [{"q": f"line {i}", "max_tokens": i % 9 + 1, "key": f"l{i}"} for i in range(40)]
    lines = write_lines(tmp_path / "1.jsonl", rows).read_bytes()
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(lines))
    cells = "".join(f"row {i},{i % 9 + 1},c{i}\n" for i in range(40))
    (folder / "2.csv").write_text("q,max_tokens,key\n" + cells)
    common = ["--prompt-column", "q", "--id-column", "key", "--columns", "key", "--strict"]
    one = cli("generate", folder, "-o", tmp_path / "one.jsonl.gz", "--model", model_folder, *common)
    assert one.code == 0
    assert start(folder, "-o", tmp_path / "two.jsonl.gz", "-dp", 2, *common).wait(PATIENCE_SECONDS) == 0
    assert (tmp_path / "two.jsonl.gz").read_bytes() == (tmp_path / "one.jsonl.gz").read_bytes()
    rows = [json.loads(row) for row in gzip.decompress((tmp_path / "two.jsonl.gz").read_bytes()).splitlines()]
    assert [row["key"] for row in rows] == [f"l{i}" for i in range(40)] + [f"c{i}" for i in range(40)]
    assert list(rows[0]) == ["key", "index", "text", "finish_reason", "usage"]
