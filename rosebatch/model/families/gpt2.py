"""GPT-2: learned positions, LayerNorm, multi-head attention, a plain MLP; biases everywhere."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import ImageRows
from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.family import GGUF, TOKEN_CLASSIFIER, Architecture, Family, GGUFModel, integers
from rosebatch.model.hf.fields import size, supported
from rosebatch.model.sublayers import MLP, load_plain_mlp
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import ACTIVATIONS, Ops


class GPT2(LayerNormDecoder):
    """The pre-norm transformer of 2019. Its checkpoints hold weights of products as ``[in, out]``."""

    embedding_name = "transformer.wte"
    layers_name = "transformer.h"
    norm_name = "transformer.ln_f"
    norm_names = ("ln_1", "ln_2")
    qkv_names = ("attn.c_attn",)
    out_name = "attn.c_proj"
    transposed = True

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        super().__init__(config, ops, weights)
        self.positions = weights.get("transformer.wpe.weight", (config.max_model_len, config.hidden_size))

    def embed(self, input_ids: Tensor, positions: Tensor, images: ImageRows | None) -> Tensor:
        """See ``LayerNormDecoder``."""
        return super().embed(input_ids, positions, images) + functional.embedding(positions, self.positions)

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """See ``LayerNormDecoder``."""
        up, down = f"{prefix}mlp.c_fc", f"{prefix}mlp.c_proj"
        return load_plain_mlp(self.config, self.ops, weights, up, down, transposed=True)


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
        gguf=(_GGUF,),
        token_classifier=lambda _: TOKEN_CLASSIFIER,
    )
}
FAMILY = Family("gpt2", GPT2, mlp_matrices=2, hf_values=_hf_values)
