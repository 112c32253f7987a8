"""Reading on a thread loses nothing, reads only a bounded amount ahead, and keeps nobody waiting."""

import itertools
import threading
import time

import pytest

from rosebatch.io.read_ahead import read_ahead
from tests.helpers.waiting import no_thread_left


@pytest.fixture(autouse=True)
def no_reader_left():
    """The thread must not go on reading for ever."""
    with no_thread_left("rosebatch-read"):
        yield


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_all_items_in_order(count):
    """Full groups and a last one that is not full."""
    assert list(read_ahead(iter(range(count)), lambda: None)) == list(range(count))


def test_it_stays_a_bounded_way_ahead():
    """Memory must not hold the whole file."""
    read = itertools.count()
    items = read_ahead(read, lambda: None)
    assert [next(items) for _ in range(10)] == list(range(10))
    # One group in use, two that wait, and one for which there is no room.
    time.sleep(0.2)
    assert next(read) <= 4 * 64
    items.close()


def test_lines_of_many_bytes_are_read_a_shorter_way_ahead():
    """256 lines of 1 MB were in memory before the first was used."""
    read = itertools.count()
    items = read_ahead(read, lambda: None, lambda _: 3 << 20)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.2)
    assert next(read) <= 3 + 4 * 2
    items.close()


def test_an_exception_comes_after_the_items_before_it():
    """The thread's exception must not be lost, nor the items read before it."""

    def broken():
        yield from range(64)
        raise OSError("gone")

    items = read_ahead(broken(), lambda: None)
    assert list(itertools.islice(items, 64)) == list(range(64))
    with pytest.raises(OSError, match="gone"):
        next(items)


def test_a_signal_is_noticed_while_nothing_comes():
    """A pipe may be silent for an hour: a signal must not wait for its next line."""
    opened = threading.Event()

    def silent():
        opened.wait()
        yield 1

    def check():
        raise InterruptedError

    items = read_ahead(silent(), check)
    with pytest.raises(InterruptedError):
        next(items)
    opened.set()
