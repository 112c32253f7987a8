"""Rank 0: starts the other processes, and sends them every plan that it computes."""

import weakref
from collections.abc import Callable
from functools import partial
from threading import Condition
from typing import Any, NoReturn

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import LostProcessError
from rosebatch.engine.plan import StepPlan, StepResult
from rosebatch.engine.step_runner import Masks, StepRunner
from rosebatch.host.child_process import ChildProcess, Failed
from rosebatch.launch import messages as m
from rosebatch.ops.shard import Shard

# How long a failed step waits for the news that another process is gone.
_PATIENCE_SECONDS = 10.0


class Ranks:
    """The other processes that hold the model. They end with this one, or with this object.

    Args:
        config: of the run.
        store: path of the store where the processes find each other.
        state: of the model's files.
    """

    def __init__(self, config: RunConfig, store: str, state: str) -> None:
        self._size = config.tensor_parallel_size
        self._changed = Condition()
        self._ready = 0
        self._lost: str | None = None
        self._why: dict[int, str] = {}
        self._on_loss: Callable[[], None] = _nothing
        self._endings: list[Callable[[], None]] = []
        self._processes: list[ChildProcess] = []
        for rank in range(1, self._size):
            # Their threads must not keep this object alive.
            receive = partial(_receive, weakref.ref(self), rank)
            self._processes.append(ChildProcess("rosebatch.launch.tp_worker", {}, receive, loud=False))
            self._processes[-1].send(m.Setup(config, Shard(rank, self._size), store, state))
        weakref.finalize(self, _end, self._endings, self._processes)

    def await_ready(self) -> None:
        """Wait until all of them are about to join the group.

        Raises:
            LostProcessError: one of them is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or self._ready == self._size - 1)
        self.require_all()

    def on_loss(self, call: Callable[[], None]) -> None:
        """Have this called once one of them is gone, on another thread."""
        self._on_loss = call

    def at_end(self, call: Callable[[], None]) -> None:
        """Have this called when this object ends, while the processes are there; the last one given comes first.

        It must not hold this object.
        """
        self._endings.append(call)

    def send(self, message: Any) -> None:
        """Send a message to all of them, without waiting.

        Raises:
            LostProcessError: one of them is gone.
        """
        self.require_all()
        for process in self._processes:
            process.send(message)

    def require_all(self) -> None:
        """Do nothing while all of them are there.

        Raises:
            LostProcessError: one of them is gone.
        """
        if self._lost is not None:
            raise LostProcessError(self._lost)

    def explain(self, error: Exception) -> NoReturn:
        """Raise the reason for an error of a collective: it fails as soon as one of the processes is gone.

        Raises:
            LostProcessError: one of them is gone.
            Exception: ``error``, if all of them are there.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, _PATIENCE_SECONDS)
        if self._lost is not None:
            raise LostProcessError(self._lost) from error
        raise error

    def receive(self, rank: int, message: Any) -> Callable[[], None]:
        """Take in a message of one of them; None: it is gone. On its own thread.

        Returns:
            what is to be done then.
        """
        if isinstance(message, Failed):
            self._why[rank] = message.message
        elif message is None:
            why = self._why.get(rank) or f"died ({self._processes[rank - 1].how_it_ended()})"
            with self._changed:
                self._lost = self._lost or f"rank {rank} of {self._size}: {why}"
                self._changed.notify_all()
            return self._on_loss
        else:
            with self._changed:
                self._ready += 1
                self._changed.notify_all()
        return _nothing


def _nothing() -> None:
    pass


def _receive(ranks: "weakref.ref[Ranks]", rank: int, message: Any) -> None:
    found = ranks()
    if found is not None:
        react = found.receive(rank, message)
        # That may wait for what the object's end frees.
        del found
        react()


def _end(endings: list[Callable[[], None]], processes: list[ChildProcess]) -> None:
    try:
        for call in reversed(endings):
            call()
    finally:
        for process in processes:
            process.kill()


class DriverRunner:
    """Carries out plans together with the other processes; see ``rosebatch.engine.step_runner.StepRunner``.

    Args:
        own: runs this process's shard.
        send: sends a message to all others.
        explain: raises the reason for an error.
        require_all: raises if one of the others is gone.
    """

    def __init__(
        self,
        own: StepRunner,
        send: Callable[[Any], None],
        explain: Callable[[Exception], NoReturn],
        require_all: Callable[[], None],
    ) -> None:
        self.own = own
        self._send = send
        self._explain = explain
        self._require_all = require_all

    def launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """See ``StepRunner``."""

        def sent() -> Any:
            found = masks()
            self._send(m.Masks(found))
            return found

        self._send(m.Launch(plan))
        try:
            wait = self.own.launch(plan, sent)
        except Exception as error:
            self._explain(error)

        def result() -> StepResult:
            try:
                found = wait()
            except Exception as error:
                self._explain(error)
            # Without one of them, the kernels of the others go on with wrong sums.
            self._require_all()
            return found

        return result
