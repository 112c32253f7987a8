"""Workers as processes of this machine, and what each of them gets of its devices. Without PyTorch."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rosebatch.config.run import Device, RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.core.words import counted
from rosebatch.host.child_process import ChildProcess
from rosebatch.host.gpus import VISIBLE, visible_gpus
from rosebatch.job.workers.hosts import Process

# Read when the libraries of a process are imported.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


class Machine:
    """See ``rosebatch.job.workers.hosts.Hosts``.

    Raises:
        FlagError: there are fewer GPUs than workers.
    """

    def __init__(self, config: RunConfig) -> None:
        self._places = environments(config.data_parallel_size, config.device, config.tensor_parallel_size)
        self.names: Sequence[str] = [name for name, _ in self._places]

    def start(self, number: int, receive: Callable[[Any], None], *, loud: bool) -> Process:
        """See ``Hosts``."""
        return ChildProcess("rosebatch.job.workers.child", self._places[number][1], receive, loud=loud)

    def close(self, workers: Iterable[Process]) -> None:
        """See ``Hosts``."""
        for worker in workers:
            worker.kill()


def environments(
    size: int | Literal["auto"], device: Device, gpus_of_each: int = 1
) -> list[tuple[str, Mapping[str, str]]]:
    """A name and the environment variables of each worker.

    On a CPU the workers share the cores evenly.

    Args:
        size: number of workers; ``auto``: as many as there are GPUs for, and one on a CPU.
        device: of the run.
        gpus_of_each: GPUs that hold a worker's model together.

    Raises:
        FlagError: there are fewer GPUs than workers.
    """
    gpus = [] if device == "cpu" else visible_gpus()
    if not gpus:
        count = 1 if size == "auto" else size
        cores = max(1, len(os.sched_getaffinity(0)) // count)
        return [(f"CPU {number}", dict.fromkeys(THREADS, str(cores))) for number in range(count)]
    count = max(1, len(gpus) // gpus_of_each) if size == "auto" else size
    if count * gpus_of_each > len(gpus):
        times = f" --tensor-parallel-size {gpus_of_each}" if gpus_of_each > 1 else ""
        raise FlagError(f"--data-parallel-size {count}{times}: this machine has {counted(len(gpus), 'GPU')}")
    of_each = [gpus[i * gpus_of_each : (i + 1) * gpus_of_each] for i in range(count)]
    return [(f"GPU {'+'.join(each)}", {VISIBLE: ",".join(each)}) for each in of_each]
