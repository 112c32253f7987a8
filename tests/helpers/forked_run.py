"""Runs tests in several processes, forks of the one that has collected them.

Imports and collection take a process 15 s: they happen once. Neighbours share models that take long to make, so each
fork begins with its share of the tests, in order. One that has none left takes the second half of the longest rest.
"""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

_FORK = multiprocessing.get_context("fork")
# The folder of temporary files in which each fork has its own.
OF_ALL_FORKS = pytest.StashKey[Path]()


class Shares:
    """Which tests are left to each process, in memory that all of them see.

    Args:
        tests: how many there are.
        processes: how many take them.
    """

    def __init__(self, tests: int, processes: int) -> None:
        cuts = [tests * number // processes for number in range(processes + 1)]
        self._begins, self._ends = _FORK.RawArray("q", cuts[:-1]), _FORK.RawArray("q", cuts[1:])
        self._lock = _FORK.Lock()

    def take(self, process: int) -> int | None:
        """The number of the next test of a process; None once there is none."""
        begins, ends = self._begins, self._ends
        with self._lock:
            if begins[process] == ends[process]:
                longest = max(range(len(ends)), key=lambda each: ends[each] - begins[each])
                ends[process], half = ends[longest], (ends[longest] - begins[longest] + 1) // 2
                begins[process] = ends[longest] = ends[longest] - half
            if begins[process] == ends[process]:
                return None
            begins[process] += 1
            return begins[process] - 1

    def drop(self) -> None:
        """Leave no test to anyone."""
        with self._lock:
            self._begins[:] = self._ends[:]


class _Sender:
    """In a fork, what would be printed goes to the first process."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._connection.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # What is made and taken away without a mistake is not printed.
        if report.passed and report.when != "call":
            return
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("pytest_runtest_logreport", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._connection.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))


def run_in_forks(session: pytest.Session, processes: int) -> None:
    """Run all tests of a session. Tests of a process that dies fail. See ``share_server``."""
    # Made once, for all.
    session.config.stash[OF_ALL_FORKS] = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    shares = Shares(len(session.items), processes)
    running = {}
    for number in range(processes):
        own, other = multiprocessing.Pipe(duplex=False)
        if not (pid := os.fork()):
            _run_tests(session, lambda number=number: shares.take(number), other)
        other.close()
        running[own] = pid
    hook, finished = session.config.hook, set()
    while running:
        for connection in wait(list(running)):
            try:
                name, values = connection.recv()
            except EOFError:
                os.waitpid(running.pop(connection), 0)
                continue
            if name == "pytest_runtest_logreport":
                values = {"report": hook.pytest_report_from_serializable(config=session.config, data=values)}
            elif name == "pytest_runtest_logfinish":
                finished.add(values["nodeid"])
            getattr(hook, name)(**values)
            if session.shouldfail:
                shares.drop()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    for item in session.items:
        if item.nodeid not in finished:
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", "Its process died.", "call")
            hook.pytest_runtest_logreport(report=report)


def end_at_once(code: int) -> NoReturn:
    """To free all that imports and tests have made takes 3 s, on one core."""
    atexit._run_exitfuncs()
    for stream in (sys.__stdout__, sys.__stderr__):
        stream.flush()
    os._exit(code)


def _run_tests(session: pytest.Session, take: Callable[[], int | None], connection: Connection) -> NoReturn:
    """In a fork."""
    plugins = session.config.pluginmanager
    factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    folder = session.config.stash[OF_ALL_FORKS]
    try:
        plugins.unregister(name="terminalreporter")
        plugins.register(_Sender(session.config, connection))
        # Else all forks would write to one temporary file.
        capture = plugins.get_plugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        number = take()
        while number is not None and not session.shouldfail:
            following = take()
            # To number a test's folder, pytest reads the names of all beside it.
            factory._basetemp = folder / f"{os.getpid()}-{number // 100}"
            factory._basetemp.mkdir(mode=0o700, exist_ok=True)
            item, then = session.items[number], None if following is None else session.items[following]
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
            number = following
    finally:
        os._exit(0)
