"""Ids are recognized again, however many and however long, without being kept in memory."""

import random
import resource
from pathlib import Path

import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.seen_ids import SeenIds
from tests.helpers.forks import in_fork


@pytest.mark.parametrize("in_memory", [1, 4, 100])
@pytest.mark.parametrize(
    "one", [0, 1, -5, 10**40, "", "1", "a\x00b", "é\U0001f600", "\ud800", "x" * 63, "x" * 64, "x" * 10**6]
)
def test_an_id_is_known_again(one, in_memory, monkeypatch):
    """Numbers past 64 bits, lone surrogates and long texts work; a text and a number are never the same id."""
    monkeypatch.setattr("rosebatch.io.seen_ids._MAX_IN_MEMORY", in_memory)
    others = [2, "2", "x" * 65, "x" * 10**6 + "y", "a\x00c", 10**40 + 1, "True"]
    seen = SeenIds()
    for identity in (*others, one):
        assert seen.repeated([identity]) == []
    for identity in (one, *others):
        assert seen.repeated([identity]) == [0]


@pytest.mark.parametrize("in_memory", [1, 50, 100_000])
def test_groups_are_like_one_after_the_other(in_memory, monkeypatch):
    """An id that a group has twice, or that any earlier one had, was overlooked or marked in the wrong place."""
    monkeypatch.setattr("rosebatch.io.seen_ids._MAX_IN_MEMORY", in_memory)
    chance, alone, seen = random.Random(1), set(), SeenIds()
    for size in (1, 64, 0, 300, 128, 256, 700):
        group = [chance.choice([None, chance.randrange(900), str(chance.randrange(900))]) for _ in range(size)]
        expected = []
        for place, each in enumerate(group):
            if each in alone:
                expected.append(place)
            elif each is not None:
                alone.add(each)
        assert seen.repeated(group) == expected


def growth():
    """KiB that the process takes for many ids."""
    seen = SeenIds()
    for i in range(20_000):
        seen.repeated([f"warm-up {i}"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not any(seen.repeated([f"row number {i}"]) for i in range(300_000))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_ids():
    """A Python set would take 90 bytes for each id: 26 MB here."""
    # In a process of its own: other tests leave threads and memory.
    assert in_fork(growth) < 12 * 1024


def test_a_disk_that_is_full():
    """A full disk of temporary files ended the job with a traceback's last line instead of a message."""
    seen = SeenIds()
    for i in range(2**16):
        seen.repeated([i])
    seen._database.execute("PRAGMA max_page_count = 400")
    with pytest.raises(UserError, match=r"^the temporary database of row ids: database or disk is full; SQLITE_TMPDIR"):
        for i in range(100_000):
            seen.repeated([f"row number {i} {'x' * 30}"])


def spools():
    """The open files of temporary databases."""
    return {path for path in Path("/proc/self/fd").iterdir() if path.is_file() and "etilqs_" in str(path.readlink())}


def test_a_damaged_database():
    """The same for a disk that gives back other bytes."""
    before = spools()
    seen = SeenIds()
    for i in range(100_000):
        seen.repeated([f"row number {i} {'x' * 30}"])
    (file,) = spools() - before
    with file.open("r+b") as content:
        content.write(b"\xff" * file.stat().st_size)
    with pytest.raises(UserError, match=r"^the temporary database of row ids: .*malformed; SQLITE_TMPDIR"):
        for i in range(0, 100_000, 100):
            seen.repeated([f"row number {i} {'x' * 30}"])
