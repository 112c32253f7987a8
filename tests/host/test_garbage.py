"""How often Python looks for garbage in our processes."""

import gc
import subprocess
import sys

import pytest

from rosebatch import LLM, __main__
from rosebatch.host.garbage import searched_rarely
from tests.job.fake_model import FakeModel, launch_fake, make_engine

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


def test_prompts_are_taken_in_and_served_with_few_searches(threshold):
    """A search looks at each token id of all prompts so far: they took 15 % of the host's time for 1,300 ids a row."""
    seen = []
    llm = LLM.of(launch_fake(make_engine(FakeModel(before_step=lambda _: seen.append(threshold()))), None))

    class Prompts(list):
        def __iter__(self):
            seen.append(threshold())
            return super().__iter__()

    before = threshold()
    llm.generate(Prompts([[5, 6], [7]]))
    assert set(seen) == {(50_000, *before[1:])}
    assert threshold() == before


def test_of_two_calls_the_later_one_brings_back_what_was_before_both(threshold):
    """Calls of two threads overlap: the second one kept the setting of the first for ever."""
    before, first, second = threshold(), searched_rarely(), searched_rarely()
    with first:
        second.__enter__()
    assert threshold()[0] == 50_000
    second.__exit__(None, None, None)
    assert threshold() == before


def test_a_program_without_searches_has_none_in_calls(threshold):
    """Each call began them again, for its time."""
    gc.set_threshold(0)
    with searched_rarely():
        assert threshold()[0] == 0
