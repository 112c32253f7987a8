"""Latent attention at the sizes of models: ``python -m benchmarks.kernels.latent_attention [FIELD=VALUE ...]``.

Fields are those of the table of sizes, such as ``few=(16,64,4,2)``. Decode is compared with the copy bandwidth, by the
latents read, and prefill with the rate of a matrix product, by the products under the causal mask: of latents, and of
expanded keys and values, for prompts and behind a prefix. What makes these is timed too. The reference is not timed:
it reads block ids on the host, so that no graph can hold it.
"""

import ast
import sys
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.common.chunks import TILE_ROWS, pack_chunks
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.sizes import Program
from rosebatch_kernels.latent_attention.sizes import SIZES, LatentProgram, Sizes

_KERNEL, _EXPANDED = Launchers("latent_attention.kernel"), Launchers("latent_attention.expanded")


class Heads(NamedTuple):
    """Heads of q, their channels that are not rotated, and those of their values."""

    number: int
    nope: int
    values: int


_MODELS = {"V2-Lite": Heads(16, 128, 128), "GLM-4.7-Flash": Heads(20, 192, 256), "V3": Heads(128, 128, 128)}
_RANK, _WIDTH, _BLOCK = 512, 576, 64
# Sequences, and tokens of each.
_DECODE = ((1, 4000), (8, 4000), (64, 4000), (256, 1000), (1, 32000))
_PROMPTS = ((32, 512), (4, 4096), (1, 16384))
_TURNS, _BYTES = 4, 2


def main() -> None:
    """Write one line for each model and size."""
    changes = {name: ast.literal_eval(value) for name, _, value in (each.partition("=") for each in sys.argv[1:])}
    kinds = {
        "few": LatentProgram,
        "decode": LatentProgram,
        "prefill": LatentProgram,
        "fresh": Program,
        "prefix": Program,
    }
    programs = {name: kinds[name](*value) for name, value in changes.items() if name in kinds}
    sizes = replace(SIZES.of(device_of(torch.device("cuda"))), **changes | programs)
    for model in _MODELS:
        for sequences, length in _DECODE:
            _decode(model, sequences, length, sizes)
        for sequences, length in _PROMPTS:
            _prefill(model, sequences, length, sizes)
            _fresh(model, sequences, length, sizes)
        _prefix(model, 4, 4096, 4096, sizes)


def _decode(model: str, sequences: int, length: int, sizes: Sizes) -> None:
    """One token of each sequence."""
    positions = torch.full((sequences,), length - 1, dtype=torch.int32, device="cuda")
    step = partial(_KERNEL.decode, rank=_RANK, scale=0.1, sizes=sizes)
    rows = [(*_cached(model, sequences, sequences, length), positions, positions + 1) for _ in range(_TURNS)]
    bench(f"decode  {model:<14}{sequences}x{length}", step, rows, moved=sequences * length * _WIDTH * _BYTES)


def _prefill(model: str, sequences: int, length: int, sizes: Sizes) -> None:
    """Whole prompts at once; half of the products are masked."""
    tokens = sequences * length
    cuts = [(row, row * length + first, first) for row in range(sequences) for first in range(0, length, TILE_ROWS)]
    # The longest come first, as in a step.
    cuts.sort(key=lambda cut: -cut[2])
    tiles = torch.tensor([(*cut, min(TILE_ROWS, length - cut[2])) for cut in cuts], dtype=torch.int32, device="cuda")
    step = partial(_KERNEL.prefill, rank=_RANK, scale=0.1, sizes=sizes)
    rows = [(*_cached(model, tokens, sequences, length), tiles) for _ in range(2)]
    flops = 2 * tokens * (length + 1) // 2 * _MODELS[model].number * (_WIDTH + _RANK)
    bench(f"prefill {model:<14}{sequences}x{length}", step, rows, calls=5, flops=flops)


def _fresh(model: str, sequences: int, length: int, sizes: Sizes) -> None:
    """The same prompts with expanded keys and values."""
    (heads, nope, values), tokens, rotated = _MODELS[model], sequences * length, _WIDTH - _RANK
    chunks = pack_chunks([(row, row * length, 0, length) for row in range(sequences)], "cuda")
    latents, of_keys = randn(tokens, _RANK), randn(heads, _RANK, nope)
    of_values = randn(heads, values, _RANK).transpose(1, 2)
    flops = 2 * tokens * heads * _RANK * (nope + values)
    both = [(latents, of_keys, of_values)]
    bench(f"expand  {model:<14}{sequences}x{length}", lambda x, k, v: (x @ k, x @ v), both, calls=5, flops=flops)
    rows = [
        (
            randn(tokens, heads, nope + rotated),
            *(randn(heads, tokens, size).transpose(0, 1) for size in (nope, values)),
            randn(tokens, rotated),
            chunks,
        )
    ]
    step = partial(_EXPANDED.attend_fresh, scale=0.1, sizes=sizes)
    flops = 2 * tokens * (length + 1) // 2 * heads * (nope + rotated + values)
    bench(f"fresh   {model:<14}{sequences}x{length}", step, rows, calls=5, flops=flops)


def _prefix(model: str, sequences: int, prefix: int, length: int, sizes: Sizes) -> None:
    """What chunks behind a prefix take in addition."""
    (heads, nope, values), tokens = _MODELS[model], sequences * length
    chunks = pack_chunks([(row, row * length, prefix, length) for row in range(sequences)], "cuda")
    _, cache, table = _cached(model, 0, sequences, prefix)
    place = torch.arange(sequences, device="cuda", dtype=torch.int32).repeat_interleave(length)
    out, norms = randn(tokens, heads, values), torch.zeros(tokens, heads, device="cuda")
    matrices = {"of_keys": randn(heads, _RANK, nope), "of_values": randn(heads, values, _RANK)}
    step = partial(_EXPANDED.attend_prefix_, scale=0.1, sizes=sizes, **matrices)
    rows = [(out, norms, randn(tokens, heads, nope + _WIDTH - _RANK), cache, table, place, chunks)]
    flops = 2 * tokens * prefix * heads * (_WIDTH + _RANK)
    bench(f"prefix  {model:<14}{sequences}x{length} behind {prefix}", step, rows, calls=5, flops=flops)


def _cached(model: str, tokens: int, sequences: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, the cache, and a table whose blocks lie in no order."""
    blocks = -(-length // _BLOCK)
    table = torch.randperm(sequences * blocks, device="cuda").int().view(sequences, blocks)
    return randn(tokens, _MODELS[model].number, _WIDTH), randn(1, sequences * blocks, 1, _BLOCK, _WIDTH), table


if __name__ == "__main__":
    main()
