"""One of many processes goes first."""

import errno
import os
import signal
import subprocess
import sys
import threading

from rosebatch.host import run_once as module
from rosebatch.host.run_once import run_once
from tests.helpers.waiting import PATIENCE_SECONDS, until

HOLD = (
    "import sys, time; from pathlib import Path; from rosebatch.host.run_once import run_once\n"
    "with run_once(Path(sys.argv[1])): print('in', flush=True); time.sleep(3600)\n"
)


def test_the_first_goes_alone_and_the_others_together(tmp_path, monkeypatch):
    """All compiled the same kernels at once; or, one by one, they waited for each other without need."""
    events, first_in, may_leave = [], threading.Event(), threading.Event()
    together = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    lock, refused = module._lock, set()

    def locked(descriptor, kind):
        found = lock(descriptor, kind)
        if not found:
            refused.add(threading.get_ident())
        return found

    monkeypatch.setattr(module, "_lock", locked)

    def first():
        with run_once(tmp_path / "cache" / "lock"):
            first_in.set()
            may_leave.wait(PATIENCE_SECONDS)
            events.append("first")

    def other():
        with run_once(tmp_path / "cache" / "lock", PATIENCE_SECONDS):
            events.append("other")
            together.wait()

    threads = [threading.Thread(target=first), *(threading.Thread(target=other) for _ in range(2))]
    threads[0].start()
    first_in.wait(PATIENCE_SECONDS)
    for thread in threads[1:]:
        thread.start()
    until(lambda: len(refused) == 2)
    assert events == []
    may_leave.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert events == ["first", "other", "other"]


def test_a_first_one_that_dies_or_hangs(tmp_path, monkeypatch):
    """The others would wait for ever."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"in\n"
        with run_once(tmp_path / "lock", max_seconds=0.1):
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        # Nobody waits any more.
        monkeypatch.setattr(module, "time", None)
        with run_once(tmp_path / "lock"):
            pass


def test_files_that_cannot_be_locked(tmp_path, monkeypatch):
    """A worker that may not lock waited for minutes, or failed."""
    (tmp_path / "file").write_text("")
    with run_once(tmp_path / "file" / "lock"):
        pass

    def refuse(descriptor, kind):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    monkeypatch.setattr(module, "time", None)
    with run_once(tmp_path / "lock"):
        pass
