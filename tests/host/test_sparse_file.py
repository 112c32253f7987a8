"""A hole of a file is read as zeros, and makes no pages of the system's cache."""

import errno
import hashlib
import os
import sys
from pathlib import Path

import pytest

from rosebatch.host.sparse_file import open_local

MEBIBYTE = 1 << 20


def write(path, parts):
    """Write a file of texts and of holes, which are numbers of bytes."""
    with path.open("wb") as file:
        for part in parts:
            if isinstance(part, int):
                file.seek(part, os.SEEK_CUR)
            else:
                file.write(part)
        file.truncate()
    return path


@pytest.mark.parametrize(
    "parts",
    [
        [b"a\n", 3 * MEBIBYTE, b"b\n"],
        [MEBIBYTE, b"x" * 5000, MEBIBYTE + 1, b"\n", MEBIBYTE],
        [2 * MEBIBYTE],
        [b"whole"],
        [],
    ],
)
def test_contents(tmp_path, parts):
    """Read in order, from any place, and past the end, as any other file."""
    path = write(tmp_path / "file", parts)
    whole = path.read_bytes()
    with open_local(path, 1 << 14) as file:
        assert hashlib.file_digest(file, "sha256").digest() == hashlib.sha256(whole).digest()
        for place in (len(whole) // 2, 0, len(whole), len(whole) + 5, max(0, len(whole) - 3)):
            file.seek(place)
            assert file.read(100_000) == whole[place : place + 100_000]
        file.seek(0)
        assert b"".join(iter(lambda: file.read1(70_000), b"")) == whole


def test_a_file_system_that_tells_of_no_holes(tmp_path, monkeypatch):
    """All of its file was read as zeros."""
    path = write(tmp_path / "file", [b"a\n", 3 * MEBIBYTE, b"b\n"])
    seek = os.lseek

    def lseek(descriptor, place, whence):
        if whence in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return seek(descriptor, place, whence)

    monkeypatch.setattr(os, "lseek", lseek)
    with open_local(path, 1 << 14) as file:
        assert b"".join(iter(lambda: file.read(70_000), b"")) == path.read_bytes()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_hole_is_not_asked_of_the_system(tmp_path):
    """A line of 5 GB that nobody wrote took 20 s of processor time, two thirds of them for pages of zeros."""
    path = write(tmp_path / "file", [b"a\n", 100 * MEBIBYTE, b"b\n"])
    if path.stat().st_blocks * 512 > MEBIBYTE:
        pytest.skip("the file system has no holes")
    before = bytes_read()
    with open_local(path, 1 << 18) as file:
        assert sum(map(len, file)) == 100 * MEBIBYTE + 4
    assert bytes_read() - before < MEBIBYTE


def bytes_read():
    """What this process has asked the system for so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_file_that_grows(tmp_path):
    """What was added behind the end is read."""
    path = write(tmp_path / "file", [b"a", MEBIBYTE])
    with open_local(path, 1 << 14) as file, path.open("ab") as more:
        assert len(file.read(2 * MEBIBYTE)) == MEBIBYTE + 1
        assert file.read(1) == b""
        more.write(b"b")
        more.flush()
        assert file.read(1) == b"b"
