"""NomicBERT (arXiv 2402.01613): BERT with rotary positions and a gated MLP, whose products have no biases."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rosebatch.model.families.layer_norm_encoder import LayerNormEncoder, first_token_head, gated_encoder
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf.fields import UnservedError, refuse, supported
from rosebatch.model.hf.rope import whole_rope
from rosebatch.model.sublayers import MLP, load_gated_mlp
from rosebatch.model.weights import WeightSource

# Before transformers had the class, config.json had the names of GPT-2.
_FORMER = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "n_positions",
    "rope_theta": "rotary_emb_base",
}
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "rope_theta": 1000.0,
}


class NomicBert(LayerNormEncoder):
    """See ``LayerNormEncoder``."""

    prefixes: ClassVar[tuple[str, ...]] = ("nomic_bert.", "bert.")
    layers_name: ClassVar[str] = "encoder.layers"
    embedding_norm_name: ClassVar[str] = "emb_ln"
    qkv_names: ClassVar[tuple[str, ...]] = ("attn.Wqkv",)
    out_name: ClassVar[str] = "attn.out_proj"
    attention_norm_name: ClassVar[str] = "norm1"
    mlp_norm_name: ClassVar[str] = "norm2"

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """See ``LayerNormEncoder``."""
        names = [f"{prefix}mlp.fc12", f"{prefix}mlp.fc11"]
        return load_gated_mlp(self.config, self.ops, weights, names, f"{prefix}mlp.fc2")


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    if "n_embd" in values:
        values = _renamed(values)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), False)
    return gated_encoder(values, "nomic_bert") | biases | {"rope": whole_rope(values)}


def _renamed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    refuse(values, "prenorm", "parallel_block", "use_rms_norm", "causal", "moe_every_n_layers", "num_experts")
    refuse(values, "rotary_emb_interleaved", "rotary_emb_scale_base", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
    if values.get("rotary_emb_fraction") != 1:
        raise UnservedError("rotary_emb_fraction other than 1 is not supported")
    kind = supported("activation_function", values.get("activation_function"), _ACTIVATIONS)
    renamed = {name: values[former] for name, former in _FORMER.items()} | {"hidden_act": _ACTIVATIONS[kind]}
    if values.get("rotary_scaling_factor"):
        # Positions past the trained ones would change with the length of a prompt.
        renamed["max_position_embeddings"] = values["max_trained_positions"]
    return {**values, **renamed}


ARCHITECTURES = {
    "NomicBertModel": Architecture(
        "nomic_bert",
        "Nomic Embed Text 1 and 1.5",
        _parse,
        _DEFAULTS,
        fallback=False,
        classifier=lambda _: first_token_head("nomic_bert.pooler.dense", "classifier"),
    )
}
FAMILY = Family("nomic_bert", NomicBert, bidirectional=True)
