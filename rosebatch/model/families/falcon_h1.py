"""Falcon-H1: attention and Mamba2 side by side in each layer, and factors on most products."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.config.model import ModelConfig
from rosebatch.config.multipliers import MultipliersConfig
from rosebatch.model.families.bamba import MAMBA_LACKS, mamba_values
from rosebatch.model.families.steps_decoder import Step, StepsDecoder
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.gguf import mamba2 as gguf_mamba2
from rosebatch.model.hf.fields import UnservedError, decoder, decoder_values, refuse, size
from rosebatch.model.hf.mamba2 import MAMBA_DEFAULTS, mamba
from rosebatch.model.hf.rope import whole_rope
from rosebatch.model.mixers.mamba2.sublayer import load_mamba
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch.model.mixers.paged_attention.sublayer import load_paged_attention
from rosebatch.model.rope import Rotary, layer_rotaries
from rosebatch.model.sublayers import GatedMLP, SelfAttention, load_gated_mlp, scaled
from rosebatch.model.weights import WeightSource


class FalconH1(StepsDecoder):
    """See ``StepsDecoder``: a layer is a step of two mixers, and one of an MLP."""

    embedding_name = "model.embed_tokens"
    norm_name = "model.final_layernorm"

    def load_steps(self, weights: WeightSource) -> list[Step]:
        """See ``StepsDecoder``."""
        rotaries = layer_rotaries(self.config, self.embedding)
        return [step for layer, rotary in enumerate(rotaries) for step in self._load_layer(layer, rotary, weights)]

    def _load_layer(self, layer: int, rotary: Rotary | None, weights: WeightSource) -> tuple[Step, Step]:
        prefix = f"model.layers.{layer}."
        attention = self._load_attention(layer, f"{prefix}self_attn.", rotary, weights)
        mixer = load_mamba(self.config, self.ops, weights, layer, f"{prefix}mamba.")
        return (
            Step(self.load_norm(f"{prefix}input_layernorm", weights), (attention, mixer)),
            Step(self.load_norm(f"{prefix}pre_ff_layernorm", weights), mlp=self._load_mlp(prefix, weights)),
        )

    def _load_attention(self, layer: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> SelfAttention:
        names = [f"{prefix}{name}_proj" for name in "qkv"]
        own = load_paged_attention(
            self.config,
            self.ops,
            weights,
            layer,
            names,
            f"{prefix}o_proj",
            rotary=rotary,
            qk_norm=None,
            qkv_order=None,
        )
        spec = own.spec
        assert isinstance(spec, PagedAttentionSpec)
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        factors, like = self._factors, self.embedding
        qkv = scaled(own.qkv, factors.of_qkv, [q, kv, kv], like)
        return SelfAttention(
            self.ops, qkv, spec, scaled(own.out, [factors.attention_out], [self.config.hidden_size], like)
        )

    def _load_mlp(self, prefix: str, weights: WeightSource) -> GatedMLP:
        names = [f"{prefix}feed_forward.gate_proj", f"{prefix}feed_forward.up_proj"]
        own = load_gated_mlp(self.config, self.ops, weights, names, f"{prefix}feed_forward.down_proj")
        inner = len(self.ops.shard.of(self.config.intermediate_size))
        factors, like = self._factors, self.embedding
        gate_up = scaled(own.gate_up, [factors.gate, 1.0], [inner, inner], like)
        down = scaled(own.down, [factors.down], [self.config.hidden_size], like)
        return GatedMLP(self.ops, own.activation, gate_up, down)

    @property
    def _factors(self) -> MultipliersConfig:
        return self.config.multipliers or MultipliersConfig()


# Defaults of transformers' config class.
_DEFAULTS = {
    **MAMBA_DEFAULTS,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "eos_token_id": 2,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
}
_MLP, _MAMBA = 2, 5
# Fields of ``MultipliersConfig`` -> transformers' names.
_MULTIPLIERS = {
    "attention_in": "attention_in_multiplier",
    "attention_out": "attention_out_multiplier",
    "key": "key_multiplier",
    "mamba_in": "ssm_in_multiplier",
    "mamba_out": "ssm_out_multiplier",
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    # A factor of a product's input does not count for its bias.
    refuse(values, "attention_bias", "mamba_proj_bias", "projectors_bias")
    norm = values.get("mamba_rms_norm", False)
    if norm and values["mamba_norm_before_gate"]:
        raise UnservedError("mamba_norm_before_gate is not supported with mamba_rms_norm")
    fields = decoder(values, "falcon_h1", activations=("silu",))
    layers = fields["num_layers"]
    inner = None if values["mamba_d_ssm"] is None else size(values, "mamba_d_ssm")
    return fields | {
        "mlp_bias": values.get("mlp_bias", False),
        "rope": whole_rope(values),
        "attention_layers": [True] * layers,
        "mamba": {**mamba(values, [True] * layers, inner), "norm": norm},
        "multipliers": _multipliers(values),
        "embedding_multiplier": values.get("embedding_multiplier", 1.0),
        "logit_multiplier": values.get("lm_head_multiplier", 1.0),
    }


def _multipliers(values: Mapping[str, Any]) -> dict[str, Any]:
    def factors(name: str, count: int) -> list[float]:
        given = values.get(name) or [1.0] * count
        if not isinstance(given, list) or len(given) != count:
            raise ValueError(f"{name} must be a list of {count} numbers")
        return given

    gate, down = factors("mlp_multipliers", _MLP)
    return {
        **{field: values.get(name, 1.0) for field, name in _MULTIPLIERS.items()},
        "mamba": factors("ssm_multipliers", _MAMBA),
        "gate": gate,
        "down": down,
    }


def _check(config: ModelConfig) -> None:
    if not all((*config.state_layers, *config.attends)):
        raise ValueError("each layer of falcon_h1 has both attention and Mamba2")


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    positions, part, factors = config.rope, config.mamba, config.multipliers or MultipliersConfig()
    assert positions is not None and part is not None, "Falcon-H1 has rotary positions and Mamba2"
    return {
        **decoder_values(config),
        **mamba_values(config),
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_act": config.activation,
        "rope_parameters": {"rope_type": "default", "rope_theta": positions.theta},
        "mamba_d_ssm": part.inner,
        "mamba_rms_norm": part.norm,
        "mamba_norm_before_gate": False,
        **{name: getattr(factors, field) for field, name in _MULTIPLIERS.items()},
        "ssm_multipliers": list(factors.mamba),
        "mlp_multipliers": [factors.gate, factors.down],
        "embedding_multiplier": config.embedding_multiplier,
        "lm_head_multiplier": config.logit_multiplier,
    }


_GGUF_MLP = {name: other.replace("mlp", "feed_forward") for name, other in gguf_decoder.MLP.items()}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """All factors are in the weights."""
    return {
        **gguf_decoder.decoder(model),
        **gguf_mamba2.config(model),
        "mamba_d_ssm": model.need("ssm.inner_size"),
        "mamba_rms_norm": gguf_mamba2.has(model, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_bias": gguf_mamba2.has(model, "ffn_gate.bias"),
    }


def _gguf_biases(config: Mapping[str, Any]) -> Collection[str]:
    return (*gguf_mamba2.biases(config), *(_GGUF_MLP if config["mlp_bias"] else ()))


def _gguf_values(name: str, values: NDArray[np.float32], _: Mapping[str, Any]) -> NDArray[np.float32]:
    return gguf_mamba2.values(name, values)


_GGUF = GGUF(
    "falcon-h1",
    "model.layers",
    {**gguf_decoder.NAMES, "output_norm": "model.final_layernorm"},
    {
        **gguf_decoder.ATTENTION,
        **gguf_mamba2.names("mamba."),
        **_GGUF_MLP,
        "attn_norm": "input_layernorm",
        # It has no suffix in these files.
        "ffn_norm": "pre_ff_layernorm.weight",
    },
    _gguf_config,
    biases=_gguf_biases,
    absent=lambda config: () if config["mamba_rms_norm"] else ("ssm_norm",),
    bare=(*gguf_mamba2.BARE, "ffn_norm"),
    values=_gguf_values,
)
ARCHITECTURES = {
    "FalconH1ForCausalLM": Architecture("falcon_h1", "Falcon-H1", _parse, _DEFAULTS, fallback=False, gguf=(_GGUF,))
}
FAMILY = Family(
    "falcon_h1",
    FalconH1,
    needs={"mamba": "Mamba2", "attention_layers": "that all layers have attention"},
    may_have=("multipliers",),
    lacks=MAMBA_LACKS,
    check=_check,
    hf_values=_hf_values,
)
