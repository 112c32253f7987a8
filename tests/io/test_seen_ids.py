"""Ids are recognized again, however many and however long, without being kept in memory."""

import resource

import pytest

from rosebatch.errors import UserError
from rosebatch.io.seen_ids import SeenIds


@pytest.mark.parametrize(
    "one", [0, 1, -5, 10**40, "", "1", "a\x00b", "é\U0001f600", "\ud800", "x" * 63, "x" * 64, "x" * 10**6]
)
def test_an_id_is_known_again(one):
    """Numbers past 64 bits, lone surrogates and long texts work; a text and a number are never the same id."""
    others = [2, "2", "x" * 65, "x" * 10**6 + "y", "a\x00c", 10**40 + 1, "True"]
    seen = SeenIds()
    for other in others:
        assert seen.add(other)
    assert seen.add(one)
    assert not seen.add(one)
    assert not any(seen.add(other) for other in others)


def test_memory_does_not_grow_with_the_ids():
    """A Python set would take 90 bytes for each id: 26 MB here."""
    seen = SeenIds()
    for i in range(20_000):
        seen.add(f"warm-up {i}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert all(seen.add(f"row number {i}") for i in range(300_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 12 * 1024


def test_a_full_temporary_folder():
    """It was an unexpected sqlite3.OperationalError that named neither the folder nor the way out."""
    seen = SeenIds()
    seen._database.execute("PRAGMA max_page_count = 20")
    with pytest.raises(UserError, match=r"ids of the rows .* \(database or disk is full\); set TMPDIR"):
        for i in range(10_000):
            seen.add(f"a long id, so that it soon is full {i}")
