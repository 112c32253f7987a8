"""The kernels of the first steps are compiled all at once, and once on a machine."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from triton import knobs
from triton.runtime.jit import JITCallable

from rosebatch.engine.triton_runner import first_kernels

SCRIPT = Path(__file__).with_name("rehearse_for_hopper.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.thorough
def test_steps_find_what_a_rehearsal_compiled(tmp_path):
    """A kernel compiled for other arguments than a launch has is compiled once more, while the GPU waits."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), "gpt2", "qwen3_moe", "qwen3_next"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    *models, together, beside = [line.split() for line in ran.stdout.splitlines()]
    assert [name for name, *_ in models] == ["gpt2", "qwen3_moe", "qwen3_next"]
    for name, compiled, launched, hits, misses in models:
        # The second model has kernels that the first one loaded: run on tensors that nobody filled, they crashed.
        assert int(launched) == 0, name
        assert int(compiled) >= int(hits) >= 8, name
        assert int(misses) == 0, name
    # Side by side, all kernels would be through with Python's part when the last one is.
    assert together == ["together", "1"]
    # A launch of another thread is no rehearsal: left out, an engine that runs beside would compute nonsense.
    assert beside == ["beside", "1"]


@pytest.fixture
def asks(tmp_path, monkeypatch):
    """Rehearsals that ask for these calls, by their keys."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    calls = {}

    @contextmanager
    def asking(threads, asked):
        yield
        asked.update({("kernel", key): threads.submit(call) for key, call in calls.items()})

    monkeypatch.setattr(first_kernels, "_asking", asking)
    return calls


def launch(key):
    """What Triton does when a kernel is not loaded: False lets it go on."""
    return knobs.runtime.jit_cache_hook(key=key, fn=SimpleNamespace(name="kernel"), compile={})


def test_one_rehearsal_for_each_shape(asks):
    """Every start would rehearse again; or a model would be taken for another that was compiled before."""
    rehearsed = []
    for shape in ("a", "b", "a"):
        first_kernels.compile_first(lambda shape=shape: rehearsed.append(shape), shape)()
    assert rehearsed == ["a", "b"]


def test_a_cache_that_cannot_be_written(tmp_path, asks, monkeypatch):
    """The mark of a rehearsal is no reason to fail."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    rehearsed = []
    first_kernels.compile_first(lambda: rehearsed.append(1), "a")()
    assert rehearsed == [1]


def test_kernels_are_parsed_one_at_a_time(asks, monkeypatch):
    """Until the last is compiled: two at a time were an error in one of some runs, and the start failed with it."""
    now, most = [], []

    def parse(self):
        now.append(self)
        most.append(len(now))
        time.sleep(0.01)
        now.remove(self)

    monkeypatch.setattr(JITCallable, "parse", parse)
    monkeypatch.setattr(first_kernels.os, "cpu_count", lambda: 4)
    asks.update({str(number): lambda: JITCallable.parse(object()) for number in range(8)})
    wait = first_kernels.compile_first(lambda: None, "a")
    JITCallable.parse(object())
    wait()
    assert most == [1] * 9
    assert JITCallable.parse is parse


def test_a_launch_waits_for_its_own_kernel(asks, monkeypatch):
    """A start of 8 s spent five on 36 kernels, most of which its first steps did not need."""
    monkeypatch.setattr(first_kernels.os, "cpu_count", lambda: 1)
    begun, compiles, compiled = Event(), Event(), []
    asks["early"] = lambda: begun.set() or (compiles.wait() and compiled.append("early"))
    asks["late"] = lambda: compiled.append("late")
    before = knobs.runtime.jit_cache_hook
    wait = first_kernels.compile_first(lambda: None, "a")
    begun.wait(20)
    # Nobody was asked for the first; no thread has begun the second, so the launch compiles it.
    assert launch("unknown") is False
    assert launch("late") is False
    assert not compiled
    with ThreadPoolExecutor(1) as other:
        launched = other.submit(launch, "early")
        with pytest.raises(TimeoutError):
            launched.result(timeout=0.05)
        compiles.set()
        assert launched.result(timeout=20) is False
    assert compiled == ["early"]
    wait()
    assert knobs.runtime.jit_cache_hook is before


def test_a_kernel_that_cannot_be_compiled(asks):
    """The launch says why."""
    asks["broken"] = lambda: 1 / 0
    wait = first_kernels.compile_first(lambda: None, "a")
    assert launch("broken") is False
    wait()


def test_a_rehearsal_that_fails(asks):
    """It must leave nothing behind: later launches would wait, and later starts would take it for done."""
    before = knobs.runtime.jit_cache_hook, JITCallable.parse
    with pytest.raises(ZeroDivisionError):
        first_kernels.compile_first(lambda: 1 / 0, "a")
    assert (knobs.runtime.jit_cache_hook, JITCallable.parse) == before
    rehearsed = []
    first_kernels.compile_first(lambda: rehearsed.append(1), "a")()
    assert rehearsed == [1]
