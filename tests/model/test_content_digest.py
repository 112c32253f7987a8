"""Digests of whole files, and when one of an earlier run may be used again."""

import hashlib
import os

import pytest

from rosebatch.model import content_digest
from rosebatch.model.content_digest import content_digests


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, small pieces, and a clock on which every file is old."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(content_digest, "_PIECE", 1000)
    monkeypatch.setattr(content_digest, "_REMEMBERED", 100)
    monkeypatch.setattr("rosebatch.host.file_state._TICK_NS", -(10**9))
    return tmp_path / "cache" / "rosebatch" / "digests"


@pytest.fixture
def hashed(monkeypatch):
    """The pieces that are read."""
    real, pieces = content_digest._hash_piece, []
    monkeypatch.setattr(content_digest, "_hash_piece", lambda *piece: pieces.append(piece) or real(*piece))
    return pieces


def make(path, size, seed=0):
    path.write_bytes(bytes((seed + i * i) % 251 for i in range(size)))
    return path


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 12_345])
def test_every_byte_counts(tmp_path, monkeypatch, size):
    """Pieces are hashed by many threads at once; the digest must be that of one thread."""
    monkeypatch.setattr(content_digest, "_BUFFER", 64)
    path = make(tmp_path / "file", size)
    content = path.read_bytes()
    pieces = [content[i : i + 1000] for i in range(0, max(size, 1), 1000)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    assert content_digests([path]) == [expected]
    for at in range(0, size, 97):
        changed = tmp_path / "changed"
        changed.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert content_digests([changed]) != [expected]


def test_a_file_is_read_once(tmp_path, hashed):
    """Hashing tens of gigabytes again at each start would cost more than loading them."""
    paths = [make(tmp_path / "a", 2500), make(tmp_path / "b", 1500, seed=1), make(tmp_path / "small", 50)]
    first = content_digests(paths)
    assert len(set(first)) == 3
    assert len(hashed) == 6
    hashed.clear()
    link = tmp_path / "link"
    link.symlink_to(paths[0])
    assert content_digests([*paths, link]) == [*first, first[0]]
    assert hashed == [(paths[2], 0)], "small files are hashed each time"


@pytest.mark.parametrize("times", ["kept", "new"])
def test_a_changed_file_is_read_again(tmp_path, hashed, times):
    """Tools such as rsync --inplace keep inode, size and mtime: the system's own time of change tells."""
    path = make(tmp_path / "a", 1500)
    status = path.stat()
    before = content_digests([path])
    with path.open("r+b") as file:
        file.seek(700)
        file.write(b"other")
    if times == "kept":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert content_digests([path]) != before
    assert len(hashed) == 4


def test_a_file_that_was_just_written(tmp_path, hashed, monkeypatch, cache):
    """A second change within one tick of the clock would leave the same times: nothing is remembered yet."""
    monkeypatch.setattr("rosebatch.host.file_state._TICK_NS", 10**12)
    path = make(tmp_path / "a", 900)
    assert content_digests([path]) == content_digests([path])
    assert len(hashed) == 2
    assert not cache.exists()


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, cache):
    """The digest is of neither contents: it must not be remembered for the new ones."""
    path = make(tmp_path / "a", 900)
    real = content_digest._hash_piece
    monkeypatch.setattr(content_digest, "_hash_piece", lambda *piece: (real(*piece), path.write_bytes(b"x"))[0])
    content_digests([path])
    assert not cache.exists()


@pytest.mark.parametrize("bit", [0, 100, 8 * 64 + 20, 8 * 100])
def test_a_damaged_memo(tmp_path, hashed, cache, bit):
    """It would refuse every later --resume, with a message that nobody understands."""
    path = make(tmp_path / "a", 900)
    before = content_digests([path])
    (memo,) = cache.iterdir()
    content = bytearray(memo.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    memo.write_bytes(content)
    assert content_digests([path]) == before
    assert len(hashed) == 2
    assert len(list(cache.iterdir())) == 1


def test_a_home_that_cannot_be_written(tmp_path, hashed, monkeypatch):
    """A read-only home is no error: each run hashes the files."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = make(tmp_path / "a", 900)
    assert content_digests([path]) == content_digests([path])
    assert len(hashed) == 2


def test_a_file_that_cannot_be_read(tmp_path):
    """The error of a thread is raised; it does not end as an empty digest."""
    with pytest.raises(FileNotFoundError):
        content_digests([tmp_path / "none"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        content_digests([tmp_path / "folder"])
