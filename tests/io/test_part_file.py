"""The part file outlives the process: whatever a crash leaves of it, earlier results are there."""

import errno
import fcntl
import itertools
import json
import os
import random
import re
from pathlib import Path

import pytest

from rosebatch.core.errors import FlagError, UserError
from rosebatch.io import part_file
from rosebatch.io.part_file import PartFile
from rosebatch.io.part_lines import PartEncoder, encode_row

MANIFEST = {"input": "abc", "nested": {"a": 1}}


def manifest():
    return MANIFEST


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.part"


def append(part, index, row=None, *, failed=False):
    """Adds the result of a row, by default one whose length depends on its index."""
    row = {"n": index, "text": "é\n]" * index} if row is None else row
    part.append_lines([index], [encode_row(index, row, part.begin(), failed=failed)], {index} if failed else ())


def write(path, rows):
    """Writes a file with rows of (index, failed)."""
    part = PartFile.create(path, manifest)
    for index, failed in rows:
        append(part, index, failed=failed)
    part.sync()
    part.close()
    return path.read_bytes()


def expected(*indices):
    return [json.dumps({"n": i, "text": "é\n]" * i}, ensure_ascii=False, separators=(",", ":")) for i in indices]


def read(part):
    return [row.decode() for row in part.rows()]


def assert_refused(path, message):
    """Neither continued nor written anew."""
    for open_file in (PartFile.reopen, lambda p: PartFile.create(p, manifest)):
        with pytest.raises(UserError, match=message):
            open_file(path)


@pytest.mark.parametrize("room", [0, 40, 1 << 20])
def test_lines_that_are_kept_and_lines_that_are_read_again(path, monkeypatch, room):
    """Of a window, the first lines are kept while their places are found, as far as there is room."""
    monkeypatch.setattr(part_file, "_KEPT_BYTES", room)
    monkeypatch.setattr(part_file, "_WINDOW", 8)
    order = [5, 9, 0, 17, 3, 8, 1]
    write(path, [(index, index == 3) for index in order])
    part = PartFile.reopen(path)
    assert read(part) == expected(*sorted(order))
    assert [row.decode() for row in part.rows(failed=True)] == expected(3)
    part.close()


def test_rows_come_back_in_order(path):
    """Rows may come in any order; reopening counts them without decoding any."""
    write(path, [(3, False), (0, True), (200, False), (1, True)])
    part = PartFile.reopen(path)
    assert (part.manifest, part.num_rows, part.num_failed) == (MANIFEST, 4, 2)
    assert [i for i in range(500) if i in part] == [0, 1, 3, 200]
    assert read(part) == expected(0, 1, 3, 200)
    append(part, 2)
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
        append(part, 7)
        part.sync()
        part.close()
        again = PartFile.reopen(path)
        assert read(again) == expected(*sorted([*order, 7]))
        again.close()


def test_a_power_cut_may_leave_zeros(path):
    """The file may have its new size without its new contents."""
    whole = write(path, [(0, False)])
    path.write_bytes(whole + bytes(100))
    assert read(PartFile.reopen(path)) == expected(0)
    assert path.read_bytes() == whole


FOREIGN = b"a file of somebody else\n", b"[1,2]\n", b"\xff\n", b"one line", b"[0,0,{}]\nmore\n", b"\n"


@pytest.mark.parametrize("content", [*FOREIGN, b'["rosebatch" is here\n'])
def test_a_file_that_is_none_of_ours(path, content):
    """Another program's file is neither continued nor overwritten. A foreign file of one line was truncated."""
    path.write_bytes(content)
    assert_refused(path, "is not a part file of rosebatch; delete it or choose another output")
    assert path.read_bytes() == content


@pytest.mark.parametrize("begin", [b'{"format":1,"created":1}\n[0,0,{}]\n', b'["rosebatch part",3,{},"00000000"]\n'])
def test_a_file_of_another_version(path, begin):
    """Its lines would all count as damaged, and a run without --resume would overwrite them."""
    path.write_bytes(begin)
    assert_refused(path, "another version of rosebatch wrote it; continue with that version, or")
    assert path.read_bytes() == begin


@pytest.mark.parametrize(
    "content", [b"", bytes(4096), b"[", b'["rosebatch part",2,{"inp', b'["rosebatch part",2,{' + bytes(9)]
)
def test_what_a_crash_leaves_of_a_manifest(path, content):
    """A run that dies before its first row, by a power cut too, must not block the next one."""
    path.write_bytes(content)
    assert PartFile.reopen(path) is None
    part = PartFile.create(path, manifest)
    append(part, 0)
    assert read(part) == expected(0)


