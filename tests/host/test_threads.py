"""Threads that nobody waits for: results and errors arrive, and the end of a pool keeps nobody."""

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from rosebatch.host.threads import DaemonPool, done_within, wait_for
from tests.helpers.checkout import environment
from tests.helpers.waiting import PATIENCE_SECONDS, no_thread_left, until


def test_calls_run_beside_each_other():
    """Results and exceptions reach the caller, and no more threads run than allowed."""
    with no_thread_left("pool"), DaemonPool(2, "pool") as pool:
        both = threading.Barrier(2, timeout=PATIENCE_SECONDS)
        assert [f.result() for f in [pool.submit(both.wait) for _ in range(2)]] in ([0, 1], [1, 0])
        assert pool.submit(pow, 2, exp=5).result() == 32
        with pytest.raises(ZeroDivisionError):
            wait_for(pool.submit(lambda: 1 / 0), lambda: None)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("pool")]
        assert sorted(names) == ["pool-0", "pool-1"]


def test_the_end_of_a_pool_waits_for_no_call():
    """A ThreadPoolExecutor waits for a text of 100 MB, and so does the end of Python."""
    opened = threading.Event()
    with DaemonPool(1, "pool") as pool:
        running, queued = pool.submit(opened.wait), pool.submit(print)
        assert not done_within(running, 0.01)
    assert queued.cancelled()
    assert not running.done()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("pool"))
    opened.set()
    assert running.result() is True


def test_waiting_checks_again_and_again():
    """A signal must end the wait, also where the call itself has timed out."""
    future, checks = Future(), []

    def check():
        checks.append(1)
        if len(checks) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        wait_for(future, check)
    future.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        wait_for(future, check)


def test_a_pool_keeps_no_result():
    """A thread kept its last result alive: the tokens of 64 rows of 1 MB."""

    class Large:
        pass

    import weakref

    with DaemonPool(1, "pool") as pool:
        future = pool.submit(Large)
        kept = weakref.ref(future.result())
        del future
        until(lambda: kept() is None)


def test_a_pool_that_outlives_its_module():
    """A process ends in any order: a model that nobody closed wrote an error of a function that was gone."""
    script = """
import atexit
from rosebatch.host import threads
atexit.register(lambda: vars(threads).update(suppress=None))
pool = threads.DaemonPool(1, "last")
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stderr == ""
