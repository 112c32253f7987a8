"""Times what adapters add to the products of Llama-3.1-8B: ``python -m benchmarks.kernels.adapters [FIELD=VALUE ...]``.

Fields are those of the table of sizes, such as ``stages=((0,1),)``. Each product has a line for the launch that
multiplies with A and one for both, and one for the product with the weight, beside which they run. Bytes are x, the
outputs read and written, and A and B of the adapters that rows have, each once.
"""

import ast
import sys
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.adapters.layout import Rows, Stack
from rosebatch_kernels.adapters.sizes import SIZES, Sizes
from rosebatch_kernels.common.device import device_of

_KERNEL, _MLP = Launchers("adapters.kernel"), Launchers("mlp.kernel")
_RANKS, _LOADED, _TURNS = 16, 64, 2
# Outputs of each projection, and the input.
_PRODUCTS = {
    "qkv": ((4096, 1024, 1024), 4096),
    "out": ((4096,), 4096),
    "gate, up": ((14336, 14336), 4096),
    "down": ((4096,), 14336),
}


def main() -> None:
    """Write the lines of all products, for decode steps and for prompts."""
    changes = {name: ast.literal_eval(value) for name, _, value in (each.partition("=") for each in sys.argv[1:])}
    sizes = replace(SIZES.of(device_of(torch.device("cuda"))), **changes)
    for tokens in (256, 8192):
        for name, (outputs, depth) in _PRODUCTS.items():
            _product(name, tokens, outputs, depth, sizes)


def _product(name: str, tokens: int, outputs: tuple[int, ...], depth: int, sizes: Sizes) -> None:
    parts = [part for part, size in enumerate(outputs) for _ in range(size)]
    size, gated = len(parts), len(outputs) == 2
    layers = []
    for _ in range(_TURNS):
        a, b = randn(_LOADED, len(outputs) * _RANKS, depth), randn(_LOADED, size, _RANKS)
        layers.append((randn(tokens, size), randn(tokens, depth), Stack.of(a, b, parts)._replace(is_gated=gated)))
    weight = randn(size, depth)
    bench(f"{name} T={tokens} product", lambda out, x, _: torch.mm(x, weight.t(), out=out), layers)
    if gated:
        bench(f"{name} T={tokens} activation", lambda out, *_: _MLP.silu_mul(out), layers, moved=3 * tokens * size)
    for used in (1, 8, _LOADED):
        # Rows of a decode step have adapters in turn, tokens of a prompt have one.
        place = torch.arange(tokens, dtype=torch.int32, device="cuda")
        adapters = 1 + (place % used if tokens <= 256 else place * used // tokens)
        rows = _KERNEL.sort_rows(adapters.int(), _LOADED, sizes=sizes)
        of_adapters = 2 * used * _RANKS * (len(outputs) * depth + size)
        label, moved = f"{name} T={tokens} of {used} adapters", 2 * tokens * (depth + (1.5 if gated else 2) * size)
        bench(f"{label}, A", partial(_shrink, rows, sizes), layers)
        bench(f"{label}, A and B", partial(_add, rows, sizes), layers, moved=int(moved) + of_adapters)


def _shrink(rows: Rows, sizes: Sizes, _: Tensor, x: Tensor, stack: Stack) -> None:
    _KERNEL._shrink_rows(x, stack, rows, sizes=sizes)


def _add(rows: Rows, sizes: Sizes, out: Tensor, x: Tensor, stack: Stack) -> None:
    if stack.is_gated:
        _KERNEL.gated(out, x, stack, rows, "silu_mul", sizes=sizes)
    else:
        _KERNEL.add_(out, x, stack, rows, sizes=sizes)


if __name__ == "__main__":
    main()
