"""Bytecode of PyTorch stands in our own cache where the installation has none."""

import compileall
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.helpers.checkout import ROOT, python_path
from tests.helpers.waiting import until

SHOW = "import sys, torch; print(sys.pycache_prefix)"


@pytest.fixture
def start(tmp_path):
    """Runs ``keep_bytecode`` in a process whose PyTorch is a file, then prints the prefix of a child process."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")

    def run(**variables):
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = os.pathsep.join(map(str, (tmp_path / "site", ROOT)))
        env |= {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), **variables}
        code = "from rosebatch.host.bytecode import keep_bytecode; keep_bytecode(); import torch, subprocess, sys;"
        code += f"subprocess.run([sys.executable, '-c', {SHOW!r}], check=True)"
        found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        files = sorted(tmp_path.rglob("torch/**/__init__.*.pyc"))
        return SimpleNamespace(prefix=found.stdout.strip(), files=files, cache=tmp_path / "cache/rosebatch/bytecode")

    return run


def test_python_that_writes_none(start):
    """Images set this variable; each start then compiled all of PyTorch, in child processes too."""
    found = start(PYTHONDONTWRITEBYTECODE="1")
    assert found.prefix == str(found.cache)
    (file,) = found.files
    assert file.is_relative_to(found.cache)
    assert found.cache.stat().st_mode & 0o777 == 0o700


def test_only_the_first_start_has_others_compile(start, tmp_path):
    """What it does not import itself is compiled beside it; later starts find all they need."""
    (tmp_path / "site" / "torch" / "later.py").write_text("")
    cache = start(PYTHONDONTWRITEBYTECODE="1").cache
    if (os.cpu_count() or 1) > 1:
        until(lambda: list(cache.rglob("torch/later.*.pyc")))
    for file in cache.rglob("torch/later.*.pyc"):
        file.unlink()
    start(PYTHONDONTWRITEBYTECODE="1")
    time.sleep(0.5)
    assert not list(cache.rglob("torch/later.*.pyc"))


def test_an_installation_with_bytecode(start, tmp_path):
    """As from most installers: nothing changes, also where Python writes none."""
    compileall.compile_dir(tmp_path / "site", quiet=2)
    for variables in ({}, {"PYTHONDONTWRITEBYTECODE": "1"}):
        found = start(**variables)
        assert found.prefix == "None"
        (file,) = found.files
        assert file.parent.name == "__pycache__"
        assert not found.cache.exists()


def test_an_installation_that_leaves_it_to_the_first_import(start):
    """That import compiled all of PyTorch by itself, one file after the other."""
    found = start()
    assert found.prefix == str(found.cache)
    (file,) = found.files
    assert file.is_relative_to(found.cache)


def test_others_decide(start, tmp_path):
    """A prefix of one's own stays, and the switch leaves Python as it is."""
    other = {"PYTHONPYCACHEPREFIX": str(tmp_path / "own")}
    assert start(PYTHONDONTWRITEBYTECODE="1", **other).prefix == str(tmp_path / "own")
    assert start(PYTHONDONTWRITEBYTECODE="1", ROSEBATCH_BYTECODE_CACHE="0").prefix == "None"


def test_a_cache_that_cannot_be_written(start, tmp_path):
    """The command must run all the same."""
    (tmp_path / "cache").write_text("a file")
    assert start(PYTHONDONTWRITEBYTECODE="1").prefix == "None"


def test_the_command_keeps_it(tmp_path):
    """The call stands before all imports that take long: those of PyTorch, which come later, and of the flags."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    env = os.environ | {"PYTHONPATH": python_path(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*flags):
        command = [sys.executable, "-m", "rosebatch", "cache", *flags]
        options = {"env": env | {"XDG_CACHE_HOME": str(tmp_path)}, "capture_output": True, "text": True}
        return subprocess.run(command, check=True, **options).stdout

    first, second = run(), run()
    assert "Python's bytecode" in second
    cache = tmp_path / "rosebatch" / "bytecode"
    assert cache.is_dir(), first
    assert list(cache.rglob("rosebatch/cli/app.*.pyc"))
    run("--clear")
    assert not cache.exists()
