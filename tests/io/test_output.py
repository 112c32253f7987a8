"""Results as files: whole under their name or absent, and no result lost on the way."""

import contextlib
import datetime
import errno
import io
import json
import os
import stat
from decimal import Decimal
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError, UserError
from rosebatch.io.output import FileOutput, StreamOutput
from rosebatch.io.parquet import write_parquet, write_parquet_parts
from rosebatch.io.part_file import PartFile
from rosebatch.io.placement import Placement, replace_file, replace_folder, require_parts, write_jsonl


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


def add(output, *indices):
    for index in indices:
        output.add(index, {"index": index}, failed=False)


def finish(output, *indices):
    add(output, *indices)
    output.finish()


def fail_fsync(monkeypatch, name):
    """The disk is full once a file of this name is brought to it."""
    real = os.fsync

    def full(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").resolve().name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)


def fail_rename(patch, name, error):
    rename = Path.rename

    def fails(path, to):
        if path.name == name:
            raise error
        return rename(path, to)

    patch.setattr(Path, "rename", fails)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def indices(folder):
    return [index for path in sorted(folder.iterdir()) for index in pq.read_table(path).column("index").to_pylist()]


def test_jsonl_rows(write_jsonl_rows):
    """Values and the order of fields come out as they went in."""
    rows = [
        {"id": 123456789012345678901234567890, "text": "é\U0001f600\x00\n", "index": 0},
        {"nested": {"a": [1, None, 2.5]}, "text": None, "index": 1},
        {"deep": nested(500), "index": 2},
    ]
    assert write_jsonl_rows(rows) == rows
    assert [list(row) for row in write_jsonl_rows(rows)] == [list(row) for row in rows]


def test_jsonl_of_values_that_only_parquet_has(write_jsonl_rows):
    """Dates, decimals and bytes of a Parquet input have no JSON type: writing them must not fail."""
    carried = {
        "day": datetime.date(2024, 2, 29),
        "when": datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC),
        "price": Decimal("1.50"),
        "raw": b"\xff\x00",
        "map": [("a", 1)],
        "nan": float("nan"),
    }
    written = {"day": "2024-02-29", "when": "2024-02-29T12:00:00Z", "price": "1.50", "raw": "/wA="}
    assert write_jsonl_rows([carried]) == [{**written, "map": [["a", 1]], "nan": None}]


def test_a_file_appears_whole_under_its_name(tmp_path, open_jsonl):
    """A killed run must not leave half a file that looks like a result."""
    path = tmp_path / "out.jsonl"
    path.write_text("the result of an earlier run\n")
    output = open_jsonl()
    add(output, 1, 0)
    output.flush()
    assert path.read_text() == "the result of an earlier run\n"
    assert names(tmp_path) == ["out.jsonl", "out.jsonl.part"]
    output.finish()
    output.close()
    assert path.read_text() == '{"index":0}\n{"index":1}\n'
    assert names(tmp_path) == ["out.jsonl"]


def test_a_stream_gets_rows_in_order(monkeypatch):
    """Each row is flushed as soon as all rows before it are; the stream stays open."""
    raw = io.BytesIO()
    output = StreamOutput(io.BufferedWriter(raw))
    add(output, 1)
    output.flush()
    assert raw.getvalue() == b""
    add(output, 0, 3)
    output.flush()
    assert raw.getvalue() == b'{"index":0}\n{"index":1}\n'
    add(output, 2)
    output.finish()
    output.close()
    assert raw.getvalue() == b"".join(b'{"index":%d}\n' % i for i in range(4))


def test_a_stream_holds_back_a_bounded_number_of_bytes():
    """It counted rows: 4,096 of them with log-probabilities are gigabytes."""
    output = StreamOutput(io.BytesIO())
    for index in range(1, 17):
        output.add(index, {"text": "x" * 5_000_000}, failed=False)
        assert output.full == (index > 13)
    output.add(0, {}, failed=False)
    assert not output.full


def test_given_up_a_file_keeps_its_results(tmp_path, open_jsonl):
    """An error must not destroy hours of results; a part file without rows is deleted."""
    for name, rows in (("some.jsonl", [0, 2]), ("none.jsonl", [])):
        output = open_jsonl(name)
        add(output, *rows)
        output.flush()
        output.close()
    assert names(tmp_path) == ["some.jsonl.part"]
    output = open_jsonl("some.jsonl", resume=True)
    assert [index in output for index in range(4)] == [True, False, True, False]
    assert output.kept == f": 2 rows are saved in {tmp_path / 'some.jsonl.part'}; rerun with --resume to continue"
    finish(output, 1)
    assert (tmp_path / "some.jsonl").read_text() == '{"index":0}\n{"index":1}\n{"index":2}\n'


