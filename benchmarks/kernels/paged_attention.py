"""Decode and prefill attention at the sizes of models: ``python -m benchmarks.kernels.paged_attention``.

It compares decode with the copy bandwidth, by the K and V read, and prefill with the rate of a matrix product, by the
products under the causal mask and the window. The references are not timed: they read block ids on the host, so that no
graph can hold them.
"""

import random
from collections.abc import Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.kernels.inputs import HEADS, Heads, block_table, prompt_tiles, randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import report
from rosebatch_kernels.common.head_norms import HeadRMSNorm
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.common.tiles import TILE_ROWS
from rosebatch_kernels.common.timing import median_us

_DECODE, _PREFILL, _SIZES = (Launchers(f"paged_attention.{name}") for name in ("decode", "prefill", "sizes"))
_BATCHES = (32, 256)
_CONTEXTS = (576, 1100)
# Of layers with a window as well.
_LONG = 4000
# Batches of mixed lengths: sequences, and the shortest and the longest.
_MIXED = ((250, 260, 1040), (160, 100, 1800))
# Prompts and tokens of each.
_PROMPTS = ((32, 512), (16, 1024), (4, 2048))
_BLOCK_SIZE = 64
# Caches that take turns, like the layers of a model.
_TURNS = 4
_BYTES = 2


def main() -> None:
    """Write one line for each model and size."""
    for model, shape in HEADS.items():
        for batch in _BATCHES:
            for context in (*_CONTEXTS, _LONG) if shape.window else _CONTEXTS:
                _decode(model, f"B={batch:<4} {context} tokens", [context] * batch)
        for batch, low, high in _MIXED:
            lengths = random.Random(0).choices(range(low, high + 1), k=batch)
            _decode(model, f"B={batch:<4} {low}-{high} tokens", lengths)
    for model in HEADS:
        for sequences, length in _PROMPTS:
            _prefill(model, sequences, length)


def _decode(model: str, shape: str, lengths: Sequence[int]) -> None:
    """The last token of each sequence: all others come from the cache."""
    heads, kv_heads, size, rotary, qk_norm, *_ = HEADS[model]
    batch, longest = len(lengths), max(lengths)
    limits = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    tables = (randn(longest, rotary), randn(longest, rotary)) if rotary else None
    step = partial(
        _DECODE.decode,
        block_table=block_table(batch, longest, _BLOCK_SIZE),
        positions=limits - 1,
        limits=limits,
        workspace=DecodeWorkspace(batch, heads, kv_heads, size, torch.device("cuda"), _SIZES.num_splits),
        num_heads=heads,
        scale=size**-0.5,
        rotary=tables,
        qk_norm=HeadRMSNorm(randn(size), randn(size), 1e-6) if qk_norm else None,
        window=HEADS[model].window,
        soft_cap=HEADS[model].soft_cap,
        sinks=_sinks(HEADS[model]),
    )
    layers = [(randn(batch, (heads + 2 * kv_heads) * size), _cache(batch, longest, model)) for _ in range(_TURNS)]
    turns = cycle(layers)
    microseconds = median_us(lambda: step(*next(turns)))
    report(
        f"{'decode':<8} {model:<17} {shape}",
        microseconds,
        moved=2 * sum(_seen(model, length) - 1 for length in lengths) * kv_heads * size * _BYTES,
    )


def _prefill(model: str, sequences: int, length: int) -> None:
    """Whole prompts at once, q a view of the projection's output; half of the products with K and V are masked."""
    heads, kv_heads, size, *_ = HEADS[model]
    tokens = sequences * length
    step = partial(
        _PREFILL.prefill,
        block_table=block_table(sequences, length, _BLOCK_SIZE),
        tiles=prompt_tiles(sequences, length, TILE_ROWS),
        num_heads=heads,
        scale=size**-0.5,
        window=HEADS[model].window,
        soft_cap=HEADS[model].soft_cap,
        sinks=_sinks(HEADS[model]),
    )
    layers = [(randn(tokens, (heads + 2 * kv_heads) * size), _cache(sequences, length, model)) for _ in range(_TURNS)]
    turns = cycle(layers)
    microseconds = median_us(lambda: step(*next(turns)))
    report(
        f"{'prefill':<8} {model:<17} {sequences}x{length} tokens",
        microseconds,
        moved=2 * tokens * (heads + kv_heads) * size * _BYTES,
        flops=4 * heads * size * sequences * sum(_seen(model, own) for own in range(1, length + 1)),
    )


def _sinks(shape: Heads) -> Tensor | None:
    return randn(shape.heads) if shape.sinks else None


def _seen(model: str, length: int) -> int:
    """Keys that the last of so many tokens sees."""
    return min(length, HEADS[model].window or length)


def _cache(sequences: int, length: int, model: str) -> Tensor:
    _, kv_heads, size, *_ = HEADS[model]
    return randn(2, sequences * -(-length // _BLOCK_SIZE), kv_heads, _BLOCK_SIZE, size)


if __name__ == "__main__":
    main()
