"""Workers as actors of a Ray cluster. Nothing else imports Ray."""

import os
import pickle
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import Any, Literal

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError, InterruptionError, LostProcessError, UserError
from rosebatch.core.version import __version__
from rosebatch.host.child_process import Failed
from rosebatch.job.workers.actor import WorkerActor
from rosebatch.job.workers.hosts import Process
from rosebatch.job.workers.machine import THREADS
from rosebatch.job.workers.ray_guard import RayGuard

LOCAL = "local"
# In the environment of a Ray of our own.
_MARK = "ROSEBATCH_RAY"
# A worker that has not begun by then is waiting for a place: a process starts in a few seconds.
_PLACING_SECONDS = 20.0
# Of a Ray that we start: messages are small, and results leave it at once.
_STORE_BYTES = 128 << 20
# Characters of Ray's reason for the end of an actor.
_MAX_SHOWN = 200
# How long the end of an actor is waited for before Ray is shut down.
_END_SECONDS = 5.0


class RayCluster:
    """See ``rosebatch.job.workers.hosts.Hosts``.

    Each worker is an actor with a GPU of its own, or with CPUs where no GPU is wanted. Ray ends the actors of a parent
    that has died.

    Args:
        config: of the run. ``ray`` is the address, ``auto`` for the one that Ray finds, or ``local``.

    Raises:
        UserError: Ray is not installed, or there is no cluster.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.ray is not None
        self._ray = _import_ray(config.ray)
        self._workers: list[_RayWorker] = []
        self._is_ours = not self._ray.is_initialized()
        self._guard: RayGuard | None = None
        if self._is_ours:
            with _own_signal_handlers(), _marked(config.ray) as self._guard:
                _connect(self._ray, config.ray)
        try:
            self._find_places(config)
        except BaseException:
            self.close([])
            raise

    def _find_places(self, config: RunConfig) -> None:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        cpus = [int(node.get("CPU", 0)) for node in nodes]
        self._uses_gpus = config.device == "cuda" or (config.device == "auto" and gpus > 0)
        count = _count(config.data_parallel_size, gpus // config.tensor_parallel_size if self._uses_gpus else 1)
        cores = 1 if self._uses_gpus else cpus_of_each(cpus, count)
        self._needs: dict[str, Any] = {"num_gpus": config.tensor_parallel_size * self._uses_gpus, "num_cpus": cores}
        self._environment = {} if self._uses_gpus else dict.fromkeys(THREADS, str(cores))
        self._names = [f"Ray {number}" for number in range(count)]
        self.names: Sequence[str] = self._names
        self._has_warned = False
        self._lock = Lock()

    def start(self, number: int, receive: Callable[[Any], None], *, loud: bool) -> Process:
        """See ``Hosts``. The stderr of an actor is in Ray's logs."""
        actor = self._ray.remote(WorkerActor).options(**self._needs, max_concurrency=3, max_restarts=0).remote()

        def place(node: str, gpus: Sequence[str]) -> None:
            self._names[number] = f"{node} GPU {'+'.join(gpus)}" if self._uses_gpus else f"{node} CPU {number}"

        worker = _RayWorker(self._ray, actor, self._environment, receive, place=place, is_late=self._warn_once)
        self._workers.append(worker)
        return worker

    def close(self, workers: Iterable[Process]) -> None:
        """See ``Hosts``."""
        error = sys.exc_info()[1]
        # After a signal there is no time, and the process ends: the guard ends our own Ray, a cluster ends the actors.
        if isinstance(error, InterruptionError):
            return
        # A Ray that is lost may never answer.
        is_lost = isinstance(error, LostProcessError)
        for worker in () if is_lost else workers:
            worker.kill()
        if self._is_ours:
            # A thread that used Ray afterwards would connect to a new one.
            end = time.monotonic() + _END_SECONDS
            for each in () if is_lost else self._workers:
                each.wait(end)
            ending = Thread(target=self._ray.shutdown, daemon=True)
            ending.start()
            ending.join(_END_SECONDS)
        if self._guard is not None:
            self._guard.end()

    def _warn_once(self) -> None:
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        needed = ", ".join(f"{count} {name[4:-1].upper()}" for name, count in self._needs.items() if count)
        free = self._ray.available_resources()
        found = ", ".join(f"{int(free.get(name, 0))} {name}" for name in ("GPU", "CPU"))
        sys.stderr.write(
            f"rosebatch: waiting for Ray to start a worker, which needs {needed}; free in the cluster now: {found}\n"
        )


