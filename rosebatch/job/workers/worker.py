"""What a pool knows of each of its workers, and what it asks of the task that they serve."""

from dataclasses import dataclass
from typing import Protocol

from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.hosts import Process


@dataclass(slots=True)
class Worker:
    """A place for a process, which is replaced when it dies.

    Attributes:
        name: of its device.
        process: None once the worker is given up.
        life: number of the process; messages of earlier ones are ignored.
        planned: whether the process has found the model.
        is_same: whether the model's files are in the state of those that the first process found.
        loads: whether it was told to load them.
        ready: its message when the model was loaded.
        lost: why it cannot go on, if it has sent that.
        started: when the process was, on the clock of ``time.perf_counter``.
        joined: when the last task was sent to it, on the clock of ``time.perf_counter``.
        begun: whether it works on a task, and has not sent ``Done`` yet.
        done: its message at the end of the last task; the first token's time is on this process's clock.
        silence: seconds since the process sent something, as far as this one could listen.
        deaths: of processes since the last answer.
        false_starts: processes in a row that died before the model was loaded.
        restarts: processes that died, ever.
    """

    name: str
    process: Process | None = None
    life: int = 0
    planned: bool = False
    is_same: bool = False
    loads: bool = False
    ready: m.Ready | None = None
    lost: str | None = None
    started: float = 0.0
    joined: float = 0.0
    begun: bool = False
    done: m.Done | None = None
    silence: float = 0.0
    deaths: int = 0
    false_starts: int = 0
    restarts: int = 0


class Task(Protocol):
    """What the workers of a pool serve."""

    @property
    def message(self) -> m.Begin:
        """The first message to a worker."""
        ...

    def turn(self) -> None:
        """Called before each wait for messages: check for signals, and hand rows out."""
        ...

    def flush(self) -> None:
        """Called after the messages of a turn."""
        ...

    def join(self, number: int) -> None:
        """A worker takes part."""
        ...

    def take_results(self, number: int, results: m.Results) -> None:
        """A worker has served rows."""
        ...

    def hear(self, number: int, outlook: Outlook) -> None:
        """A worker is alive, and has this before it."""
        ...

    def died(self, number: int, how: str) -> None:
        """A worker's process is gone; another one may follow."""
        ...

    def lose(self) -> None:
        """One worker is given up."""
        ...

    def rename(self, number: int, name: str) -> None:
        """A worker has another device now."""
        ...
