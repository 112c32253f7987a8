"""The first signal ends a run only where the run may end; a second one ends it at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rosebatch.cli.early_signals import end_at_once
from rosebatch.cli.interrupts import Interrupts
from rosebatch.core.errors import InterruptionError
from tests.helpers.checkout import ROOT
from tests.helpers.waiting import PATIENCE_SECONDS, until


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_waits(number, code):
    """It must not raise in the middle of a write."""
    with Interrupts().listen() as check:
        check()
        os.kill(os.getpid(), number)
        with pytest.raises(InterruptionError, match=signal.Signals(number).name) as caught:
            check()
        assert caught.value.exit_code == code


def test_the_second_signal_does_not(monkeypatch):
    """A step that hangs can still be interrupted."""
    with Interrupts().listen():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_are_put_back():
    """pytest's own Ctrl-C must work afterwards, or that of a program that calls the command line."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts().listen():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# Waits in one long call of C code, in which Python runs no handler: a step, a text of 100 MB, a grammar.
BUSY = """
import ctypes
from rosebatch.cli.interrupts import Interrupts

interrupts = Interrupts()
with interrupts.watch(), interrupts.listen(lambda: ": 7 rows are saved"):
    print("ready", flush=True)
    library = ctypes.CDLL(None)
    while True:
        library.sleep(3600)
"""
# A call of a thread that nothing joins.
THREAD = """
import time
from rosebatch.core.errors import InterruptionError
from rosebatch.cli import interrupts
from rosebatch.host.threads import DaemonPool, wait_for

# It ends by itself.
interrupts._GRACE_SECONDS = 3600
listener = interrupts.Interrupts()
try:
    with listener.watch(), listener.listen() as check, DaemonPool(2, "slow") as pool:
        print("ready", flush=True)
        wait_for(pool.submit(time.sleep, 3600), check)
except InterruptionError as error:
    raise SystemExit(error.exit_code)
"""


# Ends by itself while the thread asks what is saved.
LATE = """
import sys, time
from rosebatch.cli import interrupts
from rosebatch.core.errors import InterruptionError

def kept():
    time.sleep(1)
    return ""

interrupts._GRACE_SECONDS = 0.1
listener = interrupts.Interrupts()
try:
    with listener.watch(), listener.listen(kept) as check:
        print("ready", flush=True)
        time.sleep(0.5)
        check()
except InterruptionError as error:
    sys.stderr.write(f"rosebatch: error: {error}\\n")
    time.sleep(2)
    raise SystemExit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("code", "message"), [(LATE, "ended by SIGTERM"), (BUSY, "ended by SIGTERM: 7 rows are saved"), (THREAD, "")]
)
def test_a_signal_ends_the_process_whatever_it_computes(code, message):
    """A text of 11 MB, or a grammar, held it up for minutes: in the main thread, or by a thread that was joined.

    Where both threads end it, the message came twice.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(PATIENCE_SECONDS) == 143
        finally:
            process.kill()
        assert process.stderr.read() == (f"rosebatch: error: {message}\n" if message else "")


def test_a_run_that_ends_in_time_is_left_alone():
    """The thread must not end a process that goes on to other work, nor leave a descriptor open."""
    before = len(list(Path("/dev/fd").iterdir()))
    interrupts = Interrupts()
    with interrupts.watch(), interrupts.listen() as check:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptionError):
            check()
    assert signal.set_wakeup_fd(-1) == -1
    until(lambda: len(list(Path("/dev/fd").iterdir())) == before)


# A finalizer, as imports have: KeyboardInterrupt is printed there, and lost.
IMPORTS = """
import os, signal, sys
from rosebatch.cli.early_signals import end_at_once

end_at_once()
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))

Finalized()
print("went on")
"""


# Ctrl-C while the very first module is imported: Python's own handler is still there.
FIRST_IMPORT = """
import os, signal, sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == "rosebatch.cli.early_signals":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
import rosebatch.__main__
"""


def test_an_interrupt_of_the_first_import():
    """It printed a traceback."""
    ended = subprocess.run([sys.executable, "-c", FIRST_IMPORT], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_run_ends_the_process_at_once(number):
    """KeyboardInterrupt inside an import of torch aborted the process, or was ignored and the run went on."""
    ended = subprocess.run([sys.executable, "-c", IMPORTS, str(int(number))], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-number, "", "")


def test_an_ignored_signal_stays_ignored():
    """Ctrl-C on a script would end the run in its background."""
    code = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{IMPORTS}"
    command = [sys.executable, "-c", code, str(int(signal.SIGINT))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")


def test_a_run_leaves_an_ignored_signal_alone():
    """The other signal still ends it, once and at once."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts().listen() as check:
            os.kill(os.getpid(), signal.SIGINT)
            check()
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(InterruptionError, match="SIGTERM"):
                check()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_first_process_of_a_container_handles_signals(monkeypatch):
    """The system ignores those that it does not handle: a container could not be stopped while it loaded a model."""
    handlers = {}
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    end_at_once()
    for number, handler in handlers.items():
        handler(number, None)
    assert codes == [130, 143]