@pytest.mark.parametrize("kind", ["link", "fifo", "device"])
def test_a_path_that_is_no_regular_file(tmp_path, path, kind):
    """A link's target must not be overwritten, and a pipe that nobody reads must not block the run."""
    target = tmp_path / "target"
    if kind == "link":
        target.touch()
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = Path("/dev/null")
    assert_refused(path, r"is a link|is no regular file")


def test_results_are_not_overwritten(path):
    """Running a killed command again must not delete hours of results; a file without results may go."""
    whole = write(path, [(0, False)])
    with pytest.raises(FlagError, match="holds results of an earlier run: rerun with --resume, or delete the file"):
        PartFile.create(path, manifest)
    assert path.read_bytes() == whole
    path.unlink()
    write(path, [])
    assert write(path, [(0, False)]) == whole


def test_one_process_at_a_time(path):
    """Two runs that append to one file would double rows."""
    first = PartFile.create(path, manifest)
    append(first, 0, {})
    first.sync()
    assert_refused(path, "another run is writing to it")
    first.close()
    assert PartFile.reopen(path).num_rows == 1


def test_a_file_system_without_locks(path, monkeypatch):
    """Some network file systems have none: the run goes on without."""

    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("rosebatch.io.locked_file.fcntl.flock", no_locks)
    write(path, [(0, False)])
    assert PartFile.reopen(path).num_rows == 1


def test_a_full_disk_in_the_middle_of_a_line(path, monkeypatch):
    """The torn line is removed, earlier rows stay, and the message says how to continue."""
    part = PartFile.create(path, manifest)
    append(part, 0)
    part.sync()
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]) if len(data) > 9 else full())

    def full():
        raise OSError(28, "No space left on device")

    append(part, 1)
    with pytest.raises(UserError, match="No space left on device; earlier rows are saved; rerun with --resume to cont"):
        part.flush()
    part.close()
    monkeypatch.undo()
    assert read(PartFile.reopen(path)) == expected(0)


def test_a_row_is_with_the_system_after_flush(path):
    """SIGKILL after a flush must lose nothing."""
    part = PartFile.create(path, manifest)
    append(part, 0, {})
    part.flush()
    assert re.fullmatch(rb'\[0,0,\{\},"[0-9a-f]{8}"\]\n', path.read_bytes().splitlines(keepends=True)[-1])


@pytest.mark.parametrize(("rows", "seconds"), [(1024, 0), (1, 3)])
def test_rows_reach_the_disk_now_and_then(path, monkeypatch, rows, seconds):
    """A power cut costs at most a thousand rows or two seconds."""
    now, synced = 1000.0, []
    monkeypatch.setattr("rosebatch.io.part_file.time.monotonic", lambda: now)
    part = PartFile.create(path, manifest)
    monkeypatch.setattr(os, "fsync", synced.append)
    now += seconds
    for index in range(rows - 1):
        append(part, index, {})
    assert not synced
    append(part, rows - 1, {})
    assert len(synced) == 1


def test_a_slow_disk_has_time_for_more_rows(path, monkeypatch):
    """Ten thousand rows a second waited for the disk after each thousand, most of the time."""
    now, synced = 1000.0, []

    def fsync(descriptor):
        nonlocal now
        synced.append(now)
        now += 0.125

    monkeypatch.setattr("rosebatch.io.part_file.time.monotonic", lambda: now)
    part = PartFile.create(path, manifest)
    monkeypatch.setattr(os, "fsync", fsync)
    for index in range(40_000):
        append(part, index, {})
        now += 1 / 8192
    # After the first thousand, no sooner than ten times what the disk takes.
    assert [round(8 * (later - earlier - 0.125)) for earlier, later in itertools.pairwise(synced)] == [10, 10, 10]


def test_results_in_groups_are_those_one_by_one(path):
    """Lines that were made elsewhere: their rows, and which of them failed, count as others do."""
    part = PartFile.create(path, manifest)
    encode = PartEncoder(part.begin(), ("n",))
    indices = [5, 70_000, 0]
    lines = [encode(index, {"n": index, "more": 1}, failed=index == 5) for index in indices]
    part.append_lines(indices, lines, {5})
    append(part, 1, {"n": 1})
    assert (part.num_rows, part.num_failed) == (4, 1)
    assert [index for index in range(80_000) if index in part] == [0, 1, 5, 70_000]
    with pytest.raises(AssertionError, match="a row has one result"):
        part.append_lines([5], lines[:1], {5})
    part.sync()
    part.close()
    again = PartFile.reopen(path)
    assert (again.num_rows, again.num_failed) == (4, 1)
    assert list(again.rows()) == [b'{"n":0}', b'{"n":1}', b'{"n":5}', b'{"n":70000}']
    assert list(again.rows(failed=True)) == [b'{"n":5}']


