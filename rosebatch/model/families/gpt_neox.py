"""GPT-NeoX and Pythia: a plain MLP; attention and MLP in parallel, each with its own norm."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.family import GGUF, TOKEN_CLASSIFIER, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import UnservedError, attention_biases, decoder
from rosebatch.model.hf.rope import rope, rotary_dim, rotary_share
from rosebatch.model.sublayers import MLP, load_plain_mlp
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import ACTIVATIONS


class GPTNeoX(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    embedding_name = "gpt_neox.embed_in"
    layers_name = "gpt_neox.layers"
    norm_name = "gpt_neox.final_layer_norm"
    qkv_names = ("attention.query_key_value",)
    out_name = "attention.dense"

    def has_mlp_norm(self) -> bool:
        """In both forms of the layer."""
        return True

    def qkv_order(self) -> Tensor:
        """Checkpoints hold q, k and v of the first head, then those of the second, and so on."""
        heads, size = self.config.num_heads, self.config.head_dim
        return torch.arange(heads * 3 * size).view(heads, 3, size).transpose(0, 1).flatten()

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """See ``LayerNormDecoder``."""
        up_name, down_name = f"{prefix}mlp.dense_h_to_4h", f"{prefix}mlp.dense_4h_to_h"
        return load_plain_mlp(self.config, self.ops, weights, up_name, down_name)


# Defaults of transformers' config class.
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "attention_bias": True,
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; all heads have K and V of their own."""
    fields = decoder(
        {**values, "num_key_value_heads": None, "head_dim": None},
        "gpt_neox",
        eps="layer_norm_eps",
        activations=ACTIVATIONS,
    )
    if values.get("head_dim") not in (None, fields["head_dim"]):
        # transformers rotates so many channels, of heads that have another number.
        raise UnservedError("head_dim other than hidden_size / num_attention_heads is not supported")
    return fields | {
        **attention_biases(values),
        "mlp_bias": True,
        "parallel_residual": values.get("use_parallel_residual", True),
        "rope": rope(values, theta_name="rotary_emb_base"),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 0.25, "rotary_pct")),
    }


_GGUF_NAMES = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"}
_GGUF_LAYER_NAMES = {
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
    **gguf_decoder.NORMS,
}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    return gguf_decoder.decoder(model, layer_norm="layer_norm_eps", partial=True) | {
        "use_parallel_residual": model.need("use_parallel_residual", bool),
        "attention_bias": gguf_decoder.has(model, "attn_qkv.bias"),
    }


def _gguf_biases(config: Mapping[str, Any]) -> tuple[str, ...]:
    attention = ("attn_qkv", "attn_output") if config["attention_bias"] else ()
    return (*attention, "ffn_up", "ffn_down", *gguf_decoder.NORMS, "output_norm")


def _gguf_values(name: str, values: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """Rows of q, k and v by head: files have all of q first."""
    if "query_key_value" not in name:
        return values
    heads, shape = config["num_attention_heads"], values.shape
    return values.reshape(3, heads, -1, *shape[1:]).swapaxes(0, 1).reshape(shape)


_GGUF = GGUF(
    "gptneox",
    "gpt_neox.layers",
    _GGUF_NAMES,
    _GGUF_LAYER_NAMES,
    _gguf_config,
    biases=_gguf_biases,
    values=_gguf_values,
)
ARCHITECTURES = {
    "GPTNeoXForCausalLM": Architecture(
        "gpt_neox",
        "GPT-NeoX, Pythia",
        _parse,
        _DEFAULTS,
        gguf=(_GGUF,),
        token_classifier=lambda _: TOKEN_CLASSIFIER,
    )
}
FAMILY = Family("gpt_neox", GPTNeoX, mlp_matrices=2)
