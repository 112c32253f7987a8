"""Workers as processes of this machine."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rosebatch.config.run import RunConfig
from rosebatch.host.child_process import ChildProcess
from rosebatch.job.workers.devices import environments
from rosebatch.job.workers.hosts import Worker


class Machine:
    """See ``rosebatch.job.workers.hosts.Hosts``.

    Raises:
        FlagError: there are fewer GPUs than workers.
    """

    def __init__(self, config: RunConfig) -> None:
        self._places = environments(config.data_parallel_size, config.device, config.tensor_parallel_size)
        self.names: Sequence[str] = [name for name, _ in self._places]

    def start(self, number: int, receive: Callable[[Any], None], *, loud: bool) -> Worker:
        """See ``Hosts``."""
        return ChildProcess("rosebatch.job.workers.child", self._places[number][1], receive, loud=loud)

    def close(self, workers: Iterable[Worker]) -> None:
        """See ``Hosts``."""
        for worker in workers:
            worker.kill()
