"""Mamba2 at the sizes of models: ``python -m benchmarks.kernels.mamba2``.

Decode is compared with the copy bandwidth, by the states read and written; prefill with the rate of a matrix product,
by the products of its tiles. The reference is not timed: it reads slots on the host, so that no graph can hold it.
"""

import torch
from torch import Tensor

from benchmarks.kernels.inputs import randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.common.chunks import TILE_ROWS, pack_chunks
from rosebatch_kernels.mamba2.layout import MambaState, MambaWeights

_DECODE, _PREFILL, _NORM = (Launchers(f"mamba2.{name}") for name in ("decode", "prefill", "gate_norm"))
# Heads, their size, groups, numbers of B.
_HEADS = {
    "Nemotron 3 Nano": (64, 64, 8, 128),
    "Granite 4 H S": (128, 64, 1, 128),
    "Falcon-H1-1.5B": (48, 64, 1, 256),
}
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
            _gate_norm(model, tokens)


def _decode(model: str, batch: int) -> None:
    """One token of each sequence."""
    heads, head_dim, _, size = _HEADS[model]
    slots = torch.randperm(batch, device="cuda").int()
    positions = torch.full((batch,), 1000, dtype=torch.int32, device="cuda")
    rows = slots, positions, positions + 1, _weights(model)
    layers = [(*_inputs(model, batch), _state(model, batch), *rows) for _ in range(_TURNS)]
    of_sequence = 2 * heads * head_dim * size * 4 + (_TAPS + 2) * _channels(model) * _BYTES
    bench(f"{'decode':<10} {model:<15} B={batch}", _DECODE.decode, layers, moved=batch * of_sequence)


def _prefill(model: str, sequences: int, length: int) -> None:
    """Whole prompts at once."""
    heads, head_dim, _, size = _HEADS[model]
    tokens = sequences * length
    packed = pack_chunks([(slot, slot * length, 0, length) for slot in range(sequences)], "cuda")
    weights = _weights(model)
    layers = [(*_inputs(model, tokens), _state(model, sequences), packed, weights) for _ in range(_TURNS)]
    # Of each tile and head: C·B, its product with x, what C reads of S, and S.
    products = TILE_ROWS * (size + head_dim) + 2 * size * head_dim
    bench(
        f"{'prefill':<10} {model:<15} {sequences}x{length} tokens",
        _PREFILL.prefill,
        layers,
        calls=10,
        moved=tokens * (_channels(model) + heads * head_dim) * _BYTES,
        flops=2 * tokens * heads * products,
    )


def _gate_norm(model: str, tokens: int) -> None:
    heads, head_dim, groups, _ = _HEADS[model]
    inner = heads * head_dim
    weight = randn(inner)
    inputs = [(randn(tokens, inner), randn(tokens, inner), weight, groups, 1e-6) for _ in range(_TURNS)]
    bench(f"{'gate_norm':<10} {model:<15} T={tokens}", _NORM.gate_norm, inputs, moved=3 * tokens * inner * _BYTES)


def _channels(model: str) -> int:
    heads, head_dim, groups, size = _HEADS[model]
    return heads * head_dim + 2 * groups * size


def _inputs(model: str, tokens: int) -> tuple[Tensor, Tensor]:
    """xbc and dt as views of one projection's output."""
    heads, channels = _HEADS[model][0], _channels(model)
    wide = randn(tokens, channels + heads)
    return wide[:, :channels], wide[:, channels:]


def _state(model: str, slots: int) -> MambaState:
    heads, head_dim, _, size = _HEADS[model]
    memory = torch.randn(slots, heads, head_dim, size, device="cuda") * 0.1
    return MambaState(randn(slots, _TAPS, _channels(model)), memory)


def _weights(model: str) -> MambaWeights:
    zeros = torch.zeros(_HEADS[model][0], device="cuda")
    return MambaWeights(randn(_channels(model), _TAPS), randn(_channels(model)), zeros, zeros, zeros)


if __name__ == "__main__":
    main()
