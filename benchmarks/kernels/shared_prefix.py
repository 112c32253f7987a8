"""Attention of rows with a beginning in common: ``python -m benchmarks.kernels.shared_prefix``.

Decode and prefill, softmax and HP1's decode, each beside the kernels that read the beginning for every row. Results of
both are compared first.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.kernels.inputs import HEADS, block_table, prompt_tiles, randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import report
from rosebatch_kernels.common.head_norms import HeadRMSNorm, HeadUClip
from rosebatch_kernels.common.shared_keys import MAX_PARTS, MEMBERS, SharedKeys, max_items
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.common.tiles import TILE_ROWS
from rosebatch_kernels.common.timing import median_us
from rosebatch_kernels.hp1.gate import Gate, mean_taps

_DECODE, _PREFILL, _SIZES = (Launchers(f"paged_attention.{name}") for name in ("decode", "prefill", "sizes"))
_PREFILL_SHARED, _SHARED = Launchers("paged_attention.prefill_shared"), Launchers("common.shared_keys")
_HP1_DECODE, _HP1_SIZES = Launchers("hp1.decode"), Launchers("hp1.sizes")
_MODELS = ("GPT-2", "Qwen3-0.6B", "Llama-3.1-8B", "gpt-oss-20b")
# Rows, keys in common, own tokens.
_DECODES = ((16, 256, 128), (64, 1024, 128), (256, 256, 128), (256, 1024, 128), (256, 2048, 64), (1024, 1024, 128))
_PREFILLS = ((512, 1024, 16), (512, 1024, 32), (256, 2048, 48))
_HP1_HEADS = (8, 4, 128)
_BLOCK_SIZE = 64
_TURNS = 4
_BYTES = 2
# bf16 results of random inputs, whose sums have another order.
_MAX_DIFFERENCE = 0.02


def main() -> None:
    """Write two lines for each model and size."""
    for shape in _DECODES:
        for model in _MODELS:
            _decode(model, *shape)
        _hp1_decode(*shape)
    for shape in _PREFILLS:
        for model in _MODELS:
            _prefill(model, *shape)


def shared_table(rows: int, shared: int, own: int) -> Tensor:
    """``[rows, M]`` block ids, the first of which all rows share."""
    table = block_table(rows, shared + own, _BLOCK_SIZE)
    table[:, : shared // _BLOCK_SIZE] = table[0, : shared // _BLOCK_SIZE].clone()
    return table


def one_group(rows: int, shared: int, heads: int, kv_heads: int) -> SharedKeys:
    """All rows in one group, divided as the engine divides it."""
    tiles = -(-rows // MEMBERS)
    splits = max(
        1,
        min(
            MAX_PARTS // 2,
            round(_SHARED.items_wanted(heads, kv_heads) / tiles),
        ),
    )
    length = -(-shared // splits // 64) * 64
    items = [
        (low, min(MEMBERS, rows - low), start, min(start + length, shared), part)
        for low in range(0, rows, MEMBERS)
        for part, start in enumerate(range(0, shared, length))
    ]
    items += [(0, 0, 0, 0, 0)] * (max_items(rows) - len(items))
    parts = -(-shared // length)
    numbers = torch.arange(rows), torch.full((rows,), shared), torch.full((rows,), parts)
    return SharedKeys(*(torch.as_tensor(each, dtype=torch.int32, device="cuda") for each in (items, *numbers)))


def _compare(
    name: str,
    apart: Callable[..., Tensor],
    together: Callable[..., Tensor],
    layers: list[tuple[Tensor, Tensor]],
    moved: int,
) -> None:
    """Report both; ``layers`` are arguments that take turns."""
    difference = (apart(*layers[0]).float() - together(*layers[0]).float()).abs().max().item()
    assert difference < _MAX_DIFFERENCE, (name, difference)
    for kind, function in (("apart", apart), ("shared", together)):
        turns = cycle(layers)
        microseconds = median_us(lambda function=function, turns=turns: function(*next(turns)))  # type: ignore[misc]
        report(f"{name} {kind}", microseconds, moved=moved)


def _common(rows: int, shared: int, own: int, size: int) -> dict[str, object]:
    limits = torch.full((rows,), shared + own, dtype=torch.int32, device="cuda")
    return {
        "block_table": shared_table(rows, shared, own),
        "positions": limits - 1,
        "limits": limits,
        "scale": size**-0.5,
    }


def _layers(rows: int, shared: int, own: int, heads: int, kv_heads: int, size: int) -> list[tuple[Tensor, Tensor]]:
    blocks = rows * -(-(shared + own) // _BLOCK_SIZE)
    projections = (randn(rows, (heads + 2 * kv_heads) * size) for _ in range(_TURNS))
    return [(qkv, randn(2, blocks, kv_heads, _BLOCK_SIZE, size)) for qkv in projections]


def _moved(rows: int, shared: int, own: int, kv_heads: int, size: int) -> int:
    """Bytes of K and V if the shared keys are read once."""
    return 2 * (shared + rows * (own - 1)) * kv_heads * size * _BYTES


def _decode(model: str, rows: int, shared: int, own: int) -> None:
    heads, kv_heads, size, rotary, qk_norm, *_ = HEADS[model]
    step = partial(
        _DECODE.decode,
        workspace=DecodeWorkspace(rows, heads, kv_heads, size, torch.device("cuda"), _SIZES.num_splits, shares=True),
        num_heads=heads,
        rotary=(randn(shared + own, rotary), randn(shared + own, rotary)) if rotary else None,
        qk_norm=HeadRMSNorm(randn(size), randn(size), 1e-6) if qk_norm else None,
        sinks=randn(heads) if HEADS[model].sinks else None,
        **_common(rows, shared, own, size),
    )
    together = partial(step, keys=one_group(rows, shared, heads, kv_heads))
    layers = _layers(rows, shared, own, heads, kv_heads, size)
    _compare(
        f"decode  {model:<12} {rows}x{shared}+{own}", step, together, layers, _moved(rows, shared, own, kv_heads, size)
    )


def _hp1_decode(rows: int, shared: int, own: int) -> None:
    heads, kv_heads, size = _HP1_HEADS
    workspace = DecodeWorkspace(rows, heads, kv_heads, size, torch.device("cuda"), _HP1_SIZES.num_splits, shares=True)
    taps = mean_taps(torch.full((heads,), 1.4, device="cuda"), 3)
    step = partial(
        _HP1_DECODE.decode,
        workspace=workspace,
        gate=Gate(taps, torch.ones(heads, device="cuda") / (shared + own)),
        num_heads=heads,
        rotary=(randn(shared + own, size), randn(shared + own, size)),
        qk_norm=HeadUClip(randn(size), randn(size), 1.0, 1.0),
        **_common(rows, shared, own, size),
    )
    together = partial(step, keys=one_group(rows, shared, heads, kv_heads))
    layers = _layers(rows, shared, own, heads, kv_heads, size)
    _compare(
        f"decode  {'HP1':<12} {rows}x{shared}+{own}", step, together, layers, _moved(rows, shared, own, kv_heads, size)
    )


def _prefill(model: str, rows: int, shared: int, own: int) -> None:
    """Chunks of ``own`` tokens, whose K and V are in the cache."""
    heads, kv_heads, size, *_ = HEADS[model]
    tiles = prompt_tiles(rows, own, TILE_ROWS)
    tiles[:, 2] += shared
    lines: list[list[int]] = []
    pieces: list[tuple[int, int, int, int]] = []
    for first in range(0, rows * own, TILE_ROWS):
        count, begin = min(TILE_ROWS, rows * own - first), 0
        lines.append([first, count, shared, len(pieces), 0])
        while begin < count:
            sequence, place = divmod(first + begin, own)
            length = min(own - place, count - begin)
            pieces.append((sequence, begin, length, shared + place))
            begin += length
        lines[-1][4] = len(pieces) - lines[-1][3]
    packed = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in (lines, pieces)]
    table = shared_table(rows, shared, own)
    blocks = table.numel()
    layers = [
        (randn(rows * own, (heads + 2 * kv_heads) * size), randn(2, blocks, kv_heads, _BLOCK_SIZE, size))
        for _ in range(_TURNS)
    ]
    given = {"num_heads": heads, "scale": size**-0.5, "sinks": randn(heads) if HEADS[model].sinks else None}
    apart = partial(_PREFILL.prefill, block_table=table, tiles=tiles, **given)
    together = partial(_PREFILL_SHARED.prefill_shared, block_table=table, tiles=packed[0], pieces=packed[1], **given)
    name = f"prefill {model:<12} {rows}x{shared}+{own}"
    _compare(name, apart, together, layers, 2 * rows * own * (heads + kv_heads) * size * _BYTES)


if __name__ == "__main__":
    main()
