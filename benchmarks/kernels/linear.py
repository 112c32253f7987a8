"""Products of a decode step against cuBLAS: ``python -m benchmarks.kernels.linear``."""

from torch import Tensor

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.table import bench, implementations

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
    of_parts = activation == "parts"
    inputs = [(x, weight) if of_parts else (x, weight, None, activation) for weight in weights]
    for implementation, module in implementations("linear").items():
        bench(
            f"{name:<24} {activation or '':<10} {implementation}",
            # cuBLAS adds up its parts itself.
            module.parts if of_parts and implementation == "kernel" else module.linear,
            inputs,
            calls=len(weights),
            moved=weights[0].nbytes + x.nbytes,
            flops=2 * len(x) * weights[0].numel(),
        )


if __name__ == "__main__":
    main()
