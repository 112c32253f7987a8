"""Attention of rows with a beginning in common: ``python -m benchmarks.kernels.shared_prefix``.

Decode and prefill, softmax and HP1's decode, each beside the kernels that read the beginning for every row. Results of
both are compared first.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.inputs import (
    BLOCK_SIZE,
    HEADS,
    HP1,
    Heads,
    decode_options,
    gate,
    head_norm,
    layers,
    prefill_options,
    randn,
)
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch.engine.triton_runner.prefix_groups import Group, divide
from rosebatch_kernels.common.head_norms import HeadUClip
from rosebatch_kernels.common.shared_keys import SharedKeys, max_items
from rosebatch_kernels.common.tiles import TILE_ROWS

_DECODE, _PREFILL, _SIZES = (Launchers(f"paged_attention.{name}") for name in ("decode", "prefill", "sizes"))
_PREFILL_SHARED, _SHARED = Launchers("paged_attention.prefill_shared"), Launchers("common.shared_keys")
_HP1_DECODE, _HP1_SIZES = Launchers("hp1.decode"), Launchers("hp1.sizes")
_MODELS = ("GPT-2", "Qwen3-0.6B", "Llama-3.1-8B", "gpt-oss-20b")
# Rows, keys in common, own tokens.
_DECODES = ((16, 256, 128), (64, 1024, 128), (256, 256, 128), (256, 1024, 128), (256, 2048, 64), (1024, 1024, 128))
_PREFILLS = ((512, 1024, 16), (512, 1024, 32), (256, 2048, 48))
_BYTES = 2
# bf16 results of random inputs, whose sums have another order.
_MAX_DIFFERENCE = 0.02


def main() -> None:
    """Write two lines for each model and size."""
    for size in _DECODES:
        for model in _MODELS:
            sinks = randn(HEADS[model].heads) if HEADS[model].sinks else None
            step = partial(_DECODE.decode, qk_norm=head_norm(HEADS[model]), sinks=sinks)
            _decode(model, HEADS[model], *size, step, _SIZES.num_splits)
        clip = HeadUClip(randn(HP1.size), randn(HP1.size), 1.0, 1.0)
        # Weights do not add up to 1: the gain keeps results as large as softmax's.
        filters = gate(1.4)._replace(gamma=torch.ones(HP1.heads, device="cuda") / sum(size[1:]))
        _decode("HP1", HP1, *size, partial(_HP1_DECODE.decode, qk_norm=clip, gate=filters), _HP1_SIZES.num_splits)
    for size in _PREFILLS:
        for model in _MODELS:
            _prefill(model, *size)


def one_group(rows: int, shared: int, heads: int, kv_heads: int) -> SharedKeys:
    """All rows in one group, divided as the engine divides it."""
    numbers, limit = np.arange(rows), max_items(rows)
    found = divide([Group(numbers, 0, shared)], numbers, rows, _SHARED.items_wanted(heads, kv_heads), limit)
    assert found is not None, "there is a group"
    items = np.pad(found.items, ((0, limit - len(found.items)), (0, 0)))
    return SharedKeys(*(torch.as_tensor(each, device="cuda") for each in (items, *found[1:])))


def _share(table: Tensor, shared: int) -> None:
    """Give all rows the first blocks of the first."""
    table[:, : shared // BLOCK_SIZE] = table[0, : shared // BLOCK_SIZE].clone()


def _compare(
    name: str,
    apart: Callable[..., Tensor],
    together: Callable[..., Tensor],
    inputs: list[tuple[Tensor, Tensor]],
    moved: int,
) -> None:
    """Write a line for both; ``inputs`` take turns."""
    difference = (apart(*inputs[0]).float() - together(*inputs[0]).float()).abs().max().item()
    assert difference < _MAX_DIFFERENCE, (name, difference)
    bench(f"{name} apart", apart, inputs, moved=moved)
    bench(f"{name} shared", together, inputs, moved=moved)


def _decode(
    name: str,
    shape: Heads,
    rows: int,
    shared: int,
    own: int,
    step: Callable[..., Tensor],
    num_splits: Callable[[int, int], int],
) -> None:
    """The bytes are those of K and V if the shared keys are read once."""
    options = decode_options(shape, [shared + own] * rows, num_splits, shares=True)
    inputs = layers(shape, rows, options["block_table"])
    _share(options["block_table"], shared)
    apart = partial(step, **options)
    together = partial(apart, keys=one_group(rows, shared, shape.heads, shape.kv_heads))
    moved = 2 * (shared + rows * (own - 1)) * shape.kv_heads * shape.size * _BYTES
    _compare(f"decode  {name:<12} {rows}x{shared}+{own}", apart, together, inputs, moved)


def _prefill(model: str, rows: int, shared: int, own: int) -> None:
    """Chunks of ``own`` tokens, whose K and V are in the cache."""
    shape = HEADS[model]
    lines: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    for first in range(0, rows * own, TILE_ROWS):
        end = min(first + TILE_ROWS, rows * own)
        sequences = range(first // own, -(-end // own))
        lines.append((first, end - first, shared, len(pieces), len(sequences)))
        for sequence in sequences:
            begin, stop = max(first, sequence * own), min(end, (sequence + 1) * own)
            pieces.append((sequence, begin - first, stop - begin, shared + begin - sequence * own))
    packed = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in (lines, pieces)]
    options = prefill_options(shape, rows, own, before=shared)
    options["sinks"] = randn(shape.heads) if shape.sinks else None
    inputs = layers(shape, rows * own, options["block_table"])
    _share(options["block_table"], shared)
    apart = partial(_PREFILL.prefill, **options)
    together = partial(_PREFILL_SHARED.prefill_shared, **{**options, "tiles": packed[0], "pieces": packed[1]})
    moved = 2 * rows * own * (shape.heads + shape.kv_heads) * shape.size * _BYTES
    _compare(f"prefill {model:<12} {rows}x{shared}+{own}", apart, together, inputs, moved)


if __name__ == "__main__":
    main()
