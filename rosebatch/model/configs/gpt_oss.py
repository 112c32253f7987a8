"""config.json of gpt-oss."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import UnservedError, decoder, layer_types, size, supported, windows
from rosebatch.model.configs.rope import whole_rope

# Of transformers' config class.
GPT_OSS_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    # Checkpoints in MXFP4 leave it out.
    "torch_dtype": "bfloat16",
}
_THETA = 150000.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Of the activation, which the kernels hold as constants.
_CONSTANTS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def gpt_oss(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    for name, served in _CONSTANTS.items():
        if values.get(name, served) != served:
            raise UnservedError(f"{name} other than {served} is not supported")
    supported("hidden_act", values["hidden_act"], ("silu",))
    if not (values.get("rope_parameters") or values.get("rope_scaling")):
        values = {**values, "rope_scaling": _YARN}
    fields, bias = decoder(values, "gpt_oss"), values.get("attention_bias", True)
    layers = fields["num_layers"]
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    experts = {
        "layers": [True] * layers,
        "num_experts": size(values, "num_local_experts"),
        "experts_per_token": size(values, "num_experts_per_tok"),
        "expert_size": size(values, "intermediate_size"),
    }
    return fields | {
        "qkv_bias": bias,
        "out_bias": bias,
        "rope": whole_rope({"rope_theta": _THETA, **values}),
        "sliding_windows": windows(values, layer_types(values, default)),
        "experts": experts,
    }
