"""Times of a sum over the GPUs of a model and the norm behind it: by NCCL, and inside of the norm's kernel.

``python -m rosebatch.bench.scripts.sums_over_ranks [GPUS]`` prints microseconds of both, in a CUDA graph, in bf16.
"""

import sys

import torch
from torch import multiprocessing

from rosebatch.ranks.group import TorchGroup, find_store, open_store
from rosebatch.share import Share
from rosebatch_kernels.common.timing import median_us
from rosebatch_kernels.norm import kernel as norm

_ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SIZES = (4096, 8192)
_EPS = 1e-6


def main() -> None:
    """Start a process for each GPU."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    store = open_store(size)
    multiprocessing.spawn(_run, (size, store.port), nprocs=size)  # type: ignore[attr-defined, no-untyped-call, unused-ignore]


def _run(rank: int, size: int, port: int) -> None:
    torch.cuda.set_device(rank)
    group = TorchGroup(Share(rank, size), find_store(port, size), torch.device("cuda"))
    for columns in _SIZES:
        # For more rows than a run gives the kernel: the figures say where NCCL is faster.
        group.prepare_all(max(_ROWS), columns, torch.bfloat16)
        for rows in _ROWS:
            generator = torch.Generator("cuda").manual_seed(rank)
            x = torch.randn(rows, columns, generator=generator, device="cuda").bfloat16()
            residual, weight = torch.ones_like(x), torch.ones(columns, device="cuda").bfloat16()

            def by_nccl(x: torch.Tensor = x, residual: torch.Tensor = residual, weight: torch.Tensor = weight) -> None:
                norm.add_rms_norm(group.sum_(x), residual, weight, _EPS)

            def inside(x: torch.Tensor = x, residual: torch.Tensor = residual, weight: torch.Tensor = weight) -> None:
                exchange = group.exchange(len(x), x.shape[1], x.dtype)
                norm.add_rms_norm(x, residual, weight, _EPS, exchange=exchange)

            _require_equal(group, x, residual, weight)
            # The ranks make the same number of calls, so the turns of memory stay in step.
            line = f"{size} GPUs  {rows:5} x {columns}  inside {median_us(inside):7.1f} µs"
            line += f"  NCCL {median_us(by_nccl):7.1f} µs"
            if rank == 0:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()


def _require_equal(group: TorchGroup, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    exchange = group.exchange(len(x), x.shape[1], x.dtype)
    found = norm.add_rms_norm(x, residual, weight, _EPS, exchange=exchange)
    # NCCL rounds each partial sum to 16 bits; the kernel does not.
    expected = norm.add_rms_norm(group.sum_(x.float()).to(x.dtype), residual, weight, _EPS)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=2e-2, atol=2e-2)
    # The same bits in each process.
    whole = group.gather(found[0])
    assert all(torch.equal(part, whole[0]) for part in whole), "the ranks have different sums"


if __name__ == "__main__":
    main()
