"""Mixtral: Llama's layers with experts that have other names."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.experts import ExpertNames
from rosebatch.model.families.llama import Llama
from rosebatch.model.families.mistral import MISTRAL_DEFAULTS, parse_mistral
from rosebatch.model.family import Architecture, Family
from rosebatch.model.gguf_llama import MIXTRAL
from rosebatch.model.hf_fields import local_experts, supported
from rosebatch.model.hf_rope import whole_rope
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


ARCHITECTURES = {
    "MixtralForCausalLM": Architecture(
        "mixtral", "Mixtral", _parse, _DEFAULTS, window=True, experts=True, gguf=MIXTRAL
    ),
}
FAMILY = Family("mixtral", Mixtral, needs={"experts": "routed experts"})
