"""Qwen3-Next and Qwen3.5: the gated delta rule in most layers, gated attention in the others."""

from typing import ClassVar

import torch
from torch import Tensor

from rosebatch.model.delta_net import DeltaNet, GatedAttention
from rosebatch.model.families.llama import Llama
from rosebatch.model.layers import AttentionSpec, Rotary, StateSpec
from rosebatch.model.sublayers import channels, columns, load_linear
from rosebatch.model.weights import Take, WeightSource
from rosebatch.ops.ops import DeltaWeights


class Qwen3Next(Llama):
    """See ``Llama``. The weights of norms are stored less one, but for the norm after the delta rule."""

    delta_names: ClassVar[tuple[str, ...]] = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """``1 + weight`` in fp32: only the normed result is rounded."""
        return 1 + weights.get(f"{name}.weight", (size,), dtype=torch.float32, fill=0.0)

    def load_mixer(
        self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource
    ) -> GatedAttention | DeltaNet:
        """See ``Llama``."""
        delta = self.config.delta
        assert delta is not None, "the family has the delta rule"
        before = sum(delta.layers[:index])
        if delta.layers[index]:
            return self._load_delta(before, prefix, weights)
        return self._load_gated_attention(index - before, prefix, rotary, weights)

    def _load_gated_attention(
        self, layer: int, prefix: str, rotary: Rotary | None, weights: WeightSource
    ) -> GatedAttention:
        c = self.config
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        # The checkpoint has a head's gate behind its q.
        rows = torch.arange(2 * q_size).view(c.num_heads, 2, c.head_dim)
        order = torch.cat((rows[:, 0].flatten(), 2 * q_size + torch.arange(2 * kv_size), rows[:, 1].flatten()))
        names = [prefix + name for name in self.qkv_names]
        sizes = (2 * q_size, kv_size, kv_size)
        heads, kv_heads = self.ops.shard.of(c.num_heads), self.ops.shard.kv_heads(c.num_kv_heads)
        q, kv = channels(heads, c.head_dim), channels(kv_heads, c.head_dim)
        own = columns((q_size, q), (kv_size, kv), (kv_size, kv), (q_size, q))
        qkv_gate = load_linear(self.ops, weights, names, sizes, c.hidden_size, bias=c.qkv_bias, order=order, own=own)
        out_name = [f"{prefix}self_attn.o_proj"]
        out = load_linear(self.ops, weights, out_name, (c.hidden_size,), q_size, bias=c.out_bias, inputs=q)
        spec = AttentionSpec(
            layer=layer,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            head_dim=c.head_dim,
            scale=c.head_dim**-0.5,
            qk_norm=self.load_qk_norm(prefix, weights),
            rotary=rotary,
        )
        return GatedAttention(self.ops, qkv_gate, spec, out)

    def delta_sizes(self) -> tuple[int, ...]:
        """What each of the projections of ``delta_names`` puts out."""
        delta = self.config.delta
        assert delta is not None
        return delta.channels + delta.value_heads * delta.value_dim, 2 * delta.value_heads

    def delta_order(self) -> Tensor | None:
        """The rows of these projections in the order q, k, v, gate, b, a; None for the stored order.

        The checkpoint has them by key head: its q and k, then v and gate of its value heads; and behind all of these, b
        and a of its value heads.
        """
        delta = self.config.delta
        assert delta is not None
        group = delta.value_heads // delta.key_heads
        wide = group * delta.value_dim
        first, second = self.delta_sizes()
        of_heads = torch.arange(first).view(delta.key_heads, -1).split([delta.key_dim, delta.key_dim, wide, wide], 1)
        b_and_a = first + torch.arange(second).view(delta.key_heads, 2, group)
        return torch.cat([*(part.flatten() for part in of_heads), b_and_a[:, 0].flatten(), b_and_a[:, 1].flatten()])

    def _load_delta(self, layer: int, prefix: str, weights: WeightSource) -> DeltaNet:
        c, delta = self.config, self.config.delta
        assert delta is not None
        name, fp32 = f"{prefix}linear_attn.", torch.float32
        names = [prefix + each for each in self.delta_names]
        sizes, order = self.delta_sizes(), self.delta_order()
        group = delta.value_heads // delta.key_heads
        key_heads = self.ops.shard.of(delta.key_heads)
        value_heads = channels(key_heads, group)
        keys = delta.key_heads * delta.key_dim, channels(key_heads, delta.key_dim)
        inner = delta.value_heads * delta.value_dim
        values = inner, channels(value_heads, delta.value_dim)
        rates = delta.value_heads, value_heads
        own = columns(keys, keys, values, values, rates, rates)
        projection = load_linear(self.ops, weights, names, sizes, c.hidden_size, bias=False, order=order, own=own)
        mixed = columns(keys, keys, values)
        conv_take = None if mixed is None else Take(0, mixed)
        rate_take = Take.of(0, value_heads, delta.value_heads)
        spec = StateSpec(
            layer=layer,
            key_heads=len(key_heads),
            value_heads=len(value_heads),
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            weights=DeltaWeights(
                conv=weights.get(f"{name}conv1d.weight", (delta.channels, 1, delta.taps), take=conv_take)[
                    :, 0
                ].contiguous(),
                conv_bias=None,
                log_rate=weights.get(f"{name}A_log", (delta.value_heads,), dtype=fp32, fill=0.0, take=rate_take),
                dt_bias=weights.get(f"{name}dt_bias", (delta.value_heads,), dtype=fp32, fill=1.0, take=rate_take),
            ),
        )
        return DeltaNet(
            self.ops,
            projection,
            spec,
            norm=weights.get(f"{name}norm.weight", (delta.value_dim,), fill=1.0),
            eps=c.norm_eps,
            out=load_linear(
                self.ops, weights, [f"{name}out_proj"], (c.hidden_size,), inner, bias=False, inputs=values[1]
            ),
        )


class Qwen35(Qwen3Next):
    """See ``Qwen3Next``: its checkpoints have the projections apart."""

    delta_names = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )

    def delta_sizes(self) -> tuple[int, ...]:
        """See ``Qwen3Next``."""
        delta = self.config.delta
        assert delta is not None
        return delta.channels, delta.value_heads * delta.value_dim, delta.value_heads, delta.value_heads

    def delta_order(self) -> Tensor | None:
        """See ``Qwen3Next``."""
        return None
