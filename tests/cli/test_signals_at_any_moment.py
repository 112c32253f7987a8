"""SIGINT and SIGTERM at random moments of the whole command: start, imports, loading, rows, grammars, writing."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.checkout import environment, python_path
from tests.helpers.process_tree import await_start
from tests.helpers.waiting import PATIENCE_SECONDS
from tests.job.fuzz_lines import DEEP, NUMBERS, PATTERNS, SHORT, limit_lines

# SIGINT when a module is looked for.
INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == {!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
"""
FLAGS = ["--device", "cpu", "--quiet", "--temperature", "1", "--max-num-seqs", "8", "--result-column", "out"]
FLAGS += ["--max-tokens", "20", "--grammar-timeout", "0.6"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Values at and past every limit, texts of 10 MB, and grammars that never end, between rows that are served."""
    rng = random.Random(0)
    lines = limit_lines("jsonl", NUMBERS + SHORT + DEEP, 40)
    lines += [json.dumps({"prompt": f"row {i}", "max_tokens": 5 + i * 7 % 50, "id": i}) for i in range(60)]
    lines += [json.dumps({"prompt": character * 9_000_000}) for character in "x é"]
    lines += ["[" * 10_000_000, json.dumps({"prompt": "x", "doc": "y" * 10_000_000})]
    for i in range(10):
        own = {"regex": f"[ab]*a[ab]{{{i % 9}}}"} if i % 5 else {"json": {"minLength": i, **PATTERNS}}
        lines.append(json.dumps({"prompt": f"g {i}", "n": 2, "logprobs": 3, "structured_outputs": own}))
    rng.shuffle(lines)
    path = tmp_path_factory.mktemp("signals") / "in.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def start(source, model_folder):
    """Starts the command as a process."""

    def start(target, *more, **variables):
        command = [sys.executable, "-m", "rosebatch", "generate", source, "-o", target, "--model", model_folder]
        command = [str(part) for part in [*command, *FLAGS, *more]]
        return subprocess.Popen(command, env=environment(**variables), stderr=subprocess.PIPE, text=True)

    return start


def end_at(process, number, moment):
    """Send a signal so many seconds after the start, or after the end; returns the exit code, as shells give it."""
    await_start(process)
    time.sleep(moment)
    process.send_signal(number)
    _, message = process.communicate(timeout=PATIENCE_SECONDS)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    assert "Traceback" not in message, f"after {moment:.2f} s: {message}"
    assert message.count("\n") <= 1, f"after {moment:.2f} s: {message}"
    # 3: the run was over, and some rows have failed.
    assert code in (128 + number, 3), f"after {moment:.2f} s: exit code {code}, {message}"
    return code


@pytest.mark.matrix
@pytest.mark.parametrize("module", ["typer", "torch", "torch.nn", "rosebatch.job.local"])
def test_a_signal_during_the_imports(start, tmp_path, module):
    """SIGINT printed a traceback, or aborted the process, or was lost."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_IMPORT.format(module))
    process = start(tmp_path / "out.jsonl", PYTHONPATH=python_path(tmp_path))
    _, message = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, message) == (-signal.SIGINT, "")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out/"])
def test_signals_at_random_moments(cli, start, source, model_folder, tmp_path, name):
    """What resumed runs write in the end is a whole run's output.

    Which moments come before the end is a matter of chance: test_resume.py requires that a signal ends a run.
    """
    rng = random.Random(name)
    whole, target = tmp_path / "whole" / name, tmp_path / "ended" / name
    whole.parent.mkdir()
    target.parent.mkdir()
    more = ["--rows-per-file", "50"] if name == "out/" else []
    begun = time.monotonic()
    process = start(f"{whole}/" if more else whole, *more)
    await_start(process)
    process.communicate()
    assert process.returncode == 3
    seconds = time.monotonic() - begun
    output = f"{target}/" if more else target
    # Early ones first, while there is work left.
    for moment in sorted(rng.uniform(0, seconds) for _ in range(2)):
        number = rng.choice([signal.SIGINT, signal.SIGTERM])
        if end_at(start(output, *more, "--resume"), number, moment) == 3:
            require_equal(target, whole)
    command = ["generate", source, "-o", output, "--model", model_folder, *FLAGS, *more]
    assert cli(*command, "--resume").code == 3
    require_equal(target, whole)
    assert not list(tmp_path.glob("ended/*.part"))


def require_equal(path, other):
    """Two outputs have the same bytes."""
    assert contents(path) == contents(other)


def contents(path):
    return {each.name: each.read_bytes() for each in path.iterdir()} if path.is_dir() else path.read_bytes()
