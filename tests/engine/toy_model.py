"""A model that no family has: layers that differ in heads, head size and window, and an MLP that sums two experts.

It shows that the seams hold: a model describes its attention itself, and a norm follows whatever a sub-layer leaves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch.config.model import RopeConfig
from rosebatch.model.contract import Attention, rows_of
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.rope import rope_tables
from rosebatch.ops.ops import Linear, Ops, Partial
from tests.helpers.model_configs import small_config

VOCAB, HIDDEN, INNER, MAX_LEN, EPS = 50, 32, 24, 40, 1e-5
CPU = torch.device("cpu")
# Query heads, K/V heads, head size and window of each layer; the first one has no rotary positions.
LAYERS = ((2, 1, 16, 0), (4, 2, 32, 7), (2, 1, 16, 5))

# What an engine asks of a config; the widest layer counts where it asks for memory.
CONFIG = small_config(
    num_layers=len(LAYERS), num_heads=4, num_kv_heads=2, head_dim=32, rope=RopeConfig(), eos_token_ids=(7,)
)


@dataclass(frozen=True, slots=True)
class _Expert:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    attention: PagedAttentionSpec
    out: Linear
    experts: tuple[_Expert, _Expert]


class ToyModel:
    """Random weights, the same in every process."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self._generator = torch.Generator().manual_seed(0)
        self.embedding = self._random(VOCAB, HIDDEN) * 4
        self.norm = torch.ones(HIDDEN)
        rotary = {size: rope_tables(RopeConfig(), size, MAX_LEN, torch.float32, CPU) for size in (16, 32)}
        self.layers = []
        for index, (heads, kv_heads, size, window) in enumerate(LAYERS):
            spec = PagedAttentionSpec(
                layer=index,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=size,
                scale=size**-0.5,
                window=window,
                rotary=rotary[size] if index else None,
            )
            self.layers.append(
                _Layer(
                    qkv=self._linear((heads + 2 * kv_heads) * size, HIDDEN),
                    attention=spec,
                    out=self._linear(HIDDEN, heads * size),
                    experts=(self._expert(), self._expert()),
                )
            )
        self.mixers = [layer.attention for layer in self.layers]
        self.head = ops.head(DenseWeight.of(self.embedding))

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        ops = self.ops
        residual = functional.embedding(input_ids, self.embedding)
        normed = ops.rms_norm(residual, self.norm, EPS)
        for layer in self.layers:
            attended = ops.project(layer.out, attention(layer.attention, layer.qkv(normed)))
            normed, residual = ops.add_rms_norm(attended, residual, self.norm, EPS)
            first, second = (
                expert.down(ops.gated("silu_mul", expert.gate_up, normed, expert.down)) for expert in layer.experts
            )
            normed, residual = ops.add_rms_norm(Partial(first + second), residual, self.norm, EPS)
        return rows_of(normed, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * 0.3

    def _linear(self, out_size: int, in_size: int) -> Linear:
        return self.ops.linear(DenseWeight.of(self._random(out_size, in_size)), None)

    def _expert(self) -> _Expert:
        return _Expert(self._linear(2 * INNER, HIDDEN), self._linear(HIDDEN, INNER))


def dense_attention(spec: PagedAttentionSpec, qkv: Tensor) -> Tensor:
    """Attention of one whole sequence, written out: what every runner has to agree with."""
    length, group = len(qkv), spec.num_heads // spec.num_kv_heads
    q, k, v = qkv.view(length, -1, spec.head_dim).split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    if spec.rotary is not None:
        cos, sin = spec.rotary.cos[:length, None], spec.rotary.sin[:length, None]
        q, k = (x * cos + x.roll(spec.head_dim // 2, -1) * sin for x in (q, k))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * spec.scale
    key, query = torch.arange(length), torch.arange(length)[:, None]
    seen = (key <= query) & ((key > query - spec.window) if spec.window else True)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).reshape(length, -1)
