"""Mixtral: Llama's layers with experts that have other names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rosebatch.model.experts import ExpertNames
from rosebatch.model.families.llama import LLAMA_GGUF, Llama
from rosebatch.model.families.mistral import MISTRAL_DEFAULTS, parse_mistral
from rosebatch.model.family import EACH, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import local_experts, supported
from rosebatch.model.hf.rope import whole_rope
from rosebatch.ops.ops import EXPERT_GATES


class Mixtral(Llama):
    """See ``Llama``."""

    expert_names = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")


# Defaults of transformers' config class.
_DEFAULTS = {
    **MISTRAL_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_THETA = 1e6


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; experts in every layer."""
    fields = parse_mistral(values)
    supported("hidden_act", values["hidden_act"], EXPERT_GATES)
    return fields | {
        "family": "mixtral",
        "rope": whole_rope({"rope_theta": _THETA, **values}),
        "experts": local_experts(values, fields["num_layers"]),
    }


_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EACH}.w1",
    "ffn_up_exps": f"block_sparse_moe.experts.{EACH}.w3",
    "ffn_down_exps": f"block_sparse_moe.experts.{EACH}.w2",
}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """Its experts are as wide as Llama's MLP."""
    counts = {"num_local_experts": model.need("expert_count"), "num_experts_per_tok": model.need("expert_used_count")}
    return {**gguf_decoder.llama(model), **counts, "attention_bias": False, "mlp_bias": False}


_GGUF = replace(
    LLAMA_GGUF,
    layer_names={**gguf_decoder.ATTENTION, **_EXPERTS, **gguf_decoder.NORMS},
    config=_gguf_config,
    # It has Llama's name.
    when=lambda model: model.get("expert_count", 0) > 0,
)
ARCHITECTURES = {
    "MixtralForCausalLM": Architecture(
        "mixtral", "Mixtral", _parse, _DEFAULTS, window=True, experts=True, gguf=(_GGUF,)
    ),
}
FAMILY = Family("mixtral", Mixtral, needs={"experts": "routed experts"})
