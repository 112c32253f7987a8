"""Times a mixture of experts, with the tiles of the table or with all candidates.

``python -m benchmarks.kernels.experts [sweep] [FORM ...]``; forms are those of ``FORMS``, bf16 without any. Bytes are
those of the active experts' weights as they are kept, each once, and of the rows; operations those of k experts a
token. The time includes the sort, and leaves out the router and the final sum.
"""

import math
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.packing import CHUNK, empty_words
from rosebatch_kernels.experts.packed import Packed, piece_of
from rosebatch_kernels.experts.sizes import SIZES, Step, Tile

_KERNEL, _ROUTER = Launchers("experts.kernel"), Launchers("experts.router")
# Experts, experts of a token, H, I, activation, whether there are biases.
_SHAPES = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, "silu_mul", False),
    "gpt-oss-20b": (32, 4, 2880, 2880, "clamped_swiglu", True),
}
_TOKENS = (1, 8, 32, 256, 1024, 4096, 16384)
# Of weights that stay quantized: form, columns that share a scale, and whether there are zeros.
FORMS = {
    "bf16": None,
    "mxfp4": ("e2m1", 32, False),
    "fp8-rows": ("e4m3", 0, False),
    "fp8-blocks": ("e4m3", 128, False),
    "int4-128": ("int4", 128, False),
    "int4-128-zeros": ("int4", 128, True),
    "int4-32": ("int4", 32, False),
}


def _dense(up: Tile, down: Tile) -> Step:
    return Step(0, up, down, packed=up)


_FEW = [
    _dense(Tile(rows, *up), Tile(rows, *down))
    for rows in (16, 32)
    for up, down in (
        ((32, 128, 4, 4), (32, 128, 4, 5)),
        ((32, 64, 4, 6), (64, 64, 4, 6)),
        ((64, 64, 4, 5), (64, 128, 4, 4)),
        ((32, 128, 4, 4, True), (64, 128, 4, 4, True)),
    )
]
_MANY = [
    _dense(Tile(rows, *up), Tile(rows, *down))
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


# Rows of x, rows of the weight, warps and stages of quantized weights.
_PACKED = [
    Step(0, *(3 * (Tile(rows, columns, CHUNK, warps, stages),)))
    for rows, columns, warps, stages in (
        *((16, 64, 4, 3), (16, 64, 4, 5), (16, 64, 4, 7), (16, 128, 4, 4), (16, 128, 8, 4), (32, 64, 4, 4)),
        *((32, 128, 4, 4), (64, 64, 4, 3), (64, 128, 8, 3), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3)),
        *((128, 128, 8, 2), (128, 128, 8, 3), (128, 256, 8, 2)),
    )
]
# The same of fp8 weights and rows.
_FP8 = [
    Step(
        0,
        *(3 * (Tile(rows, columns, CHUNK, warps, stages),)),
        2 * (Tile(rows, columns, CHUNK, warps, stages, fp8=True),),
    )
    for rows, columns, warps, stages in (
        *((32, 64, 4, 4), (32, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4)),
        *((64, 128, 8, 3), (64, 256, 8, 2), (128, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3)),
        *((128, 128, 8, 4), (128, 256, 8, 2)),
    )
]


def main(sweep: bool, forms: list[str]) -> None:
    """Write one line for each shape, form and number of tokens, and with ``sweep`` for each candidate."""
    for name, (experts, k, size, inner, activation, biased) in _SHAPES.items():
        for form in forms:
            layer: dict[str, Any] = {
                "gate_up": _matrices(form, experts, 2 * inner, size),
                "down": _matrices(form, experts, size, inner),
                "gate_up_bias": randn(experts, 2 * inner) if biased else None,
                "down_bias": randn(experts, size) if biased else None,
                "activation": activation,
            }
            for tokens in _TOKENS:
                _bench(f"{name} {form}", layer, tokens, experts, k, sweep=sweep)


def _matrices(form: str, experts: int, rows: int, columns: int) -> Tensor | Packed:
    """Random ``[E, out, in]``: values do not change the time."""
    kind = FORMS[form]
    if kind is None:
        dense: Tensor = randn(experts, rows, columns) * columns**-0.5
        return dense
    code, unit, has_zeros = kind
    words = empty_words((experts, rows, columns), piece_of(code), torch.device("cuda"))
    words.random_(-(1 << 15), 1 << 15)
    chunks = words.shape[1]
    # Four exponents of 2^-7.
    scales = torch.full((experts, chunks, rows), 0x78787878, dtype=torch.int32, device="cuda")
    if code != "e2m1":
        units = chunks * CHUNK // unit if unit else 1
        scales = torch.full((experts, units, rows), columns**-0.5 / 100, device="cuda")
    zeros = torch.full_like(scales, 7) if has_zeros else None
    return Packed(code, columns, words, unit, scales, zeros, in_blocks=unit == CHUNK)


def _bench(name: str, layer: dict[str, Any], tokens: int, experts: int, k: int, *, sweep: bool) -> None:
    gate_up, down = layer["gate_up"], layer["down"]
    size, inner = down.shape[1:]
    # Other experts in each call, so that few of them come from the cache.
    inputs = [(randn(tokens, size), *_ROUTER.route(randn(tokens, experts), k, normalize=True)) for _ in range(4)]
    device = device_of(torch.device("cuda"))
    active = sum(len(ids.unique()) for _, ids, _ in inputs) / len(inputs)
    moved = int(active / experts * (gate_up.nbytes + down.nbytes)) + 2 * inputs[0][0].nbytes
    flops = 6 * tokens * k * size * inner
    candidates = []
    if sweep and isinstance(down, Packed):
        rows = tokens * k / experts
        both = _PACKED + _FP8 if down.form == "e4m3" and down.unit in (0, CHUNK) else _PACKED
        candidates = [each for each in both if each.up.rows <= max(16, 4 * 2 ** math.ceil(math.log2(max(rows, 1))))]
    elif sweep:
        candidates = _FEW if tokens <= 32 else _FEW[4:] + _MANY if tokens == 256 else _MANY
    for step in [SIZES.measured.at(tokens * k // experts, 2), *candidates]:
        call = partial(_KERNEL.parts, **layer, step=step)
        calls = 20 if tokens <= 256 else 4
        up, own = step.tiles(gate_up, down, device)
        label = f"{name} T={tokens} {tuple(up)} {tuple(own[1:])}" if sweep else f"{name} T={tokens}"
        try:
            bench(label, call, inputs, moved=moved, flops=flops, repeats=5, calls=calls)
        except Exception as error:  # A candidate may need more shared memory than there is.
            sys.stdout.write(f"{label}: {type(error).__name__}\n")


if __name__ == "__main__":
    main("sweep" in sys.argv[1:], [each for each in sys.argv[1:] if each != "sweep"] or ["bf16"])
