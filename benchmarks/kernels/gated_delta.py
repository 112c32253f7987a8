"""The gated delta rule at the sizes of models: ``python -m benchmarks.kernels.gated_delta``.

Decode is compared with the copy bandwidth, by the states read and written; prefill with the rate of a matrix product,
by the products of its tiles. The reference is not timed: it reads slots on the host, so that no graph can hold it.
"""

import torch
from torch import Tensor

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.common.chunks import TILE_ROWS, pack_chunks
from rosebatch_kernels.gated_delta.layout import DeltaState, DeltaWeights

_DECODE, _PREFILL, _NORM = (Launchers(f"gated_delta.{name}") for name in ("decode", "prefill", "gated_norm"))
# Key heads, value heads, key size, value size.
_HEADS = {"Qwen3-Next-80B": (16, 32, 128, 128), "Qwen3.5-27B": (16, 48, 128, 128)}
_TAPS = 4
_BATCHES = (1, 8, 32, 64, 256)
# Prompts and tokens of each.
_PROMPTS = ((32, 512), (16, 1024), (1, 8192))
# Layers that take turns.
_TURNS = 4
_BYTES = 2


def main() -> None:
    """Write one line for each model and size."""
    for model in _HEADS:
        for batch in _BATCHES:
            _decode(model, batch)
        for sequences, length in _PROMPTS:
            _prefill(model, sequences, length)
        for tokens in (32, 8192):
            _gated_norm(model, tokens)


def _decode(model: str, batch: int) -> None:
    """One token of each sequence."""
    _, value_heads, key_dim, value_dim = _HEADS[model]
    slots = torch.randperm(batch, device="cuda").int()
    positions = torch.full((batch,), 1000, dtype=torch.int32, device="cuda")
    rows = slots, positions, positions + 1, _weights(model)
    layers = [(*_inputs(model, batch), _state(model, batch), *rows) for _ in range(_TURNS)]
    of_sequence = 2 * value_heads * key_dim * value_dim * 4 + (_TAPS + 2) * _channels(model) * _BYTES
    bench(f"{'decode':<10} {model:<15} B={batch}", _DECODE.decode, layers, moved=batch * of_sequence)


def _prefill(model: str, sequences: int, length: int) -> None:
    """Whole prompts at once."""
    _, value_heads, key_dim, value_dim = _HEADS[model]
    tokens = sequences * length
    packed = pack_chunks([(slot, slot * length, 0, length) for slot in range(sequences)], "cuda")
    weights = _weights(model)
    layers = [(*_inputs(model, tokens), _state(model, sequences), packed, weights) for _ in range(_TURNS)]
    # Of each tile and head: k·k and q·k, both sides of the system, reads of S by keys and queries, values, and S.
    products = TILE_ROWS * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim
    bench(
        f"{'prefill':<10} {model:<15} {sequences}x{length} tokens",
        _PREFILL.prefill,
        layers,
        calls=10,
        moved=tokens * (_channels(model) + value_heads * value_dim) * _BYTES,
        flops=2 * tokens * value_heads * products,
    )


def _gated_norm(model: str, tokens: int) -> None:
    _, heads, _, size = _HEADS[model]
    weight = randn(size)
    inputs = [(randn(tokens, heads, size), randn(tokens, heads, size), weight, 1e-6) for _ in range(_TURNS)]
    name = f"{'gated_norm':<10} {model:<15} T={tokens}"
    bench(name, _NORM.gated_norm, inputs, moved=3 * tokens * heads * size * _BYTES)


def _channels(model: str) -> int:
    key_heads, value_heads, key_dim, value_dim = _HEADS[model]
    return 2 * key_heads * key_dim + value_heads * value_dim


def _inputs(model: str, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv, a and b as views of one projection's output."""
    value_heads, channels = _HEADS[model][1], _channels(model)
    wide = randn(tokens, channels + 2 * value_heads)
    return wide[:, :channels], wide[:, channels : channels + value_heads], wide[:, channels + value_heads :]


def _state(model: str, slots: int) -> DeltaState:
    _, value_heads, key_dim, value_dim = _HEADS[model]
    memory = torch.randn(slots, value_heads, key_dim, value_dim, device="cuda") * 0.1
    return DeltaState(randn(slots, _TAPS, _channels(model)), memory)


def _weights(model: str) -> DeltaWeights:
    value_heads = _HEADS[model][1]
    return DeltaWeights(
        randn(_channels(model), _TAPS), None, torch.zeros(value_heads, device="cuda"), randn(value_heads)
    )


if __name__ == "__main__":
    main()
