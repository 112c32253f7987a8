"""Bamba: Mamba2 in most layers, attention in the others, an MLP in each."""

from collections.abc import Mapping
from typing import Any

from rosebatch.config.model import ModelConfig
from rosebatch.model.families.llama import Llama
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf.fields import attention_biases, decoder, decoder_values
from rosebatch.model.hf.mamba2 import MAMBA_DEFAULTS, mamba
from rosebatch.model.hf.rope import rope, rotary_dim, rotary_share
from rosebatch.model.mixers.mamba2.sublayer import load_mamba
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import Mixer
from rosebatch.model.weights import WeightSource


class MambaLlama(Llama):
    """See ``Llama``: some layers have Mamba2 in place of attention."""

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """See ``Llama``."""
        layers = self.config.state_layers
        before = sum(layers[:index])
        if layers[index]:
            return load_mamba(self.config, self.ops, weights, before, f"{prefix}mamba.")
        return super().load_mixer(index - before, prefix, rotary, weights)


class Bamba(MambaLlama):
    """See ``MambaLlama``."""

    gate_up_names = ("feed_forward.gate_proj", "feed_forward.up_proj")
    down_name = "feed_forward.down_proj"
    mlp_norm_name = "pre_ff_layernorm"
    norm_name = "model.final_layernorm"


# Defaults of transformers' config class, which has a field for the share of rotated channels nowhere.
_DEFAULTS = {
    **MAMBA_DEFAULTS,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_SHARE = 0.5


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    # The convolutions of transformers' layers have it too; ours have SiLU.
    fields = decoder(values, "bamba", activations=("silu",))
    attends = values.get("attn_layer_indices") or []
    layers = [layer not in attends for layer in range(fields["num_layers"])]
    return fields | {
        **attention_biases(values),
        "mlp_bias": values.get("mlp_bias", False),
        "rope": rope(values),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, _SHARE)),
        "mamba": mamba(values, layers),
    }


def mamba_values(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for Mamba2 layers, as ``MAMBA_DEFAULTS`` names them."""
    part = config.mamba
    assert part is not None, "the family has Mamba2"
    return {
        "mamba_n_heads": part.heads,
        "mamba_d_head": part.head_dim,
        "mamba_n_groups": part.groups,
        "mamba_d_state": part.state_size,
        "mamba_d_conv": part.taps,
        "mamba_expand": part.inner // config.hidden_size,
        "mamba_conv_bias": part.conv_bias,
        "mamba_proj_bias": part.proj_bias,
    }


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    positions = config.rope
    assert positions is not None, "Bamba has rotary positions"
    share = config.rotary_size / config.head_dim
    return {
        **decoder_values(config),
        **mamba_values(config),
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "hidden_act": config.activation,
        "rope_parameters": {"rope_type": "default", "rope_theta": positions.theta, "partial_rotary_factor": share},
        "attn_layer_indices": [layer for layer, own in enumerate(config.attends) if own],
    }


ARCHITECTURES = {"BambaForCausalLM": Architecture("bamba", "Bamba", _parse, _DEFAULTS, fallback=False)}
# Layers are counted apart by what they have: no option goes by their number.
MAMBA_LACKS = ("sliding_windows", "attention_scales", "attention_soft_cap")
FAMILY = Family("bamba", Bamba, needs={"mamba": "Mamba2"}, lacks=MAMBA_LACKS, hf_values=_hf_values)