def test_the_name_is_on_the_disk_before_any_row(path, monkeypatch):
    """After a power cut a file may be missing although its contents were brought to the disk, if its folder was not."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").resolve()))
    PartFile.create(path, manifest)
    assert synced == [path.parent]


def test_the_manifest_is_made_before_the_first_row(path):
    """Hashing the weights takes seconds: the file is held and checked at once, the hash is needed only with a row."""
    made = []
    part = PartFile.create(path, lambda: made.append(1) or MANIFEST)
    assert not made
    assert path.read_bytes() == b""
    with pytest.raises(UserError, match="another run is writing to it"):
        PartFile.create(path, manifest)
    for index in range(3):
        append(part, index, {})
    assert part.manifest == MANIFEST
    assert made == [1]
    part.sync()
    part.close()
    assert PartFile.reopen(path).manifest == MANIFEST


def test_a_file_that_is_deleted_before_the_lock(path, monkeypatch):
    """Another run finished between open and lock: rows went into a file without a name, and were lost."""
    real, calls = fcntl.flock, []

    def flock(descriptor, operation):
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
        if len(calls) == 2:
            path.rename(path.with_name("moved"))
            path.write_bytes(b"")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    part = PartFile.create(path, manifest)
    assert len(calls) == 3
    append(part, 0)
    part.sync()
    part.close()
    assert read(PartFile.reopen(path)) == expected(0)


def test_another_file_in_its_place(path):
    """Rows are never read from a file that somebody else put there, and it is not deleted."""
    part = PartFile.create(path, manifest)
    append(part, 0, {})
    part.sync()
    path.rename(path.with_name("moved"))
    path.write_text("somebody else's")
    with pytest.raises(UserError, match="another file took its place while the run wrote to it"):
        read(part)
    part.remove()
    assert path.read_text() == "somebody else's"


def test_a_huge_index_takes_no_memory(path):
    """A damaged or crafted index ended in MemoryError: one bit was kept for every index below it."""
    huge = 10**18 - 1
    write(path, [])
    part = PartFile.create(path, manifest)
    append(part, huge, {"n": huge})
    append(part, 0, {"n": 0}, failed=True)
    part.sync()
    part.close()
    part = PartFile.reopen(path)
    assert huge in part
    assert huge - 1 not in part
    assert read(part) == ['{"n":0}', f'{{"n":{huge}}}']


@pytest.mark.parametrize("name", ["none/out.part", "folder"])
def test_a_path_that_cannot_be_written(tmp_path, name):
    """The user gets one line, before the model is loaded."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"No such file or directory|Is a directory"):
        PartFile.create(tmp_path / name, manifest)


def test_a_run_that_goes_on_with_another_manifest(path):
    """The next run was compared with the first one, and counted rows of an input that had become shorter."""
    other = {"input": "def"}
    write(path, [(0, False), (7, True), (8, False)])
    part = PartFile.reopen(path)
    part.go_on(other)
    part.leave_out(8)
    append(part, 3, failed=True)
    part.sync()
    part.close()
    content = path.read_bytes()
    part = PartFile.reopen(path)
    assert (part.manifest, part.mixed, part.num_rows, part.num_failed, part.num_damaged) == (other, True, 4, 2, 0)
    part.leave_out(8)
    assert (part.num_rows, part.num_failed, read(part)) == (3, 2, expected(0, 3, 7))
    part.close()
    assert path.read_bytes() == content
    # A kill while the line was written.
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:4]) + content.splitlines()[4][:20])
    part = PartFile.reopen(path)
    assert (part.manifest, part.mixed, part.num_rows, part.num_damaged) == (MANIFEST, False, 3, 0)


def test_a_manifest_of_another_file(path):
    """It would make a run of one file pass for one of another."""
    write(path, [(0, False)])
    part = PartFile.reopen(path)
    part.go_on({"input": "def"})
    part.close()
    line = path.read_bytes().splitlines(keepends=True)[-1]
    path.unlink()
    part = PartFile.create(path, lambda: {"input": "x"})
    append(part, 0, {})
    part.sync()
    part.close()
    path.write_bytes(path.read_bytes() + line)
    part = PartFile.reopen(path)
    assert (part.manifest, part.mixed, part.num_damaged) == ({"input": "x"}, False, 1)
