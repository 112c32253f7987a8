"""How often Python looks for garbage in our processes."""

import gc
import subprocess
import sys

import pytest

from rosebatch import __main__

ASK = "import gc, sys; {start}; sys.stdout.write(str(gc.get_threshold()[0]))"


@pytest.fixture
def threshold():
    before = gc.get_threshold()
    yield gc.get_threshold
    gc.set_threshold(*before)


def test_the_command_line_searches_seldom(threshold, monkeypatch):
    """Python's default took an eighth of the import, and could hold up a step for 80 ms."""
    seen = []
    monkeypatch.setattr("rosebatch.__main__.end_at_once", lambda: None)
    monkeypatch.setattr("rosebatch.host.bytecode.keep_bytecode", lambda: None)
    monkeypatch.setattr("rosebatch.cli.app.run", lambda: seen.append(threshold()))
    before = threshold()
    __main__.run()
    assert seen == [(100_000, *before[1:])]


def test_a_program_that_imports_the_library_keeps_its_own_setting():
    """It is not our process."""
    commands = [
        [sys.executable, "-c", ASK.format(start=start)] for start in ("pass", "import rosebatch; rosebatch.LLM")
    ]
    told = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands}
    assert len(told) == 1
