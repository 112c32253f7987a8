"""A run that is killed and resumed ends like one that was never killed."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rosebatch.io.part_file import PartFile
from tests.job import killable_job

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    """Rows of all kinds and lengths: they finish in another order than they began."""
    rng = random.Random(0)
    lines = [
        {
            "prompt": f"row {i % 50} of line {i}",
            "max_tokens": rng.randint(1, 60),
            "temperature": i % 2,
            "id": f"id {i}",
            "i": [i],
        }
        for i in range(400)
    ]
    for i in range(0, 400, 10):
        lines[i + 3] |= {"n": 2 + i % 3, "logprobs": 1, "max_tokens": rng.randint(1, 15)}
        lines[i + 6] |= {"structured_outputs": {"regex": "[0-9]{1,9}(é|!)"}, "n": 1 + i % 2}
    lines[7], lines[8] = {"prompt": ""}, {"prompt": "x of line 8", "id": "id 3"}
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    return path


@pytest.fixture(scope="module")
def processes():
    """Forks of one process that has imported everything: they start at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.job.killable_job", "llguidance.numpy"])
    return context


@pytest.mark.parametrize("most_kills", [5, pytest.param(50, marks=pytest.mark.thorough)])
def test_killed_many_times(processes, source, tmp_path, most_kills):
    """Killed at random moments, from before the first row to the final rename, the output has the same bytes."""
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"

    def run(path, seconds=None):
        """Runs to the end or until killed; returns whether it reached the end."""
        job = processes.Process(target=killable_job.main, args=(str(source), str(path), 0.0005))
        job.start()
        job.join(seconds)
        killed = job.is_alive()
        job.kill()
        job.join()
        assert killed or job.exitcode == 0
        return not killed

    assert run(whole)
    assert whole.read_bytes().count(b"\n") == 401
    rng, kills, rounds, sizes = random.Random(1), 0, 0, set()
    while kills < most_kills or not rounds:
        if not run(target, rng.uniform(0.0, 0.4)):
            kills += 1
            sizes.add(part.stat().st_size if part.exists() else 0)
            assert not target.exists() or target.read_bytes() == whole.read_bytes()
            continue
        rounds += 1
        assert target.read_bytes() == whole.read_bytes()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "whole.jsonl"]
        target.unlink()
    assert len(sizes) > most_kills // 4, "it was killed at many different moments"


def test_a_disk_that_fills_up(processes, source, tmp_path):
    """At any byte of the part file the error is clear and no result is lost."""
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"

    def run(path, most_bytes):
        """Returns the error, or None if the job reached its end. The system refuses to let any file grow further."""
        receiver, sender = processes.Pipe(duplex=False)
        job = processes.Process(target=killable_job.with_full_disk, args=(str(source), str(path), most_bytes, sender))
        job.start()
        sender.close()
        job.join()
        assert job.exitcode == 0
        return receiver.recv()

    assert run(whole, 2**30) is None
    rng, most = random.Random(2), whole.stat().st_size
    kept = 0
    for share in (0.1, 0.3, 0.6, 0.95):
        limit = int(most * share) + rng.randrange(100)
        assert "File too large; earlier rows are saved; rerun with --resume to continue" in run(target, limit)
        assert not target.exists()
        assert kept < part.stat().st_size <= limit
        kept = part.stat().st_size
    assert run(target, 2**30) is None
    assert target.read_bytes() == whole.read_bytes()


def test_a_resumed_run_computes_only_what_is_missing(job, source, tmp_path, fake_model):
    """Finished rows, error rows included, must not be tokenized or generated again."""

    class StopError(Exception):
        """Ends the first run."""

    steps, begun = 0, set()

    def before_step(plan):
        nonlocal steps
        steps += 1
        begun.update(int(bytes(spec.prompt_token_ids).split()[-1]) for spec in plan.started)
        if steps == 300:
            raise StopError

    def run():
        begun.clear()
        model = fake_model(before_step=before_step)
        return job.run_file(source, tmp_path / "out.jsonl", model=model, limits={"seqs": 8}, resume=True)

    with pytest.raises(StopError):
        run()
    part = PartFile.reopen(tmp_path / "out.jsonl.part")
    done = {index for index in range(401) if index in part}
    part.close()
    result, _ = run()
    assert 50 < len(done) < 350
    assert begun.isdisjoint(done)
    assert result.report["resumed"] == len(done)
    assert result.report["completed"] + result.report["failed"] == 401 - len(done)
    assert result.num_failed == 3
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 401


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_file(tmp_path):
    """With twenty times the rows, reader, ids, waiting results and report must take the same memory."""
    peaks = []
    for rows in (2_000, 40_000):
        source = tmp_path / f"{rows}.jsonl"
        lines = (f'{{"prompt":"row {i % 100}","max_tokens":2,"id":"id {i}"}}\n' for i in range(rows))
        source.write_text("".join(lines))
        command = [sys.executable, "-m", "tests.job.killable_job", str(source), str(tmp_path / "out.jsonl")]
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        job = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT)
        _, status, usage = os.wait4(job.pid, 0)
        job.returncode = status
        assert status == 0
        peaks.append(usage.ru_maxrss)
        assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == rows
    # In KiB.
    assert peaks[1] < peaks[0] + 10 * 1024