def test_permissions_are_the_users(tmp_path, open_jsonl):
    """The output must not get a temporary file's mode 0600."""
    open_jsonl().finish()
    (tmp_path / "plain").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("out.jsonl", "plain")]
    assert modes[0] == modes[1]


def test_a_disk_that_is_full_at_the_end(tmp_path, open_jsonl, monkeypatch):
    """Without room for the finished file, the results stay in the part file and no half file is left."""
    output = open_jsonl()
    add(output, 0, 1)
    fail_fsync(monkeypatch, "out.jsonl.tmp")
    with pytest.raises(UserError, match=r"No space left on device: 2 rows are saved in .*; rerun with --resume"):
        output.finish()
    output.close()
    assert names(tmp_path) == ["out.jsonl.part"]
    monkeypatch.undo()
    open_jsonl(resume=True).finish()
    assert (tmp_path / "out.jsonl").read_text() == '{"index":0}\n{"index":1}\n'


def test_a_folder_appears_whole_in_the_place_of_another(tmp_path, open_parts):
    """Parts of two runs in one folder would read as one table; the old parts must stay until the new ones are whole."""
    for rows in (range(7), range(3)):
        output = open_parts()
        add(output, *rows)
        output.flush()
        before = indices(tmp_path / "answers") if (tmp_path / "answers").exists() else None
        assert before == (None if len(rows) == 7 else list(range(7)))
        output.finish()
        output.close()
        assert (indices(tmp_path / "answers"), names(tmp_path)) == (list(rows), ["answers"])
    assert names(tmp_path / "answers") == ["part-00000.parquet", "part-00001.parquet"]


def test_every_part_is_on_the_disk_before_the_folder_is_there(tmp_path, open_parts, monkeypatch):
    """A power cut must not leave a folder of empty files under the final name."""
    calls = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(Path(f"/proc/self/fd/{fd}").resolve().name), sync(fd)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (calls.append(f"{path.name} -> {to.name}"), rename(path, to)))
    finish(open_parts(), 0, 1, 2)
    made = calls[calls.index("answers.part") + 1 : calls.index("answers.tmp -> answers")]
    assert (sorted(made[:-1]), made[-1]) == (["part-00000.parquet", "part-00001.parquet"], "answers.tmp")


def test_a_folder_on_a_disk_that_is_full(tmp_path, open_parts, monkeypatch):
    """The old folder stays, and no half folder is left."""
    finish(open_parts(), 0)
    output = open_parts()
    add(output, 0, 1, 2)
    fail_fsync(monkeypatch, "part-00001.parquet")
    with pytest.raises(UserError, match=r"No space left on device: 3 rows are saved in .*answers.part; rerun"):
        output.finish()
    output.close()
    assert (names(tmp_path), indices(tmp_path / "answers")) == (["answers", "answers.part"], [0])
    monkeypatch.undo()
    open_parts(resume=True).finish()
    assert (indices(tmp_path / "answers"), names(tmp_path)) == ([0, 1, 2], ["answers"])


class KilledError(BaseException):
    """Unlike an error, which the program may still mend."""


@pytest.mark.parametrize("last", ["answers", "answers.tmp", "answers.old"])
def test_a_run_that_dies_while_it_replaces_a_folder(tmp_path, open_parts, monkeypatch, last):
    """Killed at any rename or deletion, old or new rows are there, and --resume cleans up."""
    finish(open_parts(), 0)
    output = open_parts()
    add(output, 0, 1, 2)
    output.flush()
    with monkeypatch.context() as patch:
        # A killed process removes nothing.
        patch.setattr("rosebatch.io.placement._remove", lambda path: None)
        if last != "answers.old":
            fail_rename(patch, last, KilledError())
        with pytest.raises(KilledError) if last != "answers.old" else contextlib.nullcontext():
            patch.setattr(output._part, "remove", lambda: None)
            output.finish()
    output.close()
    assert (tmp_path / "answers.part").exists()
    assert {name: indices(tmp_path / name) for name in names(tmp_path) if name != "answers.part"} == {
        "answers": {"answers": [0], "answers.tmp": [0, 1, 2]},
        "answers.tmp": {"answers.old": [0], "answers.tmp": [0, 1, 2]},
        "answers.old": {"answers": [0, 1, 2], "answers.old": [0]},
    }[last]
    open_parts(resume=True).finish()
    assert (names(tmp_path), indices(tmp_path / "answers")) == (["answers"], [0, 1, 2])


