"""Decode and prefill attention at the sizes of models: ``python -m benchmarks.kernels.paged_attention``.

It compares decode with the copy bandwidth, by the K and V read, and prefill with the rate of a matrix product, by the
products under the causal mask and the window. The references are not timed: they read block ids on the host, so that no
graph can hold them.
"""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.kernels.inputs import HEADS, Heads, decode_options, head_norm, layers, prefill_options, randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench

_DECODE, _PREFILL, _SIZES = (Launchers(f"paged_attention.{name}") for name in ("decode", "prefill", "sizes"))
_BATCHES = (32, 256)
_CONTEXTS = (576, 1100)
# Of layers with a window as well.
_LONG = 4000
# Batches of mixed lengths: sequences, and the shortest and the longest.
_MIXED = ((250, 260, 1040), (160, 100, 1800))
# Prompts and tokens of each.
_PROMPTS = ((32, 512), (16, 1024), (4, 2048))
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


def _decode(model: str, size: str, lengths: Sequence[int]) -> None:
    """The last token of each sequence: all others come from the cache."""
    shape = HEADS[model]
    options = decode_options(shape, lengths, _SIZES.num_splits) | _changes(shape)
    keys = sum(_seen(shape, length) - 1 for length in lengths)
    bench(
        f"{'decode':<8} {model:<17} {size}",
        partial(_DECODE.decode, qk_norm=head_norm(shape), **options),
        layers(shape, len(lengths), options["block_table"]),
        moved=2 * keys * shape.kv_heads * shape.size * _BYTES,
    )


def _prefill(model: str, sequences: int, length: int) -> None:
    """Whole prompts at once, q a view of the projection's output; half of the products with K and V are masked."""
    shape, tokens = HEADS[model], sequences * length
    options = prefill_options(shape, sequences, length) | _changes(shape)
    bench(
        f"{'prefill':<8} {model:<17} {sequences}x{length} tokens",
        partial(_PREFILL.prefill, **options),
        layers(shape, tokens, options["block_table"]),
        moved=2 * tokens * (shape.heads + shape.kv_heads) * shape.size * _BYTES,
        flops=4 * shape.heads * shape.size * sequences * sum(_seen(shape, own) for own in range(1, length + 1)),
    )


def _changes(shape: Heads) -> dict[str, Any]:
    """What some models have, and others have not."""
    sinks = randn(shape.heads) if shape.sinks else None
    return {"window": shape.window, "soft_cap": shape.soft_cap, "sinks": sinks}


def _seen(shape: Heads, length: int) -> int:
    """Keys that the last of so many tokens sees."""
    return min(length, shape.window or length)


if __name__ == "__main__":
    main()
