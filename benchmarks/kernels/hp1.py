"""HP1 attention beside softmax attention on the same shapes: ``python -m benchmarks.kernels.hp1``.

Both have HP1's heads, and caches that take turns, like the layers of a model. Decode is timed for several sigmas, with
the share of zero weights, and once with V of all keys. The bench compares decode with the copy bandwidth, by all K and
V, and prefill with the rate of a matrix product, by the products under the causal mask.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

import torch

from benchmarks.kernels.inputs import HP1, decode_options, gate, layers, prefill_options, randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.common.head_norms import HeadRMSNorm, HeadUClip
from rosebatch_kernels.hp1.reference import probabilities

_DECODE, _PREFILL, _SIZES = (Launchers(f"paged_attention.{name}") for name in ("decode", "prefill", "sizes"))
_HP1_DECODE, _HP1_PREFILL, _HP1_SIZES = (Launchers(f"hp1.{name}") for name in ("decode", "prefill", "sizes"))
# Sequences and tokens of each.
_DECODES = ((32, 1024), (128, 256), (32, 320), (32, 4096), (128, 112), (256, 600))
# Of article S4's table, at one sigma.
_BATCHES, _LENGTHS = (1, 16, 64, 128), (128, 512, 2048)
_PROMPTS = ((32, 256), (16, 1024), (4, 2048))
_SIGMAS = (0.0, 0.5, 1.0, 1.4, 2.0)
_SIGMA = 1.4
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
    size, lengths = HP1.size, [length] * batch
    norm, clip = HeadRMSNorm(randn(size), randn(size), 1e-6), HeadUClip(randn(size), randn(size), 1.0, 1.0)
    softmax = decode_options(HP1, lengths, _SIZES.num_splits)
    gated = partial(_HP1_DECODE.decode, qk_norm=clip, **decode_options(HP1, lengths, _HP1_SIZES.num_splits))
    steps = {"softmax": partial(_DECODE.decode, qk_norm=norm, **softmax)}
    for sigma in sigmas:
        steps[f"HP1 sigma {sigma}, {_share_of_zeros(sigma):.0%} zero"] = partial(gated, gate=gate(sigma))
    steps[f"HP1 sigma {_SIGMA}, all of V"] = partial(gated, gate=gate(_SIGMA), sparse=False)
    inputs = layers(HP1, batch, softmax["block_table"])
    moved = 2 * batch * (length - 1) * HP1.kv_heads * size * _BYTES
    for name, step in steps.items():
        bench(f"decode  B={batch:<4} {length:<5} {name}", step, inputs, moved=moved)


def _prefill(sequences: int, length: int) -> None:
    """Whole prompts at once; half of the products with K and V are masked."""
    tokens, options = sequences * length, prefill_options(HP1, sequences, length)
    inputs = layers(HP1, tokens, options["block_table"])
    moved = 2 * tokens * (HP1.heads + HP1.kv_heads) * HP1.size * _BYTES
    flops = 4 * HP1.heads * HP1.size * sequences * length * (length + 1) // 2
    for name, step in (
        ("softmax", partial(_PREFILL.prefill, **options)),
        ("HP1", partial(_HP1_PREFILL.prefill, gate=gate(_SIGMA), **options)),
    ):
        bench(f"prefill {sequences}x{length:<5} {name}", step, inputs, moved=moved, flops=flops)


def _share_of_zeros(sigma: float) -> float:
    """Share of zero weights for random scores of deviation 1, the deviation for q and k of deviation 1."""
    scores = torch.randn(HP1.heads, _SAMPLE, _SAMPLE, device="cuda")
    return float((probabilities(scores, gate(sigma)) == 0).float().mean())


if __name__ == "__main__":
    main()