def test_what_is_put_into_a_folder_during_the_run(tmp_path, open_parts):
    """A file that somebody adds after the first check must not be deleted; the results appear all the same."""
    (tmp_path / "answers").mkdir()
    output = open_parts()
    add(output, 0)
    (tmp_path / "answers" / "notes.txt").write_text("mine")
    output.finish()
    assert (indices(tmp_path / "answers"), names(tmp_path)) == ([0], ["answers", "answers.old"])
    assert (tmp_path / "answers.old" / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_take_its_place(tmp_path, open_parts, monkeypatch):
    """Between the two renames nothing stood under the name, and an error left it so."""
    finish(open_parts(), 0)
    (tmp_path / "answers").chmod(0o700)
    output = open_parts()
    add(output, 0, 1, 2)
    with monkeypatch.context() as patch:
        fail_rename(patch, "answers.tmp", OSError(errno.EIO, "Input/output error"))
        with pytest.raises(UserError, match="Input/output error: 3 rows are saved"):
            output.finish()
    output.close()
    assert (names(tmp_path), indices(tmp_path / "answers")) == (["answers", "answers.part"], [0])
    open_parts(resume=True).finish()
    assert indices(tmp_path / "answers") == [0, 1, 2]
    assert stat.S_IMODE((tmp_path / "answers").stat().st_mode) == 0o700


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("failed", [True, False])
def test_older_errors_stay_as_long_as_the_older_output(tmp_path, failed, number):
    """They were deleted first: a full disk left the old output without its errors."""
    out, bad = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    out.write_text("old")
    bad.write_text("old")
    states, placed = [], []

    def place(whole, path):
        states.append((out.read_text(), bad.read_text()))
        if len(states) > number:
            raise OSError(errno.EIO, "Input/output error")
        placed.append(path)
        replace_file(whole, path)

    part = PartFile.create(tmp_path / "out.jsonl.part", lambda: {"made by": "a test"})
    output = FileOutput(part, Placement(out, write_jsonl, errors=bad, place=place))
    output.add(0, {"index": 0}, failed=failed)
    expects_error = number == 0 or failed
    with pytest.raises(UserError) if expects_error else contextlib.nullcontext():
        output.finish()
    output.close()
    new = "" if failed else '{"index":0}\n'
    assert states == [("old", "old"), (new, "old")][: number + failed] or states == [("old", "old")]
    assert placed == [out][:number]
    assert bad.exists() == expects_error
    assert (tmp_path / "out.jsonl.part").exists() == expects_error


def test_a_path_that_becomes_a_pipe_during_the_run(tmp_path, open_jsonl):
    """Whatever is no regular file is never replaced."""
    output = open_jsonl()
    add(output, 0)
    os.mkfifo(tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="is no regular file any more: 1 row is saved"):
        output.finish()
    output.close()
    assert stat.S_ISFIFO((tmp_path / "out.jsonl").stat().st_mode)


@pytest.mark.parametrize("name", [b"\xff.jsonl", b"\xff.parquet", b"\xff/"])
def test_names_that_are_not_utf8(tmp_path, name):
    """Arrow refused such a name at the end of the run."""
    path = tmp_path / os.fsdecode(name.rstrip(b"/"))
    part = PartFile.create(Path(f"{path}.part"), lambda: {"made by": "a test"})
    if name.endswith(b"/"):
        placement = Placement(path, partial(write_parquet_parts, rows_per_file=2), place=replace_folder)
    else:
        placement = Placement(path, write_parquet if name.endswith(b"parquet") else write_jsonl)
    finish(FileOutput(part, placement), 0)
    assert path.exists()


def test_folders_that_may_be_replaced(tmp_path):
    """Only missing and empty folders, and those with parts alone: any other holds somebody's files."""
    folder = tmp_path / "answers"
    require_parts(folder)
    folder.mkdir()
    require_parts(folder)
    (folder / "part-00000.parquet").touch()
    require_parts(folder)
    for name in (".hidden", "part-00000.jsonl", "data.parquet"):
        (folder / name).touch()
        with pytest.raises(FlagError, match=f"answers: holds {name}, but a results folder may only hold"):
            require_parts(folder)
        (folder / name).unlink()
    (folder / "part-1.parquet").mkdir()
    with pytest.raises(FlagError, match=r"holds part-1.parquet"):
        require_parts(folder)
    with pytest.raises(FlagError, match=r"part-00000.parquet: is a file"):
        require_parts(folder / "part-00000.parquet")
