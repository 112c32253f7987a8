"""Reading on a thread loses nothing, reads only a bounded amount ahead, and keeps nobody waiting."""

import itertools
import threading
import weakref

import pytest

from rosebatch.io.read_ahead import read_ahead
from tests.helpers.waiting import no_thread_left, until


@pytest.fixture(autouse=True)
def no_reader_left():
    """The thread must not go on reading for ever."""
    with no_thread_left("rosebatch-read"):
        yield


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_all_items_in_order(count):
    """Full groups and a last one that is not full."""
    assert list(read_ahead(iter(range(count)), lambda: None)) == list(range(count))


@pytest.mark.parametrize(("size", "ahead"), [(0, 4 * 64), (3 << 20, 4 * 2), (30 << 20, 1)])
def test_it_stays_a_bounded_way_ahead(size, ahead):
    """Memory must not hold the whole file, and it held 256 lines of 1 MB before the first was used.

    One group is in use, and three are ahead: none where each is a row of 30 MB, four of which were there.
    """
    taken = 0

    def source():
        for number in range(5000):
            assert number <= taken + ahead
            yield number

    for taken, number in enumerate(read_ahead(source(), lambda: None, lambda _: size)):
        assert number == taken


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


def test_nobody_keeps_an_item():
    """A row of 30 MB was there as it was read, too, while it was served."""

    class Item:
        pass

    def source():
        for _ in range(3):
            yield Item()

    for item in read_ahead(source(), lambda: None, lambda _: 30 << 20):
        gone = weakref.ref(item)
        del item
        until(lambda gone=gone: gone() is None)
