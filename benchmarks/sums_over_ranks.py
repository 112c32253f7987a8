"""Times of a sum over the GPUs of a model and the norm behind it: by NCCL, and inside of the norm's kernel.

``python -m benchmarks.sums_over_ranks [GPUS]`` prints microseconds in a CUDA graph, in bf16. The kernel
sums in one shot and in two, also where a run would not.
"""

import sys
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, multiprocessing

from benchmarks.kernels.launchers import Launchers
from rosebatch.launch.group import TorchGroup, open_store
from rosebatch.launch.symmetric import AllReduceBuffers
from rosebatch.ops.shard import Shard
from rosebatch_kernels.common.timing import median_us

_NORM = Launchers("norm.kernel")
_ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SIZES = (4096, 8192)
_EPS = 1e-6
_Sum = tuple[Tensor, Tensor]


def main() -> None:
    """Start a process for each GPU."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    with TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, (size, f"{folder}/store"), nprocs=size)  # type: ignore[attr-defined, no-untyped-call, unused-ignore]


def _run(rank: int, size: int, store: str) -> None:
    torch.cuda.set_device(rank)
    group = TorchGroup(Shard(rank, size), open_store(store, size), torch.device("cuda"))
    for columns in _SIZES:
        limit, like = max(_ROWS), (columns, torch.bfloat16, torch.device("cuda"))
        # A sum of one row is always in one shot.
        shots = {
            "one shot": AllReduceBuffers(group.shard, limit, 0, *like),
            "two": AllReduceBuffers(group.shard, 1, limit, *like),
        }
        for rows in _ROWS:
            generator = torch.Generator("cuda").manual_seed(rank)
            x = torch.randn(rows, columns, generator=generator, device="cuda").bfloat16()
            residual, weight = torch.ones_like(x), torch.ones(columns, device="cuda").bfloat16()

            inputs = x, residual, weight
            # NCCL rounds each partial sum to 16 bits; the kernel adds up in fp32.
            expected = _NORM.add_rms_norm(group.sum_(x.float()).to(x.dtype), residual, weight, _EPS)
            line = f"{size} GPUs  {rows:5} x {columns}"
            # The ranks make the same number of calls, so the turns of memory stay in step.
            for name, exchanges in shots.items():
                inside = partial(_inside, exchanges, *inputs)
                _require_equal(group, inside(), expected)
                line += f"  {name} {median_us(inside):7.1f} µs"
            line += f"  NCCL {median_us(partial(_by_nccl, group, *inputs)):7.1f} µs"
            if rank == 0:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()


def _by_nccl(group: TorchGroup, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return _NORM.add_rms_norm(group.sum_(x), residual, weight, _EPS)


def _inside(exchanges: AllReduceBuffers, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return _NORM.add_rms_norm(x, residual, weight, _EPS, all_reduce=exchanges.next(len(x)))


def _require_equal(group: TorchGroup, found: _Sum, expected: _Sum) -> None:
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=2e-2, atol=2e-2)
    # The same bits in each process.
    whole = group.gather(found[0])
    assert all(torch.equal(part, whole[0]) for part in whole), "the ranks have different sums"


if __name__ == "__main__":
    main()
