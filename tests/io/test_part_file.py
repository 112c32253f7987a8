"""The part file outlives the process: whatever a crash leaves of it, earlier results are there."""

import errno
import json
import os
import random

import pytest

from rosebatch.errors import FlagError, UserError
from rosebatch.io.part_file import PartFile

MANIFEST = {"input": "abc", "nested": {"a": 1}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.part"


def write(path, rows):
    """Writes a file with rows of (index, failed)."""
    part = PartFile.create(path, MANIFEST)
    for index, failed in rows:
        part.append(index, {"n": index, "text": "é\n]" * index}, failed=failed)
    part.sync()
    part.close()
    return path.read_bytes()


def expected(*indices):
    return [json.dumps({"n": i, "text": "é\n]" * i}, ensure_ascii=False, separators=(",", ":")) for i in indices]


def read(part):
    return [row.decode() for row in part.rows()]


def test_rows_come_back_in_order(path):
    """Rows may come in any order; reopening counts them without decoding any."""
    write(path, [(3, False), (0, True), (200, False), (1, True)])
    part = PartFile.reopen(path)
    assert part.manifest == MANIFEST
    assert (part.num_rows, part.num_failed) == (4, 2)
    assert [i for i in range(500) if i in part] == [0, 1, 3, 200]
    assert read(part) == expected(0, 1, 3, 200)
    part.append(2, {"n": 2, "text": "é\n]" * 2}, failed=False)
    assert read(part) == expected(0, 1, 2, 3, 200)


@pytest.mark.parametrize("disorder", [1, 5, 40, 400])
def test_windows_of_rows(path, monkeypatch, disorder):
    """However far rows are from their place, and with gaps, each comes once and in order."""
    monkeypatch.setattr("rosebatch.io.part_file._WINDOW", 16)
    rng = random.Random(disorder)
    indices = sorted((i for i in range(400) if i % 7), key=lambda i: i + rng.uniform(0, disorder))
    write(path, [(index, False) for index in indices])
    part = PartFile.reopen(path)
    assert [json.loads(row)["n"] for row in part.rows()] == sorted(indices)
    assert [i for i in range(500) if i in part] == sorted(indices)


def test_cut_at_every_byte(path):
    """A crash can tear the last line anywhere, even the manifest: only that line may be lost."""
    whole = write(path, [(0, False), (2, False), (1, True)])
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        lines = sum(end <= size for end in ends)
        part = PartFile.reopen(path)
        if lines == 0:
            assert part is None, "there is nothing to go on with"
            continue
        order = [0, 2, 1][: lines - 1]
        assert read(part) == expected(*sorted(order))
        assert path.read_bytes() == whole[: ends[lines - 1]]
        part.append(7, {"n": 7, "text": "é\n]" * 7}, failed=False)
        part.sync()
        part.close()
        again = PartFile.reopen(path)
        assert read(again) == expected(*sorted([*order, 7]))
        again.close()


def test_a_power_cut_may_leave_zeros(path):
    """The file may have its new size without its new contents."""
    whole = write(path, [(0, False)])
    path.write_bytes(whole + bytes(100))
    part = PartFile.reopen(path)
    assert read(part) == expected(0)
    assert path.read_bytes() == whole


def test_damage_that_is_not_at_the_end(path):
    """A crash does not do this: dropping all rows after the damage would lose them silently."""
    whole = write(path, [(0, False), (1, False)])
    path.write_bytes(whole.replace(b"[0,0,", b"[x,0,"))
    with pytest.raises(UserError, match=r"damaged at byte \d+, before its end"):
        PartFile.reopen(path)


@pytest.mark.parametrize("content", [b"a file of somebody else\n", b"[1,2]\n", b"\xff\n"])
def test_a_file_that_is_none_of_ours(path, content):
    """Another program's file is neither continued nor overwritten."""
    path.write_bytes(content + b"more\n")
    with pytest.raises(UserError, match="is not a part file of rosebatch"):
        PartFile.reopen(path)
    with pytest.raises(FlagError, match="--resume"):
        PartFile.create(path, MANIFEST)
    assert path.read_bytes() == content + b"more\n"


def test_results_are_not_overwritten(path):
    """Running a killed command again must not delete hours of results; a file without results may go."""
    whole = write(path, [(0, False)])
    with pytest.raises(FlagError, match="holds results of an earlier run: rerun with --resume, or delete the file"):
        PartFile.create(path, MANIFEST)
    assert path.read_bytes() == whole
    path.unlink()
    write(path, [])
    assert write(path, [(0, False)]) == whole


def test_one_process_at_a_time(path):
    """Two runs that append to one file would double rows."""
    first = PartFile.create(path, MANIFEST)
    first.append(0, {}, failed=False)
    first.sync()
    for open_again in (PartFile.reopen, lambda p: PartFile.create(p, MANIFEST)):
        with pytest.raises(UserError, match="another run is writing to it"):
            open_again(path)
    first.close()
    assert PartFile.reopen(path).num_rows == 1


def test_a_file_system_without_locks(path, monkeypatch):
    """Some network file systems have none: the run goes on without."""

    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("rosebatch.io.part_file.fcntl.flock", no_locks)
    write(path, [(0, False)])
    assert PartFile.reopen(path).num_rows == 1


def test_a_full_disk_in_the_middle_of_a_line(path, monkeypatch):
    """The torn line is removed, earlier rows stay, and the message says how to continue."""
    part = PartFile.create(path, MANIFEST)
    part.append(0, {"n": 0, "text": ""}, failed=False)
    part.sync()
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]) if len(data) > 9 else full())

    def full():
        raise OSError(28, "No space left on device")

    part.append(1, {"n": 1, "text": ""}, failed=False)
    with pytest.raises(
        UserError, match=r"No space left on device; earlier rows are saved; rerun with --resume to continue"
    ):
        part.flush()
    part.close()
    monkeypatch.undo()
    assert read(PartFile.reopen(path)) == expected(0)


def test_a_row_is_with_the_system_after_flush(path):
    """SIGKILL after a flush must lose nothing."""
    part = PartFile.create(path, MANIFEST)
    size = path.stat().st_size
    part.append(0, {}, failed=False)
    part.flush()
    assert path.read_bytes()[size:] == b"[0,0,{}]\n"


@pytest.mark.parametrize(("rows", "seconds"), [(1024, 0), (1, 3)])
def test_rows_reach_the_disk_now_and_then(path, monkeypatch, rows, seconds):
    """A power cut costs at most a thousand rows or two seconds."""
    now, synced = 1000.0, []
    monkeypatch.setattr("rosebatch.io.part_file.time.monotonic", lambda: now)
    monkeypatch.setattr(os, "fsync", synced.append)
    part = PartFile.create(path, MANIFEST)
    now += seconds
    for index in range(rows - 1):
        part.append(index, {}, failed=False)
    assert not synced
    part.append(rows - 1, {}, failed=False)
    assert len(synced) == 1


@pytest.mark.parametrize("name", ["none/out.part", "folder"])
def test_a_path_that_cannot_be_written(tmp_path, name):
    """The user gets one line, before the model is loaded."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"No such file or directory|Is a directory"):
        PartFile.create(tmp_path / name, MANIFEST)
