"""The first signal ends a run only where the run may end; a second one ends it at once."""

import os
import signal

import pytest

from rosebatch.cli.interrupts import Interrupts
from rosebatch.errors import InterruptionError


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
