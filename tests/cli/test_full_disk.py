"""A disk without room, or a signal, where results are written: one line, an exit code, and nothing half.

The line names the file and the way out, and the run can be resumed.
"""

import json
import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.failed_write import failed_write
from rosebatch.io.output import StreamOutput
from tests.helpers.command_errors import require_error
from tests.helpers.json_lines import write_lines

FULL = "No space left on device"
ROWS = [{"prompt_token_ids": [1, 2, 3], "max_tokens": 2, "note": "x" * 3000}, {"id": 1}]


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "in.jsonl", ROWS)


@contextmanager
def limited(size):
    """No file may grow further than so many bytes. Python gets an error as of a full disk, and no signal.

    Not a fixture: pytest writes a test's result before it leaves them, maybe to a longer file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def handlers():
    """What signals do, as it was before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_streams(toy, source, tmp_path):
    """``[Errno 28]`` and no name; with errors on a full stream, the output was blamed."""
    way_out = "choose another place, such as -o FILE, which --resume can continue"
    require_error(toy(source, "-o", "/dev/full"), 1, f"/dev/full: {FULL}; {way_out}")
    require_error(toy(source, "-o", "/dev/null", "--errors", "/dev/full"), 1, f"/dev/full: {FULL}; {way_out}")
    kept = f"2 rows are saved in {tmp_path}/out.jsonl.part; rerun with --resume to continue"
    found = toy(source, "-o", tmp_path / "out.jsonl", "--errors", "/dev/full")
    require_error(found, 1, f"/dev/full: {FULL}: {kept}")
    assert toy(source, "-o", tmp_path / "out.jsonl", "--errors", "/dev/null", "--resume").code == 3
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 1


def test_a_report(toy, source, tmp_path):
    """Half a report stayed, and nothing said that the results are there."""
    report = tmp_path / "report.json"
    write_lines(source, [{"prompt_token_ids": [1, 2, 3], "max_tokens": 2}])
    with limited(2000):
        found = toy(source, "-o", "/dev/null", "--report", report)
    require_error(found, 1, f"{report}: File too large; only this report is missing")
    assert not report.exists()


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "answers/"])
def test_the_output_of_a_run_whose_rows_are_done(toy, source, tmp_path, name):
    """The run that resumes loads no model, and ended with the exit code of a wrong command."""
    part = tmp_path / f"{name.rstrip('/')}.part"
    before = os.fsync

    def full(descriptor):
        if ".tmp" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(28, FULL)
        before(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for resume in ([], ["--resume"]):
            found = toy(source, "-o", f"{tmp_path}/{name}", *resume)
            kept = f"2 rows are saved in {part}; rerun with --resume to continue"
            require_error(found, 1, f"{tmp_path}/{name.rstrip('/')}: {FULL}: {kept}")
            assert [each.name for each in tmp_path.iterdir() if ".tmp" in each.name] == []
    assert toy(source, "-o", f"{tmp_path}/{name}", "--resume").code == 3
    assert not part.exists()


def test_the_manifest_and_a_merge(toy, cli, source, tmp_path, monkeypatch):
    """A merge said nothing of a way out, and its exit code was that of a missing shard."""
    target, before = tmp_path / "out.jsonl", os.fsync
    for shard in ("1/2", "2/2"):
        toy(source, "-o", target, "--shard", shard)
    for blocked, told in ((target, ""), (tmp_path / ".out.jsonl.run", f": {target} is whole, but not yet marked so")):
        name = f".{target.name}.tmp" if told else f"{target.name}.tmp"

        def full(descriptor, name=name):
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith(f"/{name}"):
                raise OSError(28, FULL)
            before(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        require_error(cli("merge", source, "-o", target), 1, f"{blocked}: {FULL}{told}; repeat the merge")
        monkeypatch.setattr(os, "fsync", before)
    assert cli("merge", source, "-o", target).code == 3
    assert [json.loads(line)["index"] for line in target.read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.usefixtures("handlers")
def test_a_merge_that_is_asked_to_end(toy, cli, source, tmp_path, monkeypatch, number, code):
    """The system ended it, which left half an output and no line."""
    toy(source, "-o", tmp_path / "out.jsonl", "--shard", "1/1")
    before = sorted(each.name for each in tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", lambda descriptor: signal.raise_signal(number))
    found = cli("merge", source, "-o", tmp_path / "out.jsonl")
    require_error(found, code, "interrupted" if number == signal.SIGINT else "ended by SIGTERM")
    assert sorted(each.name for each in tmp_path.iterdir()) == before


def test_a_reader_that_goes_away_is_no_full_disk():
    """``| head`` ends a run without a word."""

    class Gone:
        def write(self, line):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        StreamOutput(Gone()).add(0, {}, failed=False)
    assert isinstance(failed_write(Gone(), OSError(28, FULL)), UserError)
