"""HP1 attention beside softmax attention on the same shapes: ``python -m benchmarks.kernels.hp1``.

Both have HP1's heads, and caches that take turns, like the layers of a model. Decode is timed for several sigmas, with
the share of zero weights, and once with V of all keys. The bench compares decode with the copy bandwidth, by all K and
V, and prefill with the rate of a matrix product, by the products under the causal mask.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, product

import torch
from torch import Tensor

from benchmarks.kernels.inputs import block_table, prompt_tiles, randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import report
from rosebatch_kernels.common.head_norms import HeadRMSNorm, HeadUClip
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.common.tiles import TILE_ROWS
from rosebatch_kernels.common.timing import median_us
from rosebatch_kernels.hp1.gate import Gate, mean_taps
from rosebatch_kernels.hp1.reference import probabilities

_DECODE, _PREFILL, _SIZES = (Launchers(f"paged_attention.{name}") for name in ("decode", "prefill", "sizes"))
_HP1_DECODE, _HP1_PREFILL, _HP1_SIZES = (Launchers(f"hp1.{name}") for name in ("decode", "prefill", "sizes"))
_HEADS, _KV_HEADS, _SIZE = 8, 4, 128
_SCALE = _SIZE**-0.5
_BLOCK_SIZE = 64
# Sequences and tokens of each.
_DECODES = ((32, 1024), (128, 256), (32, 320), (32, 4096), (128, 112), (256, 600))
# Of article S4's table, at one sigma.
_BATCHES, _LENGTHS = (1, 16, 64, 128), (128, 512, 2048)
_PROMPTS = ((32, 256), (16, 1024), (4, 2048))
_SIGMAS = (0.0, 0.5, 1.0, 1.4, 2.0)
_SIGMA = 1.4
_TURNS = 4
_BYTES = 2
_SAMPLE = 512


def main() -> None:
    """Write several lines for each shape."""
    for batch, length in product(_BATCHES, _LENGTHS):
        _decode(batch, length, (_SIGMA,))
    for batch, length in _DECODES:
        _decode(batch, length, _SIGMAS)
    for sequences, length in _PROMPTS:
        _prefill(sequences, length)


def _decode(batch: int, length: int, sigmas: Sequence[float]) -> None:
    """The last token of each sequence: all others come from the cache."""
    limits = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    table = block_table(batch, length, _BLOCK_SIZE)
    common = {
        "block_table": table,
        "positions": limits - 1,
        "limits": limits,
        "num_heads": _HEADS,
        "scale": _SCALE,
        "rotary": (randn(length, _SIZE), randn(length, _SIZE)),
    }
    shape = (batch, _HEADS, _KV_HEADS, _SIZE, torch.device("cuda"))
    layers = [(randn(batch, (_HEADS + 2 * _KV_HEADS) * _SIZE), _cache(table)) for _ in range(_TURNS)]
    moved = 2 * batch * (length - 1) * _KV_HEADS * _SIZE * _BYTES

    def line(name: str, step: Callable[..., Tensor]) -> None:
        report(f"decode  B={batch:<4} {length:<5} {name}", _median_us(step, layers), moved=moved)

    norm, clip = HeadRMSNorm(randn(_SIZE), randn(_SIZE), 1e-6), HeadUClip(randn(_SIZE), randn(_SIZE), 1.0, 1.0)
    line(
        "softmax",
        partial(_DECODE.decode, workspace=DecodeWorkspace(*shape, _SIZES.num_splits), qk_norm=norm, **common),
    )
    gated = partial(
        _HP1_DECODE.decode, workspace=DecodeWorkspace(*shape, _HP1_SIZES.num_splits), qk_norm=clip, **common
    )
    for sigma in sigmas:
        line(f"HP1 sigma {sigma}, {_share_of_zeros(sigma):.0%} zero", partial(gated, gate=_gate(sigma)))
    line(f"HP1 sigma {_SIGMA}, all of V", partial(gated, gate=_gate(_SIGMA), sparse=False))


def _prefill(sequences: int, length: int) -> None:
    """Whole prompts at once; half of the products with K and V are masked."""
    tokens, table = sequences * length, block_table(sequences, length, _BLOCK_SIZE)
    packed = prompt_tiles(sequences, length, TILE_ROWS)
    common = {"block_table": table, "tiles": packed, "num_heads": _HEADS, "scale": _SCALE}
    layers = [(randn(tokens, (_HEADS + 2 * _KV_HEADS) * _SIZE), _cache(table)) for _ in range(_TURNS)]

    def line(name: str, step: Callable[..., Tensor]) -> None:
        moved = 2 * tokens * (_HEADS + _KV_HEADS) * _SIZE * _BYTES
        flops = 4 * _HEADS * _SIZE * sequences * length * (length + 1) // 2
        report(f"prefill {sequences}x{length:<5} {name}", _median_us(step, layers), moved=moved, flops=flops)

    line("softmax", partial(_PREFILL.prefill, **common))
    line("HP1", partial(_HP1_PREFILL.prefill, gate=_gate(_SIGMA), **common))


def _median_us(step: Callable[..., Tensor], layers: Sequence[tuple[Tensor, Tensor]]) -> float:
    turns = cycle(layers)
    return median_us(lambda: step(*next(turns)))


def _gate(sigma: float) -> Gate:
    sigmas = torch.full((_HEADS,), sigma, device="cuda")
    return Gate(mean_taps(sigmas, 3), torch.ones(_HEADS, device="cuda"))


def _share_of_zeros(sigma: float) -> float:
    """Share of zero weights for random scores of deviation 1, the deviation for q and k of deviation 1."""
    scores = torch.randn(_HEADS, _SAMPLE, _SAMPLE, device="cuda")
    return float((probabilities(scores, _gate(sigma)) == 0).float().mean())


def _cache(table: Tensor) -> Tensor:
    return randn(2, table.numel(), _KV_HEADS, _BLOCK_SIZE, _SIZE)


if __name__ == "__main__":
    main()
