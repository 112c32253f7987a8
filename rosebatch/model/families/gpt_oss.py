"""gpt-oss: experts with biases and a clamped activation, attention with sinks, windows in every other layer.

Checkpoints hold an expert's matrices in 16 bits, ``[E, in, out]``, or in MXFP4, which is expanded at load.
"""

import numpy as np
import torch
from torch import Tensor

from rosebatch.model.experts import ExpertsMLP, make_router
from rosebatch.model.families.llama import Llama
from rosebatch.model.mixers.softmax.sublayer import SelfAttention, load_attention
from rosebatch.model.quantization.formats import load_weight
from rosebatch.model.rope import Rotary
from rosebatch.model.weights import WeightSource, lazy_tensor
from rosebatch.ops.ops import Experts


class GptOss(Llama):
    """See ``Llama``."""

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> SelfAttention:
        """See ``Llama``."""
        return load_attention(
            self.config,
            self.ops,
            weights,
            index,
            [prefix + name for name in self.qkv_names],
            f"{prefix}self_attn.o_proj",
            rotary=rotary,
            qk_norm=None,
            qkv_order=None,
            sinks=self._load_sinks(prefix, weights),
        )

    def _load_sinks(self, prefix: str, weights: WeightSource) -> Tensor:
        heads = self.ops.shard.of(self.config.num_heads)
        sinks = weights.get(f"{prefix}self_attn.sinks", (self.config.num_heads,))
        return sinks[heads.start : heads.stop].contiguous()

    def load_experts(self, prefix: str, weights: WeightSource) -> ExpertsMLP:
        """See ``Llama``."""
        config, own = self.config.experts, f"{prefix}mlp."
        assert config is not None
        count, inner, hidden = config.num_experts, config.expert_size, self.config.hidden_size
        part = self.ops.shard.of(inner)
        # Checkpoints hold gate and up rows in turn.
        gate = np.arange(2 * part.start, 2 * part.stop, 2)
        apart = np.concatenate([gate, gate + 1])
        gate_up = load_weight(weights, f"{own}experts.gate_up_proj", (count, 2 * inner, hidden), transposed=True)
        gate_up_bias = lazy_tensor(weights, f"{own}experts.gate_up_proj_bias", (count, 2 * inner)).take(1, apart)
        down = load_weight(weights, f"{own}experts.down_proj", (count, hidden, inner), transposed=True)
        down_bias = weights.get(f"{own}experts.down_proj_bias", (count, hidden))
        if self.ops.shard.rank > 0:
            # The sum over all processes has it once.
            down_bias = torch.zeros_like(down_bias)
        routed = Experts(
            gate_up=gate_up.rows(apart),
            down=down.columns(part),
            gate_up_bias=gate_up_bias.read(),
            down_bias=down_bias,
            activation="clamped_swiglu",
            k=config.experts_per_token,
            normalize=config.normalize,
        )
        router = load_weight(weights, f"{own}router.weight", (count, hidden))
        bias = weights.get(f"{own}router.bias", (count,))
        return ExpertsMLP(make_router(self.ops, router, bias), count, self.ops.experts(routed))
