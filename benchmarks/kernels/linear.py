"""Products of a decode step against cuBLAS: ``python -m benchmarks.kernels.linear``."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import report
from rosebatch_kernels.common.timing import median_us
from rosebatch_kernels.linear import reference

_KERNEL = Launchers("linear.kernel")
# (in, out, activation) of GPT-2 and Qwen3-0.6B; "parts" for products that are added to the residual.
_SHAPES = {
    "GPT-2 qkv": (768, 2304, None),
    "GPT-2 out": (768, 768, "parts"),
    "GPT-2 up": (768, 3072, "gelu_tanh"),
    "GPT-2 down": (3072, 768, "parts"),
    "Qwen3 qkv": (1024, 4096, None),
    "Qwen3 out": (2048, 1024, "parts"),
    "Qwen3 gate, up": (1024, 6144, "silu_mul"),
    "Qwen3 down": (3072, 1024, "parts"),
}
_ROWS = (1, 32, 64)
# Bytes of all layers' weights: more than the cache holds.
_BYTES = 2**28


def main() -> None:
    """Write one line for each shape, number of rows and implementation."""
    for name, (size_in, size_out, activation) in _SHAPES.items():
        count = max(1, _BYTES // (size_in * size_out * 2))
        weights = [randn(size_out, size_in) * size_in**-0.5 for _ in range(count)]
        for rows in _ROWS:
            _product(f"{name} T={rows}", randn(rows, size_in), weights, activation)


def _product(name: str, x: Tensor, weights: list[Tensor], activation: str | None) -> None:
    moved = weights[0].nbytes + x.nbytes
    flops = 2 * len(x) * weights[0].numel()
    for module in (_KERNEL, reference):
        turns = iter(weights * 4)

        def call(module: Any = module, turns: Iterator[Tensor] = turns) -> object:
            weight = next(turns)
            if activation != "parts":
                return module.linear(x, weight, None, activation)
            # cuBLAS adds up its parts itself.
            return _KERNEL.parts(x, weight) if module is _KERNEL else reference.linear(x, weight)

        label = f"{name:<24} {activation or '':<10} {module.__name__.rpartition('.')[2]}"
        report(label, median_us(call, calls=len(weights)), moved=moved, flops=flops)


if __name__ == "__main__":
    main()
