"""Products with 4-bit integers against bf16: ``python -m benchmarks.kernels.int4``.

With ``--sizes``, other sizes of programs for the products with codes, the fastest of each product and number of rows.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.table import bench, in_turns_us
from rosebatch_kernels.common.device import Device, device_of
from rosebatch_kernels.int4 import kernel
from rosebatch_kernels.int4.int4_linear import Int4Linear
from rosebatch_kernels.int4.layout import CHUNK, QUARTER, Int4Weight
from rosebatch_kernels.int4.sizes import SIZES, Program, Sizes
from rosebatch_kernels.mlp.kernel import SIZES as MLP_SIZES
from rosebatch_kernels.mlp.kernel import silu_mul

# (in, out) of Llama-3.1-8B.
_SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate, up": (4096, 28672), "down": (14336, 4096)}
_ROWS = (1, 16, 64, 128, 256, 2048)
# Groups of columns, and whether they have zeros.
_FORMS = {"g128": (128, False), "g128 zeros": (128, True), "g32": (32, False)}
_SCRATCHES = (2**23, 2**24, 2**25, 2**26)
# Bytes of all layers' weights: more than the cache holds.
_BYTES = 2**28
_MOST_CODES, _FEWEST_VALUES, _FEWEST_ROUNDED = 512, 64, 64
_SHOWN = 3
# Rows of the weight in a tile, and warps, that ``--sizes`` tries.
_PROGRAMS = ((64, 4), (128, 4), (128, 8))


def main() -> None:
    """Write one line for each product, number of rows and way to compute it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=_ROWS)
    options = parser.parse_args()
    device = device_of(torch.device("cuda"))
    run = _sweep if options.sizes else _compare
    for name, (size_in, size_out) in _SHAPES.items():
        for rows in options.rows:
            run(name, randn(rows, size_in), size_out, device)


def _weights(size_in: int, size_out: int, form: str) -> list[Int4Weight]:
    """Random ones that do not fit the cache together."""
    group, zeros = _FORMS[form]

    def make() -> Int4Weight:
        words = torch.randint(-(2**15), 2**15, (size_in // CHUNK, size_out, QUARTER), device="cuda").short()
        grid = size_in // group, size_out
        scales = torch.rand(grid, device="cuda").mul(0.01).bfloat16()
        return Int4Weight(words, scales, _zeros(grid) if zeros else None, size_in, group)

    first = make()
    return [first, *(make() for _ in range(_BYTES // first.nbytes))]


def _zeros(grid: tuple[int, int]) -> Tensor:
    return torch.randint(16, grid, dtype=torch.int32, device="cuda")


def _compare(name: str, x: Tensor, size_out: int, device: Device) -> None:
    rows, size_in = x.shape
    sizes, flops = SIZES.of(device), 2 * x.numel() * size_out
    gates = name == "gate, up"
    plain = [(randn(size_out, size_in) * 0.01,) for _ in range(1 + _BYTES // (2 * size_in * size_out))]

    def line(way: str, step: Callable[..., object], inputs: list[tuple[Any, ...]], moved: int) -> None:
        bench(f"{name:<10} T={rows:<5} {way}", step, inputs, calls=max(20, len(inputs)), moved=moved, flops=flops)

    def gate(product: Tensor) -> Tensor:
        return silu_mul(product, sizes=MLP_SIZES.of(device), device=device)

    line("bf16", lambda weight: functional.linear(x, weight), plain, plain[0][0].nbytes)
    if gates:
        line("bf16, gate", lambda weight: gate(functional.linear(x, weight)), plain, plain[0][0].nbytes)
    for form in _FORMS:
        weights = [(weight,) for weight in _weights(size_in, size_out, form)]
        moved = weights[0][0].nbytes
        if rows <= _MOST_CODES:
            line(f"{form} codes", lambda w: kernel.linear(x, w, sizes=sizes, device=device), weights, moved)
            line(f"{form} parts", lambda w: kernel.parts(x, w, sizes=sizes, device=device), weights, moved)
        if rows <= _MOST_CODES and gates:
            fused = partial(kernel.linear, bias=None, activation="silu_mul", sizes=sizes, device=device)
            line(f"{form} codes, gate", partial(fused, x), weights, moved)
        for scratch in _SCRATCHES if rows >= _FEWEST_VALUES else ():
            own = replace(sizes, max_rows=0, scratch=scratch)
            layers = [(Int4Linear(weight, None, None, sizes=own, device=device),) for (weight,) in weights]
            line(f"{form} values, {scratch >> 20} MiB", lambda layer: layer(x), layers, moved)


def _sweep(name: str, x: Tensor, size_out: int, device: Device) -> None:
    """Of programs with codes."""
    rows, size_in = x.shape
    if rows > _MOST_CODES:
        return
    weights = [(weight,) for weight in _weights(size_in, size_out, "g128")]
    measured = SIZES.of(device)
    heights = [height for height in (16, 32, 64, 128, 256) if height < 2 * max(rows, 9)][-2:]
    found: list[tuple[float, str]] = []
    for (tile, warps), height, stages, parts in product(_PROGRAMS, heights, (3, 5), (None, 1, 2, 4, 8)):
        for rounds in (False, True) if rows >= _FEWEST_ROUNDED else (False,):
            each = ((0, Program(height, tile, warps, stages, 1 << 20, parts or 1, rounds)),)
            own = replace(measured, exact=each, rounding=each if rounds else ())
            words = f"tile {tile} x {height}, {warps} warps, {stages} stages, {parts or 'no'} parts"
            words += ", rounding" * rounds
            try:
                found.append((_time(x, weights, own, device, in_parts=parts is not None), words))
            except Exception as error:
                # A program that does not fit the multiprocessor.
                sys.stderr.write(f"{words}: {str(error).splitlines()[-1][:80]}\n")
    for in_parts in (False, True):
        lines = sorted(pair for pair in found if ("no parts" in pair[1]) != in_parts)
        for microseconds, words in lines[:_SHOWN]:
            sys.stdout.write(f"{name:<10} T={rows:<5} {microseconds:>8.2f} µs  {words}\n")


def _time(x: Tensor, weights: list[tuple[Any]], sizes: Sizes, device: Device, *, in_parts: bool) -> float:
    function = kernel.parts if in_parts else kernel.linear
    return in_turns_us(
        lambda weight: function(x, weight, sizes=sizes, device=device), weights, repeats=5, calls=len(weights)
    )


if __name__ == "__main__":
    main()
