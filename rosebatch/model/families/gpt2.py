"""GPT-2: learned positions, LayerNorm, multi-head attention, a plain MLP; biases everywhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, load_embedding, load_head, rows_of
from rosebatch.model.family import GGUF, TOKEN_CLASSIFIER, Architecture, Family, GGUFModel, integers
from rosebatch.model.hf.fields import size, supported
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch.model.sublayers import channels, columns, load_linear
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import ACTIVATIONS, Linear, Ops


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: _Norm
    qkv: Linear
    attention: PagedAttentionSpec
    out: Linear
    mlp_norm: _Norm
    up: Linear
    down: Linear


class GPT2:
    """The pre-norm transformer of 2019.

    Args:
        config: with ``rope`` unset.
        ops: the operators of this run.
        weights: by transformers' tensor names.
    """

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        self.config = config
        self.ops = ops
        self.embedding = load_embedding(config, ops, weights, "transformer.wte")
        self.positions = weights.get("transformer.wpe.weight", (config.max_model_len, config.hidden_size))
        self.layers = [self._load_layer(i, weights) for i in range(config.num_layers)]
        self.mixers = [layer.attention for layer in self.layers]
        self.norm = self._load_norm("transformer.ln_f", weights)
        self.logits = load_head(config, ops, weights, self.embedding)

    def _load_norm(self, name: str, weights: WeightSource) -> _Norm:
        size = (self.config.hidden_size,)
        return _Norm(weights.get(f"{name}.weight", size, fill=1.0), weights.get(f"{name}.bias", size))

    def _load_layer(self, index: int, weights: WeightSource) -> _Layer:
        c = self.config
        hidden, inner = c.hidden_size, c.intermediate_size
        prefix = f"transformer.h.{index}."

        def linear(
            name: str, in_size: int, out_size: int, own: np.ndarray | None = None, inputs: range | None = None
        ) -> Linear:
            """See ``load_linear``; GPT-2's checkpoints hold weights as [in, out]."""
            names, sizes = [prefix + name], (out_size,)
            return load_linear(
                self.ops, weights, names, sizes, in_size, bias=True, own=own, inputs=inputs, transposed=True
            )

        heads, inner_own = self.ops.shard.of(c.num_heads), self.ops.shard.of(inner)
        own = channels(heads, c.head_dim)
        return _Layer(
            input_norm=self._load_norm(prefix + "ln_1", weights),
            qkv=linear("attn.c_attn", hidden, 3 * hidden, columns(*[(hidden, own)] * 3)),
            attention=PagedAttentionSpec(
                layer=index,
                num_heads=len(heads),
                num_kv_heads=len(heads),
                head_dim=c.head_dim,
                scale=c.attention_scale(index),
                window=c.sliding_window(index),
                e4m3=c.stores_e4m3(c.sliding_window(index)),
            ),
            out=linear("attn.c_proj", hidden, hidden, inputs=own),
            mlp_norm=self._load_norm(prefix + "ln_2", weights),
            up=linear("mlp.c_fc", hidden, inner, columns((inner, inner_own))),
            down=linear("mlp.c_proj", inner, hidden, inputs=inner_own),
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """See ``rosebatch.model.contract.Model``."""
        ops, eps = self.ops, self.config.norm_eps
        embedded = ops.embed(input_ids, self.embedding, self.config.vocab_size)
        residual = embedded + functional.embedding(positions, self.positions)
        first = self.layers[0].input_norm
        normed = ops.layer_norm(residual, first.weight, first.bias, eps)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, next_norm in zip(self.layers, following, strict=True):
            rows = wanted if layer is self.layers[-1] else None
            attended = ops.project(layer.out, attention(layer.attention, layer.qkv(normed), wanted=rows))
            norm, residual = layer.mlp_norm, rows_of(residual, rows)
            normed, residual = ops.add_layer_norm(attended, residual, norm.weight, norm.bias, eps)
            hidden = ops.project(layer.down, ops.activated(self.config.activation, layer.up, normed))
            normed, residual = ops.add_layer_norm(hidden, residual, next_norm.weight, next_norm.bias, eps)
        return normed


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    hidden, layers, heads = (size(values, name) for name in ("n_embd", "n_layer", "n_head"))
    head_dim = hidden // heads
    scale = head_dim**-0.5 if values.get("scale_attn_weights", True) else 1.0
    by_layer = values.get("scale_attn_by_inverse_layer_idx", False)
    return {
        "family": "gpt2",
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": values.get("n_inner") or 4 * hidden,
        "max_model_len": values.get("n_positions", 1024),
        "norm_eps": values.get("layer_norm_epsilon", 1e-5),
        "activation": supported("activation_function", values.get("activation_function", "gelu_new"), ACTIVATIONS),
        "tie_word_embeddings": values.get("tie_word_embeddings", True),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "attention_scales": [scale / (i + 1 if by_layer else 1) for i in range(layers)],
    }


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_model_len,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": config.activation,
    }


_GGUF_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    heads = model.need("attention.head_count", integers(1))
    model.require("attention.head_count_kv", heads)
    return {
        "n_positions": model.need("context_length"),
        "n_embd": model.need("embedding_length", integers(heads)),
        "n_layer": model.need("block_count"),
        "n_head": heads,
        "n_inner": model.need("feed_forward_length"),
        "layer_norm_epsilon": model.need("attention.layer_norm_epsilon", float),
    }


def _gguf_values(name: str, values: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """transformers stores the projections as ``[in, out]``."""
    return values.T if values.ndim == 2 and ".h." in name else values


_GGUF_BIASES = ("output_norm", *_GGUF_LAYER_NAMES)
_GGUF = GGUF(
    "gpt2",
    "transformer.h",
    _GGUF_NAMES,
    _GGUF_LAYER_NAMES,
    _gguf_config,
    biases=lambda _: _GGUF_BIASES,
    values=_gguf_values,
)
ARCHITECTURES = {
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        "GPT-2",
        _parse,
        {"eos_token_id": 50256},
        gguf=_GGUF,
        token_classifier=lambda _: TOKEN_CLASSIFIER,
    )
}
FAMILY = Family("gpt2", GPT2, mlp_matrices=2, hf_values=_hf_values)
