"""Where workers run: what the parent needs of processes of this machine, and of actors of a Ray cluster."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol


class Process(Protocol):
    """The process of a worker, or its actor. It ends with its parent, however that ends."""

    def send(self, message: Any) -> None:
        """Send a message, without waiting."""
        ...

    def kill(self) -> None:
        """End the process at once."""
        ...

    def how_it_ended(self) -> str:
        """For people, once the process is gone."""
        ...


class Hosts(Protocol):
    """Places for the workers of one job.

    Attributes:
        names: of the places. A name is final once its worker has sent a message.
    """

    names: Sequence[str]

    def start(self, number: int, receive: Callable[[Any], None], *, loud: bool) -> Process:
        """Start a worker.

        Args:
            number: of the place.
            receive: called with each message, and with None once the worker is gone. On another thread.
            loud: whether the worker's stderr is the parent's, where that is possible.
        """
        ...

    def close(self, workers: Iterable[Process]) -> None:
        """End these workers, and give back what they used."""
        ...
