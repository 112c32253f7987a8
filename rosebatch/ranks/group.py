"""The processes that hold a model, by PyTorch's collectives: NCCL between GPUs, gloo between CPUs."""

import gc
import os
from collections.abc import Sequence
from datetime import timedelta
from threading import Event, Lock, Thread

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rosebatch.errors import FlagError
from rosebatch.ops import Exchange
from rosebatch.ranks.symmetric import Exchanges
from rosebatch.share import Share

_HOST = "127.0.0.1"
# The others import PyTorch meanwhile, and a slow disk may hold it.
_TO_JOIN = timedelta(minutes=10)
# Of a collective. A process that dies is noticed at once, by the end of its connection.
_TO_WAIT = timedelta(days=1)
# Bytes of a sum over ranks that the kernel of a norm makes in one shot: each rank reads the parts of all others. More
# go in two shots. Not between two ranks: there, two shots move as much.
_IN_ONE_SHOT = 512 << 10
# Bytes of a sum inside of that kernel. On two and four GPUs it is faster than NCCL at all sizes: a limit of memory.
_MOST_EXCHANGED = 256 << 20


# PyTorch 2.13 renamed it.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class TorchGroup:
    """See ``rosebatch.divided_ops.Group``.

    Args:
        share: of this process.
        store: where the processes find each other.
        device: of this process.
    """

    def __init__(self, share: Share, store: TCPStore, device: torch.device) -> None:
        self.share = share
        self._device = device
        self._exchanges: Exchanges | None = None
        self._closing, self._aborting = Event(), Lock()
        if distributed.is_initialized():
            # Nobody may hold that model any more, and Python not have noticed.
            gc.collect()
        if distributed.is_initialized():
            raise FlagError(f"--tensor-parallel-size {share.size}: this process has another divided model already")
        on_gpu = device.type == "cuda"
        # All processes are on one machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Multicast over NVLink needs rights that containers often lack, and NCCL fails without them.
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        if on_gpu:
            # Each process sees all GPUs: PyTorch refuses shared memory of ranks whose GPUs have the same number.
            torch.cuda.set_device(share.rank)
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=share.rank,
            world_size=share.size,
            timeout=_TO_WAIT,
            device_id=torch.device("cuda", share.rank) if on_gpu else None,
        )

    def sum_(self, tensor: Tensor) -> Tensor:
        """See ``Group``."""
        distributed.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """See ``Group``."""
        parts = tensor.new_empty(self.share.size * len(tensor), *tensor.shape[1:])
        _gather(parts, tensor)
        return parts.view(self.share.size, *tensor.shape)

    def exchange(self, rows: int, size: int, dtype: torch.dtype) -> Exchange | None:
        """See ``Group``."""
        assert self._exchanges is not None and self._exchanges.fits(size, dtype), "see prepare"
        return self._exchanges.next(rows)

    def prepare(self, rows: int, size: int, dtype: torch.dtype) -> None:
        """See ``Group``."""
        row = size * dtype.itemsize
        most = max(1, min(rows, _MOST_EXCHANGED // row))
        few = most if self.share.size == 2 else max(1, min(rows, _IN_ONE_SHOT // row))
        self._exchanges = Exchanges(self.share, few, most if most > few else 0, size, dtype, self._device)

    def least(self, numbers: Sequence[int]) -> list[int]:
        """See ``Group``."""
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return found.tolist()

    def abandon(self) -> None:
        """End what waits for another process that is gone. Between CPUs, that fails by itself.

        Returns when no graph holds kernels of NCCL any more.
        """
        if self._device.type == "cuda":
            if self._exchanges is not None:
                Thread(target=self._exchanges.let_go, args=(self._closing,), daemon=True).start()
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


def open_store(size: int) -> TCPStore:
    """A store for so many processes, at a free port of this machine."""
    return TCPStore(_HOST, 0, size, is_master=True, timeout=_TO_JOIN, wait_for_workers=False)


def find_store(port: int, size: int) -> TCPStore:
    """The store that another process has opened."""
    return TCPStore(_HOST, port, size, is_master=False, timeout=_TO_JOIN)
