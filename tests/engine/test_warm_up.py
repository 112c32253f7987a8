"""The kernels of the first steps are compiled all at once, and once on a machine."""

import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("triton")
from rosebatch.engine.triton_runner import warm_up
from tests.helpers.checkout import environment
from tests.kernels.compile_record import FLOOR

SCRIPT = Path(__file__).with_name("warm_up_for_hopper.py")


@pytest.mark.thorough
def test_steps_find_what_warm_up_compiled(tmp_path):
    """A kernel compiled for other arguments than a launch has is compiled once more, while the GPU waits."""
    own = environment(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    names = ["gpt2", "qwen3_moe", "qwen3_next+adapters", "hp1"]
    command = [sys.executable, str(SCRIPT), *names]
    ran = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    *models, together, gluon, beside = [line.split() for line in ran.stdout.splitlines()]
    assert [name for name, *_ in models] == names
    for name, compiled, launched, hits, misses in models:
        # The second model has kernels that the first one loaded: run on tensors that nobody filled, they crashed.
        assert int(launched) == 0, name
        assert int(compiled) >= int(hits) >= 8, name
        assert int(misses) == 0, name
    # Side by side, all kernels would be through with Python's part when the last one is.
    assert together == ["together", "1"]
    # Compiled as one of Triton's, it failed in the thread without a word, and was compiled again at its launch.
    assert gluon == ["gluon", "1", "1", "1"]
    # A launch of another thread is not part of it: without it, an engine that runs meanwhile would compute nonsense.
    assert beside == ["beside", "1"]


@pytest.mark.thorough
@pytest.mark.skipif(not FLOOR.exists(), reason="make installs the oldest Triton")
def test_a_hash_does_not_depend_on_what_was_hashed_before():
    """With Triton 3.6 it does: a second start compiled kernels again, as it hashes in another order than the first."""
    own = environment(TRITON_INTERPRET="0")
    own["PYTHONPATH"] = os.pathsep.join((str(FLOOR), own["PYTHONPATH"]))
    script = Path(__file__).with_name("hashed_callees.py")
    ran = subprocess.run([sys.executable, str(script)], env=own, capture_output=True, text=True, check=False)
    assert ran.stdout.split("\n")[:2] == ["3.6.0 False", "3.6.0 True"], ran.stderr[-3000:]


def test_one_warm_up_for_each_shape(tmp_path, monkeypatch):
    """Every start would warm up again; or a model would be taken for another that was compiled before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(warm_up, "_asking", lambda threads: nullcontext([]))
    warmed_up = []
    for shape in ("a", "b", "a"):
        warm_up.compile_for(lambda shape=shape: warmed_up.append(shape), shape)
    assert warmed_up == ["a", "b"]


def test_a_triton_that_lacks_what_is_taken_over(tmp_path, monkeypatch, capsys):
    """The run ended with an AttributeError, before its first step."""
    from triton.runtime import jit

    warm_up._tell.cache_clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delattr(jit.JITCallable, "parse")
    for _ in range(2):
        assert not warm_up.compile_for(lambda: sys.exit("it would run on nothing"), "a")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rosebatch: warning: with triton ")
    assert line.endswith(
        ", kernels are compiled at their first launch, not before: it has no triton.runtime.jit.JITCallable.parse"
    )
    monkeypatch.undo()
    assert warm_up._lacking() == ""


def test_kernels_that_cannot_be_compiled_ahead(tmp_path, monkeypatch, capsys):
    """Threads failed without a word where Triton's own form had changed."""
    warm_up._tell.cache_clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    bad, good = Future(), Future()
    bad.set_exception(KeyError("signature"))
    good.set_result(None)
    monkeypatch.setattr(warm_up, "_asking", lambda threads: nullcontext([bad, good]))
    found = []
    for _ in range(2):
        found.append(warm_up.compile_for(lambda: found.append("warmed up"), "a"))
    # The launches of the first start have compiled them.
    assert found == ["warmed up", False, True]
    assert "1 of 2 failed (KeyError: 'signature')\n" in capsys.readouterr().err


def test_hashes_are_left_alone_where_they_go_by_no_order(monkeypatch):
    """What an old Triton needs was put into all versions, whatever these have by that name."""
    import triton
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash
    for version, stays in (("3.10.1", True), ("3.9.0+git1", True), ("3.8.2", False)):
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(DependenciesFinder, "_update_hash", lambda self, func: None)
        before = DependenciesFinder._update_hash
        warm_up._hash_callees_first()
        assert (DependenciesFinder._update_hash is before) is stays
        monkeypatch.undo()
    assert DependenciesFinder._update_hash is update


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    """A mark that cannot be written is not a reason to fail."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(warm_up, "_asking", lambda threads: nullcontext([]))
    warmed_up = []
    warm_up.compile_for(lambda: warmed_up.append(1), "a")
    assert warmed_up == [1]


def test_kernels_are_parsed_one_at_a_time(tmp_path, monkeypatch):
    """Until the last is compiled: two at a time were an error in one of some runs, and the start failed with it."""
    from triton.runtime.jit import JITCallable

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm_up, "_asking", lambda threads: nullcontext([]))
    now, limit = [], []

    def parse(self):
        now.append(self)
        limit.append(len(now))
        time.sleep(0.01)
        now.remove(self)

    monkeypatch.setattr(JITCallable, "parse", parse)
    pools = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, count):
            super().__init__(4)
            pools.append(self)

    monkeypatch.setattr(warm_up, "ThreadPoolExecutor", Pool)
    warm_up.compile_for(lambda: [pools[0].submit(lambda: JITCallable.parse(object())) for _ in range(8)], "a")
    assert limit == [1] * 8
    assert JITCallable.parse is parse