class _RayWorker:
    """An actor, and two threads as of a process: one sends to it, one receives.

    The sender has one call under way at a time, which carries all messages that wait. So they stay in order, and rows
    cost few calls.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        environment: Mapping[str, str],
        receive: Callable[[Any], None],
        *,
        place: Callable[[str, Sequence[str]], None],
        is_late: Callable[[], None],
    ) -> None:
        self._ray, self._actor = ray, actor
        self._environment = environment
        self._place, self._is_late = place, is_late
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._begun, self._gone = Event(), Event()
        self._how = ""
        self._threads = [
            Thread(target=self._send, daemon=True),
            Thread(target=self._receive, args=(receive,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """See ``Process``."""
        self._outbox.put(message)

    def kill(self) -> None:
        """See ``Process``. Ray needs a moment for it."""
        if self._gone.is_set():
            return
        self._gone.set()
        # Both wake the sender.
        self._begun.set()
        self._outbox.put(None)
        with suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)

    def wait(self, end: float) -> None:
        """Wait until its threads use Ray no more, to a time of ``time.monotonic`` at most."""
        for thread in self._threads:
            if thread is not current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def how_it_ended(self) -> str:
        """See ``Process``."""
        return self._how

    def _send(self) -> None:
        self._begun.wait()
        # The other thread notices when an actor is gone.
        with suppress(self._ray.exceptions.RayError):
            while True:
                messages = [self._outbox.get()]
                with suppress(Empty):
                    while True:
                        messages.append(self._outbox.get_nowait())
                if self._gone.is_set():
                    return
                pickled = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
                self._ray.get(self._actor.send.remote(pickled))

    def _receive(self, receive: Callable[[Any], None]) -> None:
        try:
            node, gpus, version = self._started()
            self._place(node, gpus)
            if version != __version__:
                receive(Failed(f"{node}: has rosebatch {version}, and this machine {__version__}"))
                self.kill()
                return
            self._begun.set()
            while not self._gone.is_set():
                for message in pickle.loads(self._ray.get(self._actor.receive.remote())):
                    receive(message)
        except Exception as error:
            self._how = short_reason(str(error))
        # It may only be out of reach, and must not hold its GPU then.
        self.kill()
        receive(None)

    def _started(self) -> Any:
        self._require_nodes()
        begun = self._actor.start.remote(self._environment, str(Path.cwd()))
        while not self._ray.wait([begun], timeout=_PLACING_SECONDS)[0]:
            self._require_nodes()
            self._is_late()
        return self._ray.get(begun)

    def _require_nodes(self) -> None:
        """Without a node, Ray would wait for one for ever."""
        if not any(node["Alive"] for node in self._ray.nodes()):
            raise UserError("the Ray cluster has no node left")


def cpus_of_each(nodes: Sequence[int], workers: int) -> int:
    """The most CPUs that each worker can have so that all find a place; 1 if they find none.

    Args:
        nodes: CPUs of each node.
        workers: their number.
    """
    fit = (cpus for cpus in range(max(nodes, default=0), 0, -1) if sum(node // cpus for node in nodes) >= workers)
    return next(fit, 1)


def short_reason(text: str) -> str:
    """One line of Ray's text about an error."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    last = lines[-1] if lines else "no reason given"
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes| There are some|$)", last)
    return (detail[1] if detail else last)[:_MAX_SHOWN].rstrip(".")


def _count(size: int | Literal["auto"], places: int) -> int:
    if size != "auto":
        return size
    if not places:
        raise FlagError("--data-parallel-size auto: the Ray cluster has no GPU now; give a number to wait for them")
    return places


def _import_ray(address: str) -> Any:
    # Read when Ray is imported. Else a Ray that we start would report each run to its makers.
    # The handler of failures would write a stack of C++ at SIGTERM.
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    if address == LOCAL:
        # Its processes run what they are sent: they listen on loopback, as on systems where Ray has no clusters, and
        # take no message without this token.
        own |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
        own |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in own.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UserError("--ray: the package is not installed; pip install 'rosebatch[ray]'") from None
    return ray


def _connect(ray: Any, address: str) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
    try:
        if address == LOCAL:
            ray.init(LOCAL, include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
        else:
            ray.init(address, **quiet)
    except SystemExit:
        # Ray's own answer to SIGTERM.
        raise InterruptionError(signal.SIGTERM) from None
    except Exception as error:
        raise UserError(f"--ray {address}: {short_reason(str(error))}") from None
    # Ray prints deaths of actors to stdout, where results may go; log_to_driver is for their own output only. The
    # parent reports deaths itself.
    ray._private.worker._worker_logs_enabled = False


@contextmanager
def _marked(address: str) -> Iterator[RayGuard | None]:
    """A guard of the processes that a Ray of our own starts inside the ``with`` block."""
    if address != LOCAL:
        yield None
        return
    value = secrets.token_hex(16)
    guard = RayGuard(f"{_MARK}={value}")
    os.environ[_MARK] = value
    try:
        yield guard
        guard.is_up()
    finally:
        # Processes of a program that uses the library are not Ray's.
        del os.environ[_MARK]


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray puts handlers in the place of those of the command line."""
    if current_thread() is not main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
