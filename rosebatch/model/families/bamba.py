"""Bamba: Mamba2 in most layers, attention in the others, an MLP in each."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.config.model import ModelConfig
from rosebatch.model.families.llama import Llama
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.gguf import mamba2 as gguf_mamba2
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


_GGUF_MAMBA = gguf_mamba2.names("mamba.")


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """By one key, files of this architecture say whether there are rotary positions at all."""
    model.require("rope.scaling.finetuned", True)
    attends, kv_heads = gguf_decoder.attending(model, model.need("block_count"))
    return {
        **gguf_decoder.decoder(model, partial=True, kv_heads=kv_heads),
        **gguf_mamba2.config(model),
        "attn_layer_indices": [layer for layer, own in enumerate(attends) if own],
        "attention_bias": gguf_mamba2.has(model, "attn_q.bias"),
        "mlp_bias": gguf_mamba2.has(model, "ffn_gate.bias"),
    }


def _gguf_absent(config: Mapping[str, Any]) -> Collection[str]:
    """The tensors of the other kind of layer."""
    attends = config["attn_layer_indices"]
    others = (
        _GGUF_MAMBA if layer in attends else gguf_decoder.ATTENTION for layer in range(config["num_hidden_layers"])
    )
    return {f"blk.{layer}.{name}" for layer, names in enumerate(others) for name in names}


def gguf_biases(config: Mapping[str, Any]) -> Collection[str]:
    """Names of those with a bias: projections of Mamba2 and of the others."""
    return (*gguf_mamba2.biases(config), *gguf_decoder.biases(config))


def gguf_values(name: str, values: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """q and k have Llama's order, whatever part of a head is rotated."""
    return gguf_mamba2.values(name, gguf_decoder.halves(name, values, config))


_GGUF = GGUF(
    "granitehybrid",
    "model.layers",
    {**gguf_decoder.NAMES, "output_norm": "model.final_layernorm"},
    {
        **gguf_decoder.ATTENTION,
        **_GGUF_MAMBA,
        **{name: other.replace("mlp", "feed_forward") for name, other in gguf_decoder.MLP.items()},
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_ff_layernorm",
    },
    _gguf_config,
    biases=gguf_biases,
    absent=_gguf_absent,
    bare=gguf_mamba2.BARE,
    values=gguf_values,
    # The other models of this architecture have multipliers.
    when=lambda model: not model.get("logit_scale", 0.0),
)
ARCHITECTURES = {"BambaForCausalLM": Architecture("bamba", "Bamba", _parse, _DEFAULTS, fallback=False, gguf=(_GGUF,))}
# Layers are counted apart by what they have: no option goes by their number.
MAMBA_LACKS = ("sliding_windows", "attention_scales", "attention_soft_cap")
FAMILY = Family("bamba", Bamba, needs={"mamba": "Mamba2"}, lacks=MAMBA_LACKS, hf_values=_hf_values)
