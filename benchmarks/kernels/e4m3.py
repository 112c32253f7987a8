"""Attention over K and V in 16 bits and as e4m3, at the sizes of models: ``python -m benchmarks.kernels.e4m3``.

Each pair of lines is one shape in bf16, then as e4m3 with its scales. The share of the copy bandwidth is of the bytes
that each has to read. Both get the same K and V. So the largest difference of their results is the error of 8 bits.
"""

import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.inputs import Heads, decode_options, layers, prefill_options
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.common.e4m3 import quantized

_DECODE, _PREFILL, _SIZES = (Launchers(f"paged_attention.{name}") for name in ("decode", "prefill", "sizes"))
_APPEND = Launchers("kv_cache.kernel")
_FOUR, _TWO = Heads(32, 8, 128, rotary=128), Heads(16, 8, 128, rotary=128)
_MORE = {
    "heads of 64": Heads(12, 12, 64),
    "heads of 256": Heads(16, 8, 256, rotary=256, soft_cap=50.0),
}
# Sequences and keys of each.
_DECODES = ((64, 2048, _FOUR), (256, 1024, _FOUR), (256, 512, _TWO), (32, 8192, _FOUR), (1, 16384, _FOUR))
# Prompts and tokens of each.
_PREFILLS = ((8, 2048), (2, 8192))


def main() -> None:
    """Write two lines for each size."""
    for batch, keys, shape in _DECODES:
        _decode(f"decode {batch}x{keys}, {shape.heads // shape.kv_heads} queries", shape, batch, keys)
    for name, shape in _MORE.items():
        _decode(f"decode 256x1024, {name}", shape, 256, 1024)
    for prompts, length in _PREFILLS:
        _prefill(f"prefill {prompts}x{length}", _FOUR, prompts, length)
    _append("append 16384 tokens", _FOUR, 16384)


def _stored(caches: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(qkv, *quantized(cache)) for qkv, cache in caches]


def _decode(name: str, shape: Heads, batch: int, keys: int) -> None:
    options = decode_options(shape, [keys] * batch, _SIZES.num_splits) | {"soft_cap": shape.soft_cap}
    caches = layers(shape, batch, options["block_table"])
    numbers = 2 * batch * (keys - 1) * shape.kv_heads
    kernel = partial(_DECODE.decode, **options)
    _compare(name, kernel, caches, moved=(numbers * shape.size * 2, numbers * (shape.size + 4)))


def _prefill(name: str, shape: Heads, prompts: int, length: int) -> None:
    options = prefill_options(shape, prompts, length)
    flops = 2 * shape.heads * shape.size * prompts * length * (length + 1)
    caches = layers(shape, prompts * length, options["block_table"])
    _compare(name, partial(_PREFILL.prefill, **options), caches, flops=flops)


def _compare(
    name: str,
    kernel: "partial[Tensor]",
    caches: list[tuple[Tensor, Tensor]],
    *,
    moved: tuple[int, int] = (0, 0),
    flops: int = 0,
) -> None:
    def of_e4m3(qkv: Tensor, cache: Tensor, scales: Tensor) -> Tensor:
        return kernel(qkv, cache, scales=scales)

    stored = _stored(caches)
    error = (of_e4m3(*stored[0]).float() - kernel(*caches[0]).float()).abs().max()
    before = bench(f"{name}, bf16", kernel, caches, moved=moved[0], flops=flops)
    after = bench(f"{name}, e4m3", of_e4m3, stored, moved=moved[1], flops=flops)
    sys.stdout.write(f"    {before / after:.2f} times as fast; results differ by {error:.4f} at most\n")


def _append(name: str, shape: Heads, tokens: int) -> None:
    table = torch.arange(tokens // 64, dtype=torch.int32, device="cuda")[None]
    caches = layers(shape, tokens, table)
    rows = torch.randperm(tokens * shape.kv_heads, device="cuda").view(tokens, shape.kv_heads)
    q = shape.heads * shape.size

    def append(qkv: Tensor, cache: Tensor, *scales: Tensor) -> None:
        k, v = qkv[:, q:].unflatten(1, (2, shape.kv_heads, shape.size)).unbind(1)
        _APPEND.append(cache, k, v, rows, *scales)

    numbers = 2 * tokens * shape.kv_heads
    bench(f"{name}, bf16", append, caches, moved=numbers * shape.size * 4)
    bench(f"{name}, e4m3", append, _stored(caches), moved=numbers * (shape.size * 3 + 4))


if __name__ == "__main__":
    main()
