"""GTE of 2024 (arXiv 2407.19669): BERT with rotary positions and a gated MLP."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from rosebatch.model.families.layer_norm_encoder import LayerNormEncoder, first_token_head, gated_encoder
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf.fields import refuse, supported
from rosebatch.model.hf.rope import rope_members, whole_rope
from rosebatch.model.sublayers import MLP, GatedMLP, columns, load_linear
from rosebatch.model.weights import WeightSource

_DEFAULTS = {
    "hidden_act": "gelu",
    "max_position_embeddings": 8192,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "rope",
}


class Gte(LayerNormEncoder):
    """See ``LayerNormEncoder``."""

    prefixes: ClassVar[tuple[str, ...]] = ("gte.", "new.")
    qkv_names: ClassVar[tuple[str, ...]] = ("attention.qkv_proj",)
    out_name: ClassVar[str] = "attention.o_proj"
    attention_norm_name: ClassVar[str] = "attn_ln"
    mlp_norm_name: ClassVar[str] = "mlp_ln"

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """See ``LayerNormEncoder``: the checkpoint has the gate after the other product, and one bias."""
        hidden, size, ops = self.config.hidden_size, self.config.intermediate_size, self.ops
        inner, gate_first = ops.shard.of(size), torch.arange(2 * size).roll(size)
        names, own = [f"{prefix}mlp.up_gate_proj"], columns((size, inner), (size, inner))
        gate_up = load_linear(ops, weights, names, (size, size), hidden, bias=False, order=gate_first, own=own)
        down = load_linear(ops, weights, [f"{prefix}mlp.down_proj"], (hidden,), size, bias=True, inputs=inner)
        return GatedMLP(ops, self.config.activation, gate_up, down)


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    refuse(values, "logn_attention_scale")
    supported("position_embedding_type", values["position_embedding_type"], ("rope",))
    supported("layer_norm_type", values.get("layer_norm_type", "layer_norm"), ("layer_norm",))
    fields = gated_encoder(values, "gte")
    return fields | {"rope": _rope(values, fields["head_dim"])}


def _rope(values: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """NTK scaling is another base, and a division of all frequencies (Su 2023, kexue.fm/archives/9706, equation 6)."""
    stored = rope_members(values)
    if stored.get("type", stored.get("rope_type")) != "ntk":
        return whole_rope(values)
    refuse(stored, "mixed_b")
    factor = stored["factor"]
    return {"theta": values["rope_theta"] * factor, "scaling": "linear", "factor": factor ** (2 / channels)}


# Alibaba-NLP's own code, which transformers has as ``gte``, has the type ``new``.
ARCHITECTURES = {
    f"{name}Model": Architecture(
        kind,
        models,
        _parse,
        {**_DEFAULTS, "rope_theta": theta},
        fallback=False,
        classifier=lambda values: first_token_head(f"{values['model_type']}.pooler.dense", "classifier"),
    )
    for name, kind, models, theta in (
        ("New", "new", "GTE base and large en v1.5, multilingual base", 10_000.0),
        ("Gte", "gte", "GTE of 2024 in transformers' form", 160_000.0),
    )
}
FAMILY = Family("gte", Gte, bidirectional=True)
