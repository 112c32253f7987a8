"""Granite 3.x and 4: a Llama with multipliers in four places. Of Granite 4, models without states and experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rosebatch.model.families.llama import LLAMA_DEFAULTS, LLAMA_GGUF, Llama, parse_llama
from rosebatch.model.family import Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import refuse, size, supported
from rosebatch.model.sublayers import MLP, load_gated_mlp
from rosebatch.model.weights import WeightSource


class Granite4(Llama):
    """See ``Llama``: its MLP is what its other models have beside experts, with gate and up as one tensor."""

    def load_mlp(self, index: int, prefix: str, weights: WeightSource) -> MLP:
        """See ``Llama``."""
        names, down = [f"{prefix}shared_mlp.input_linear"], f"{prefix}shared_mlp.output_linear"
        return load_gated_mlp(self.config, self.ops, weights, names, down)


# Default of transformers' config class.
_GRANITE_4_DEFAULTS = {**LLAMA_DEFAULTS, "num_local_experts": 8, "shared_intermediate_size": 1024}
# Names of versions of transformers.
_ATTENTION = ("attention", "full_attention")


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = parse_llama(values)
    return fields | {
        "attention_scales": [values.get("attention_multiplier", 1.0)] * fields["num_layers"],
        "embedding_multiplier": values.get("embedding_multiplier", 1.0),
        "residual_multiplier": values.get("residual_multiplier", 1.0),
        "logit_multiplier": 1 / values.get("logits_scaling", 1.0),
    }


def _parse_granite_4(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; rotary positions or none."""
    layers = size(values, "num_hidden_layers")
    for kind in values.get("layer_types") or values.get("layers_block_type") or ["mamba"] * layers:
        supported("layer_types", kind, _ATTENTION)
    refuse(values, "num_local_experts")
    fields = _parse({**values, "intermediate_size": size(values, "shared_intermediate_size"), "mlp_bias": False})
    return fields | {"family": "granite4", "rotary_layers": [values.get("position_embedding_type") == "rope"] * layers}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """A factor of 0 is none."""
    # By this key, the files say whether there are rotary positions at all.
    model.require("rope.scaling.finetuned", True)
    fields = gguf_decoder.decoder(model)
    return fields | {
        "attention_multiplier": model.get("attention.scale", 0.0) or fields["head_dim"] ** -0.5,
        "embedding_multiplier": model.get("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": model.get("residual_scale", 0.0) or 1.0,
        "logits_scaling": model.need("logit_scale", float),
        "attention_bias": gguf_decoder.has(model, "attn_q.bias"),
        "mlp_bias": gguf_decoder.has(model, "ffn_gate.bias"),
    }


_GGUF = replace(LLAMA_GGUF, architecture="granite", config=_gguf_config)
ARCHITECTURES = {
    "GraniteForCausalLM": Architecture("granite", "Granite 3.x", _parse, LLAMA_DEFAULTS, gguf=_GGUF),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitemoehybrid", "Granite 4 without Mamba layers", _parse_granite_4, _GRANITE_4_DEFAULTS, fallback=False
    ),
}
FAMILY = Family("granite4", Granite4)
