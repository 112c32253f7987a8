"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3. Their differences are in the config."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch.config import ModelConfig
from rosebatch.model.layers import Attention, AttentionSpec, load_head, rope_tables
from rosebatch.model.weights import WeightSource
from rosebatch.ops import HeadRMSNorm, Linear, Ops, Weight


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    attention: AttentionSpec
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Pre-norm transformer with RMSNorm, rotary positions, grouped K/V heads and a gated SiLU MLP.

    Args:
        config: with ``rope`` set.
        ops: the operators of this run.
        weights: by transformers' tensor names.
    """

    mlp_matrices = 3

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        assert config.rope is not None, "the Llama family has rotary positions"
        self.config = config
        self.ops = ops
        self.embedding = weights.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.rotary = rope_tables(
            config.rope, config.head_dim, config.max_model_len, self.embedding.dtype, self.embedding.device
        )
        self.layers = [self._load_layer(i, weights) for i in range(config.num_layers)]
        self.attention = [layer.attention for layer in self.layers]
        self.norm = weights.get("model.norm.weight", (config.hidden_size,), fill=1.0)
        self.head = load_head(config, ops, weights, self.embedding)

    def _load_layer(self, index: int, weights: WeightSource) -> _Layer:
        c = self.config
        prefix = f"model.layers.{index}."
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def norm(name: str, size: int) -> Tensor:
            return weights.get(f"{prefix}{name}.weight", (size,), fill=1.0)

        def linear(names: dict[str, int], in_size: int, bias: bool) -> Linear:
            """Several projections of one input as a single product."""
            weight = [weights.get(f"{prefix}{n}.weight", (size, in_size)) for n, size in names.items()]
            biases = [weights.get(f"{prefix}{n}.bias", (size,)) for n, size in names.items()] if bias else None
            return self.ops.linear(Weight(torch.cat(weight)), None if biases is None else torch.cat(biases))

        attention = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        gate_up = {"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size}
        qk_norm = None
        if c.qk_norm:
            q_weight, k_weight = (norm(f"self_attn.{name}_norm", c.head_dim) for name in "qk")
            qk_norm = HeadRMSNorm(q_weight, k_weight, c.norm_eps)
        return _Layer(
            input_norm=norm("input_layernorm", c.hidden_size),
            qkv=linear(attention, c.hidden_size, c.qkv_bias),
            attention=AttentionSpec(
                layer=index,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                scale=c.attention_scale(index),
                window=c.sliding_window(index),
                qk_norm=qk_norm,
                rotary=self.rotary,
            ),
            out=linear({"self_attn.o_proj": c.hidden_size}, q_size, c.out_bias),
            mlp_norm=norm("post_attention_layernorm", c.hidden_size),
            gate_up=linear(gate_up, c.hidden_size, c.mlp_bias),
            down=linear({"mlp.down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """See ``rosebatch.model.layers.Model``."""
        ops, eps = self.ops, self.config.norm_eps
        residual = functional.embedding(input_ids, self.embedding)
        normed = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, next_norm in zip(self.layers, following, strict=True):
            attended = attention(layer.attention, layer.qkv(normed))
            normed, residual = ops.add_rms_norm(ops.project(layer.out, attended), residual, layer.mlp_norm, eps)
            hidden = ops.gated("silu_mul", layer.gate_up, normed)
            normed, residual = ops.add_rms_norm(ops.project(layer.down, hidden), residual, next_norm, eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``rosebatch.model.layers.Model``."""
        return self.head(hidden)
