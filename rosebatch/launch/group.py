"""The processes that hold a model, by PyTorch's collectives: NCCL between GPUs, gloo between CPUs."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Event, Lock, Thread

import torch
from torch import Tensor, distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from rosebatch.core.errors import FlagError
from rosebatch.launch.symmetric import AllReduceBuffers
from rosebatch.ops.ops import AllReduce
from rosebatch.ops.shard import Shard

# The others import PyTorch meanwhile, and a slow disk may hold it.
_TO_JOIN = timedelta(minutes=10)
# Of a collective. A process that dies is noticed at once, by the end of its connection.
_TO_WAIT = timedelta(days=1)
# Bytes of a sum over ranks that the kernel of a norm makes in one shot: each rank reads the parts of all others. More
# go in two shots. Not between two ranks: there, two shots move as much.
_IN_ONE_SHOT = 512 << 10


# PyTorch 2.13 renamed it.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class TorchGroup:
    """See ``rosebatch.ops.tensor_parallel.Group``.

    Args:
        shard: of this process.
        store: where the processes find each other.
        device: of this process.
    """

    def __init__(self, shard: Shard, store: FileStore, device: torch.device) -> None:
        self.shard = shard
        self._device = device
        self._all_reduces: AllReduceBuffers | None = None
        self._closing, self._aborting = Event(), Lock()
        if distributed.is_initialized():
            # Nobody may hold that model any more, and Python not have noticed.
            gc.collect()
        if distributed.is_initialized():
            raise FlagError(f"--tensor-parallel-size {shard.size}: this process has another divided model already")
        on_gpu = device.type == "cuda"
        # All processes are on one machine, and nobody else has anything to say.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, loopback)
        # Multicast over NVLink needs rights that containers often lack, and NCCL fails without them.
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        if on_gpu:
            # Each process sees all GPUs: PyTorch refuses shared memory of ranks whose GPUs have the same number.
            torch.cuda.set_device(shard.rank)
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.size,
            timeout=_TO_WAIT,
            device_id=torch.device("cuda", shard.rank) if on_gpu else None,
        )

    def sum_(self, tensor: Tensor) -> Tensor:
        """See ``Group``."""
        distributed.all_reduce(tensor)
        return tensor

    def sum_in_order_(self, tensor: Tensor) -> Tensor:
        """See ``Group``."""
        if self.shard.size == 2:
            # Two numbers have no order.
            return self.sum_(tensor)
        first, *others = self.gather(tensor)
        total = first.float()
        for other in others:
            total += other
        return tensor.copy_(total)

    def gather(self, tensor: Tensor) -> Tensor:
        """See ``Group``."""
        parts = tensor.new_empty(self.shard.size * len(tensor), *tensor.shape[1:])
        _gather(parts, tensor)
        return parts.view(self.shard.size, *tensor.shape)

    def all_reduce(self, rows: int, size: int, dtype: torch.dtype) -> AllReduce | None:
        """See ``Group``."""
        assert self._all_reduces is not None and self._all_reduces.fits(size, dtype), "see prepare"
        return self._all_reduces.next(rows)

    def prepare(self, rows: int, size: int, dtype: torch.dtype) -> None:
        """See ``Group``."""
        few = rows if self.shard.size == 2 else max(1, min(rows, _IN_ONE_SHOT // (size * dtype.itemsize)))
        self._all_reduces = AllReduceBuffers(self.shard, few, rows if rows > few else 0, size, dtype, self._device)

    def all_min(self, numbers: Sequence[int]) -> list[int]:
        """See ``Group``."""
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return found.tolist()

    def abandon(self) -> None:
        """End what waits for another process that is gone. Between CPUs, that fails by itself.

        Returns when no graph holds kernels of NCCL any more.
        """
        if self._device.type == "cuda":
            if self._all_reduces is not None:
                Thread(target=self._all_reduces.let_go, args=(self._closing,), daemon=True).start()
            self._abort()

    def close(self) -> None:
        """Leave the group, whether the others are still there or not. No graph may hold kernels of NCCL."""
        self._closing.set()
        if self._device.type == "cuda":
            self._abort()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _abort(self) -> None:
        with self._aborting:
            if distributed.is_initialized():
                distributed.distributed_c10d._abort_process_group()


def new_store() -> tuple[str, Callable[[], None]]:
    """The path of an empty file for a store, and what removes it.

    On Linux the file has no name: nothing is left of processes that are killed. PyTorch may read it as long as this
    process lives, and another file must not get its descriptor before. So that stays open.
    """
    if sys.platform == "linux":
        with TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        return f"/proc/{os.getpid()}/fd/{descriptor}", lambda: None
    folder = TemporaryDirectory(prefix="rosebatch-", ignore_cleanup_errors=True)
    return str(Path(folder.name) / "store"), folder.cleanup


def open_store(path: str, size: int) -> FileStore:
    """A store for so many processes, in a file that only their user can open.

    PyTorch's store over TCP listens on all interfaces, and whoever connects may read and write.
    """
    store = FileStore(path, size)
    store.set_timeout(_TO_JOIN)
    return store
