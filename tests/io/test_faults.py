"""Every call to the system may fail, or be the last one: a resumed run ends like one without a break."""

import errno
import os
import random
import signal
from functools import partial

import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.output import FileOutput
from rosebatch.io.parquet import write_parquet_parts
from rosebatch.io.part_file import PartFile
from rosebatch.io.placement import Placement, replace_folder, write_jsonl
from tests.helpers.faults import CALLS, Faults, call_with_faults
from tests.helpers.forks import FORKS

ROWS = 24


def compute(index):
    """What a model would: the row depends on nothing but its index."""
    failed = index % 5 == 3
    row = {"index": index, "text": "é" * random.Random(index).randrange(40)}
    return ({**row, "error": {"code": "x", "message": "y"}} if failed else row), failed


def open_jsonl(path, part):
    """A file, and one for error rows."""
    return FileOutput(part, Placement(path, write_jsonl, errors=path.with_name("errors.jsonl")))


def open_folder(path, part):
    """A folder of files with five rows each."""
    return FileOutput(part, Placement(path, partial(write_parquet_parts, rows_per_file=5), place=replace_folder))


OUTPUTS = {"out.jsonl": open_jsonl, "answers": open_folder}


def run(path):
    """The whole run; it resumes where it can."""
    part_path = path.with_name(path.name + ".part")
    part = PartFile.reopen(part_path) or PartFile.create(part_path, lambda: {"created": 1})
    output = OUTPUTS[path.name](path, part)
    try:
        for number in range(ROWS):
            index = number * 5 % ROWS
            if index not in output:
                row, failed = compute(index)
                output.add(index, row, failed=failed)
            if number % 3 == 0:
                output.flush()
            if number % 4 == 0:
                part.sync()
        output.finish()
    finally:
        output.close()


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def start(tmp_path):
    """Makes a folder that has an older output, and returns the path of the new one."""

    def make(name):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        if name == "answers":
            (folder / name).mkdir()
            (folder / name / "part-00000.parquet").write_bytes(b"old")
        else:
            (folder / name).write_bytes(b"old")
        return folder / name

    return make


@pytest.fixture
def calls(start):
    """How often a run makes calls of a kind."""

    def count(name, kind):
        faults = Faults(kind, -1, None)
        call_with_faults(faults, run, start(name))
        return faults.count

    return count


@pytest.mark.matrix
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_calls_that_fail(start, calls, monkeypatch, name, kind, error):
    """It ends the run with one clear error, and costs no row. An old file stays until the new one is whole."""
    whole = start(name)
    run(whole)
    expected = contents(whole.parent)
    for number in range(calls(name, kind)):
        path = start(name)
        faults = Faults(kind, number, error)
        with monkeypatch.context() as patch:
            faults.install(patch)
            # Some failures cost nothing, such as one of cleaning up.
            try:
                run(path)
            except UserError as failure:
                assert os.strerror(error) in str(failure)
        assert faults.count > number, "the fault was met"
        assert name == "answers" or path.read_bytes() in (b"old", expected[name])
        run(path)
        assert contents(path.parent) == expected


@pytest.mark.thorough
@pytest.mark.matrix
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("kind", CALLS)
def test_calls_that_are_the_last(start, calls, name, kind):
    """The same for SIGKILL."""
    whole = start(name)
    run(whole)
    expected = contents(whole.parent)
    for number in range(calls(name, kind)):
        path = start(name)
        job = FORKS.Process(target=call_with_faults, args=(Faults(kind, number, None), run, path))
        job.start()
        job.join()
        assert job.exitcode == -signal.SIGKILL
        run(path)
        assert contents(path.parent) == expected
