"""Times a mixture of experts, with the tiles of the table or with all candidates: ``bench.py [sweep]``.

``python -m benchmarks.kernels.experts``. Bytes are those of the active experts' weights, each once, and of the
rows; operations those of k experts a token. The time includes the sort, and leaves out the router and the final sum.
"""

import sys
from functools import partial
from typing import Any

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.experts.sizes import SIZES, Step, Tile

_KERNEL, _ROUTER = Launchers("experts.kernel"), Launchers("experts.router")
# Experts, experts of a token, H, I, activation, whether there are biases.
_SHAPES = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, "silu_mul", False),
    "gpt-oss-20b": (32, 4, 2880, 2880, "clamped_swiglu", True),
}
_TOKENS = (1, 8, 32, 256, 1024, 4096, 16384)
_FEW = [
    Step(0, Tile(rows, *up), Tile(rows, *down))
    for rows in (16, 32)
    for up, down in (
        ((32, 128, 4, 4), (32, 128, 4, 5)),
        ((32, 64, 4, 6), (64, 64, 4, 6)),
        ((64, 64, 4, 5), (64, 128, 4, 4)),
        ((32, 128, 4, 4, True), (64, 128, 4, 4, True)),
    )
]
_MANY = [
    Step(0, Tile(rows, *up), Tile(rows, *down))
    for rows, up, down in (
        (64, (64, 64, 4, 4), (128, 64, 4, 4)),
        (64, (64, 64, 4, 4, True), (128, 64, 4, 4, True)),
        (128, (64, 64, 8, 4), (128, 64, 8, 4)),
        (128, (64, 64, 8, 4, True), (128, 64, 8, 4, True)),
        (128, (128, 64, 8, 3, True), (256, 64, 8, 3, True)),
        (128, (128, 64, 8, 4, True), (256, 64, 8, 4, True)),
        (128, (128, 64, 8, 3), (256, 64, 8, 3)),
        (64, (128, 64, 8, 4, True), (256, 64, 8, 4, True)),
    )
]


def main(sweep: bool) -> None:
    """Write one line for each shape and number of tokens, and with ``sweep`` for each candidate."""
    for name, (experts, k, size, inner, activation, biased) in _SHAPES.items():
        layer: dict[str, Any] = {
            "gate_up": randn(experts, 2 * inner, size) * size**-0.5,
            "down": randn(experts, size, inner) * inner**-0.5,
            "gate_up_bias": randn(experts, 2 * inner) if biased else None,
            "down_bias": randn(experts, size) if biased else None,
            "activation": activation,
        }
        for tokens in _TOKENS:
            # Other experts in each call, so that few of them come from the cache.
            inputs = [
                (randn(tokens, size), *_ROUTER.route(randn(tokens, experts), k, normalize=True)) for _ in range(4)
            ]
            active = sum(len(ids.unique()) for _, ids, _ in inputs) / len(inputs)
            moved = int(active * 3 * size * inner * 2) + 2 * inputs[0][0].nbytes
            flops = 6 * tokens * k * size * inner
            candidates = (_FEW if tokens <= 32 else _FEW[4:] + _MANY if tokens == 256 else _MANY) if sweep else []
            for step in [SIZES.measured.at(tokens * k // experts, 2), *candidates]:
                call = partial(_KERNEL.parts, **layer, step=step)
                calls = 20 if tokens <= 256 else 4
                label = f"{name} T={tokens} {tuple(step.up)} {tuple(step.down[1:])}" if sweep else f"{name} T={tokens}"
                try:
                    bench(label, call, inputs, moved=moved, flops=flops, repeats=5, calls=calls)
                except Exception as error:  # A candidate may need more shared memory than there is.
                    sys.stdout.write(f"{label}: {type(error).__name__}\n")


if __name__ == "__main__":
    main("sweep" in sys.argv[1:])
