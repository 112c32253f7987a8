"""Latent attention at the sizes of models: ``python -m benchmarks.kernels.latent_attention [FIELD=VALUE ...]``.

Fields are those of the table of sizes, such as ``few=(16,64,4,2)``. Decode is compared with the copy bandwidth, by the
latents read, and prefill with the rate of a matrix product, by the products under the causal mask. The reference is not
timed: it reads block ids on the host, so that no graph can hold it.
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
from rosebatch_kernels.common.chunks import TILE_ROWS
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.latent_attention.sizes import SIZES, LatentProgram, Sizes

_KERNEL = Launchers("latent_attention.kernel")
# Heads of q.
_MODELS = {"V2-Lite": 16, "GLM-4.7-Flash": 20, "V3": 128}
_RANK, _WIDTH, _BLOCK = 512, 576, 64
# Sequences, and tokens of each.
_DECODE = ((1, 4000), (8, 4000), (64, 4000), (256, 1000), (1, 32000))
_PROMPTS = ((32, 512), (4, 4096), (1, 16384))
_TURNS, _BYTES = 4, 2


def main() -> None:
    """Write one line for each model and size."""
    changes = {name: ast.literal_eval(value) for name, _, value in (each.partition("=") for each in sys.argv[1:])}
    programs = {name: LatentProgram(*value) for name, value in changes.items() if name in ("few", "decode", "prefill")}
    sizes = replace(SIZES.of(device_of(torch.device("cuda"))), **changes | programs)
    for model in _MODELS:
        for sequences, length in _DECODE:
            _decode(model, sequences, length, sizes)
        for sequences, length in _PROMPTS:
            _prefill(model, sequences, length, sizes)


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
    flops = 2 * tokens * (length + 1) // 2 * _MODELS[model] * (_WIDTH + _RANK)
    bench(f"prefill {model:<14}{sequences}x{length}", step, rows, calls=5, flops=flops)


def _cached(model: str, tokens: int, sequences: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, the cache, and a table whose blocks lie in no order."""
    blocks = -(-length // _BLOCK)
    table = torch.randperm(sequences * blocks, device="cuda").int().view(sequences, blocks)
    return randn(tokens, _MODELS[model], _WIDTH), randn(1, sequences * blocks, 1, _BLOCK, _WIDTH), table


if __name__ == "__main__":
    main()
