"""fp8 products of a Llama-8B layer against bf16, all in one process: ``python -m benchmarks.kernels.fp8``.

The thresholds and tiles of ``rosebatch_kernels.fp8.sizes`` follow from it. The last lines of each number of rows are
kernels with and without the fp8 form that they leave, and the kernel that makes it by itself.
"""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.fp8.fp8_linear import by_pytorch
from rosebatch_kernels.fp8.reference import BLOCK

# (in, out) of Llama-3.1-8B.
_SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate, up": (4096, 28672), "down": (14336, 4096)}
_ROWS = (1, 16, 64, 256, 2048, 8192)
# Up to which our kernel is timed.
_MAX_ROWS = 2048
# Bytes of the weights that take turns: more than the cache holds.
_BYTES = 2**28

_product, _quantize = Launchers("fp8.kernel"), Launchers("fp8.quantize")
_norm, _mlp = Launchers("norm.kernel"), Launchers("mlp.kernel")


def main() -> None:
    """Write a line for each number of rows, product and implementation, then the sum of the four products."""
    for rows in _ROWS:
        sums: Counter[str] = Counter()
        for name, shape in _SHAPES.items():
            sums.update(_products(f"{name} T={rows}", rows, *shape))
        for implementation, microseconds in sums.items():
            ratio = sums["bf16"] / microseconds
            sys.stdout.write(f"T={rows} all four, {implementation}: {microseconds:.0f} µs, {ratio:.2f} of bf16\n")
        _forms(rows)


def _products(name: str, rows: int, size_in: int, size_out: int) -> dict[str, float]:
    """Microseconds by implementation."""
    x, count = randn(rows, size_in), max(2, _BYTES // (size_in * size_out))
    weights = [randn(size_out, size_in) * size_in**-0.5 for _ in range(count)]
    flops = 2 * rows * size_in * size_out

    def time(implementation: str, step: Callable[[Tensor], object], matrices: list[Tensor]) -> float:
        label, inputs = f"{name:<18}{implementation}", [(each,) for each in matrices]
        return bench(label, step, inputs, calls=count, moved=matrices[0].nbytes, flops=flops)

    found = {"bf16": time("bf16", lambda weight: functional.linear(x, weight), weights)}
    numbers = [weight.to(torch.float8_e4m3fn) for weight in weights]
    for form, group in (("rows", 0), ("blocks", BLOCK)):
        scales = torch.ones((size_out // BLOCK, size_in // BLOCK) if group else (size_out,), device="cuda")
        quantized = _quantize.quantize(x, group)[:2]
        whole: dict[str, Any] = {"scales": scales, "bias": None, "dtype": torch.bfloat16}
        steps: dict[str, Callable[[Tensor], object]] = {"PyTorch": partial(by_pytorch, *quantized, **whole)}
        if rows <= _MAX_ROWS:
            steps["kernel"] = partial(_product.linear, *quantized, **whole)
            steps["parts"] = partial(_product.parts, *quantized, scales=scales)
        found |= {f"{form}, {kind}": time(f"{form}, {kind}", step, numbers) for kind, step in steps.items()}
    return found


def _forms(rows: int) -> None:
    """The kernels that leave fp8 forms."""
    hidden, inner = _SHAPES["down"][1], _SHAPES["down"][0]
    x, weight, gate_up = randn(rows, hidden), randn(hidden), randn(rows, 2 * inner)
    attended = [(randn(rows, hidden),) for _ in range(4)]
    for name, group in (("none", None), ("rows", 0), ("blocks", BLOCK)):
        norm = partial(_norm.add_rms_norm, x, x, weight, 1e-5, group=group)
        gate = _mlp.silu_mul if group is None else partial(_quantize.gated, kind="silu_mul", group=group)
        bench(f"add_rms_norm T={rows}, leaves {name}", norm, [()], moved=8 * x.numel())
        bench(f"silu_mul T={rows}, leaves {name}", gate, [(gate_up,)], moved=3 * gate_up.numel())
        if group is not None:
            bench(f"quantize T={rows}, {name}", partial(_quantize.quantize, group=group), attended, moved=3 * x.numel())


if __name__ == "__main__":
    main()
