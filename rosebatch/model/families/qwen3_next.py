"""Qwen3-Next and Qwen3.5: the gated delta rule in most layers, gated attention in the others."""

from typing import ClassVar

import torch
from torch import Tensor

from rosebatch.model.families.llama import Llama
from rosebatch.model.mixers.delta.sublayer import load_delta
from rosebatch.model.mixers.softmax.sublayer import load_gated_attention
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import Mixer
from rosebatch.model.weights import WeightSource


class Qwen3Next(Llama):
    """See ``Llama``. The weights of norms are stored less one, but for the norm after the delta rule."""

    delta_names: ClassVar[tuple[str, ...]] = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """``1 + weight`` in fp32: only the normed result is rounded."""
        return 1 + weights.get(f"{name}.weight", (size,), dtype=torch.float32, fill=0.0)

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """See ``Llama``."""
        delta = self.config.delta
        assert delta is not None, "the family has the delta rule"
        before = sum(delta.layers[:index])
        if delta.layers[index]:
            names = [prefix + name for name in self.delta_names]
            own = f"{prefix}linear_attn."
            return load_delta(
                self.config, self.ops, weights, before, names, own, sizes=self.delta_sizes(), order=self.delta_order()
            )
        return load_gated_attention(
            self.config,
            self.ops,
            weights,
            index - before,
            [prefix + name for name in self.qkv_names],
            f"{prefix}self_attn.o_proj",
            rotary=rotary,
            qk_norm=self.load_qk_norm(prefix, weights),
        )

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
