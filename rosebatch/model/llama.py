"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3. What sets them apart is in the config."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.config import ModelConfig
from rosebatch.model.layers import Attention, rope_tables
from rosebatch.model.weights import WeightSource
from rosebatch.ops import Ops


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Callable[[Tensor], Tensor]
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Callable[[Tensor], Tensor]
    mlp_norm: Tensor
    gate_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]


class Llama:
    """Pre-norm transformer with RMSNorm, rotary positions, grouped K/V heads and a gated SiLU MLP.

    Args:
        config: with ``rope`` set.
        ops: the operators of this run.
        weights: by transformers' tensor names.
    """

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        assert config.rope is not None, "the Llama family has rotary positions"
        self.config = config
        self.ops = ops
        self.embedding = weights.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.layers = [self._load_layer(i, weights) for i in range(config.num_layers)]
        self.norm = weights.get("model.norm.weight", (config.hidden_size,))
        head = self.embedding
        if not config.tie_word_embeddings:
            head = weights.get("lm_head.weight", (config.vocab_size, config.hidden_size))
        self.head = ops.linear(head, None)
        cos, sin = rope_tables(config.rope, config.head_dim, config.max_model_len, self.embedding.dtype)
        self.cos, self.sin = cos.to(self.embedding.device), sin.to(self.embedding.device)

    def _load_layer(self, index: int, weights: WeightSource) -> _Layer:
        c = self.config
        prefix = f"model.layers.{index}."
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def vector(name: str, size: int) -> Tensor:
            return weights.get(prefix + name, (size,))

        def linear(names: dict[str, int], in_size: int, bias: bool) -> Callable[[Tensor], Tensor]:
            """Several projections of one input as a single product."""
            weight = [weights.get(f"{prefix}{n}.weight", (size, in_size)) for n, size in names.items()]
            biases = [vector(f"{n}.bias", size) for n, size in names.items()] if bias else None
            return self.ops.linear(torch.cat(weight), None if biases is None else torch.cat(biases))

        attention = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        gate_up = {"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size}
        return _Layer(
            input_norm=vector("input_layernorm.weight", c.hidden_size),
            qkv=linear(attention, c.hidden_size, c.qkv_bias),
            q_norm=vector("self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=vector("self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
            out=linear({"self_attn.o_proj": c.hidden_size}, q_size, c.out_bias),
            mlp_norm=vector("post_attention_layernorm.weight", c.hidden_size),
            gate_up=linear(gate_up, c.hidden_size, c.mlp_bias),
            down=linear({"mlp.down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """See ``rosebatch.model.layers.Model``."""
        ops, eps = self.ops, self.config.norm_eps
        residual = self.embedding[input_ids]
        cos, sin = self.cos[positions], self.sin[positions]
        normed = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, layer, normed, cos, sin, attention)
            normed, residual = ops.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            mlp = layer.down(ops.silu_mul(layer.gate_up(normed)))
            last = index + 1 == len(self.layers)
            following = self.norm if last else self.layers[index + 1].input_norm
            normed, residual = ops.add_rms_norm(mlp, residual, following, eps)
        return normed

    def _attend(
        self, index: int, layer: _Layer, normed: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        c = self.config
        heads = layer.qkv(normed).view(len(normed), -1, c.head_dim)
        rotated, v = heads.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rotated.split((c.num_heads, c.num_kv_heads), dim=1)
            q = self.ops.rms_norm(q, layer.q_norm, c.norm_eps)
            k = self.ops.rms_norm(k, layer.k_norm, c.norm_eps)
            rotated = torch.cat((q, k), dim=1)
        q, k = self.ops.rope(rotated, cos, sin).split((c.num_heads, c.num_kv_heads), dim=1)
        return layer.out(attention(index, q, k, v))

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``rosebatch.model.layers.Model``."""
        return self.head(hidden)
