"""OLMo hybrid: the gated delta rule in most layers, between Llama's norms; OLMo 2's layers in the others."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.families.olmo2 import Olmo2
from rosebatch.model.families.qwen3_next import DELTA_LACKS
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf.fields import attention_biases, decoder, size, supported
from rosebatch.model.hf.rope import rope_members, whole_rope
from rosebatch.model.mixers.gated_delta.sublayer import DeltaNames, load_delta
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import Mixer
from rosebatch.model.weights import WeightSource

_PROJECTIONS = ("q", "k", "v", "g", "b", "a")
_NAMES = DeltaNames(("q_conv1d", "k_conv1d", "v_conv1d"), "o_norm", "o_proj")
# Of the gated norm, whatever config.json says.
_EPS = 1e-5
# transformers' names of norms -> those in files.
_STORED = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


class OlmoHybrid(Olmo2):
    """See ``Llama``."""

    def norm_names(self, index: int) -> tuple[str | None, ...]:
        """See ``Llama``."""
        if self.config.state_layers[index]:
            return "input_layernorm", None, "post_attention_layernorm", None
        return super().norm_names(index)

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """See ``Olmo2``. transformers renames norms of all layers when it saves them."""
        layer, _, own = name.rpartition(".")
        stored = f"{layer}.{_STORED.get(own, own)}"
        return super().load_norm(name if weights.shape(f"{stored}.weight") is None else stored, size, weights)

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """See ``Llama``."""
        delta = self.config.delta
        assert delta is not None, "the family has the delta rule"
        before = sum(delta.layers[:index])
        if not delta.layers[index]:
            return super().load_mixer(index - before, prefix, rotary, weights)
        own = f"{prefix}linear_attn."
        keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
        sizes = keys, keys, values, values, delta.value_heads, delta.value_heads
        names = [f"{own}{name}_proj" for name in _PROJECTIONS]
        return load_delta(
            self.config, self.ops, weights, before, names, own, sizes=sizes, order=None, own_names=_NAMES, eps=_EPS
        )


# Defaults of transformers' config class.
_DEFAULTS = {
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "pad_token_id": 100277,
    "eos_token_id": 100257,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
_LAYER_TYPES = ("linear_attention", "full_attention")


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; rotary positions or none."""
    # The convolutions of transformers' layers have it too; ours have SiLU.
    fields = decoder(values, "olmo_hybrid", activations=("silu",))
    kinds = values.get("layer_types") or _default_types(fields["num_layers"])
    return fields | {
        **attention_biases(values),
        "qk_norm": True,
        "rope": whole_rope(values),
        "rotary_layers": [] if _is_rotary(values) else [False] * fields["num_layers"],
        "delta": {
            "layers": [supported("layer_types", kind, _LAYER_TYPES) == "linear_attention" for kind in kinds],
            **_sizes(values, fields["num_heads"], fields["hidden_size"]),
            "taps": size(values, "linear_conv_kernel_dim"),
            "max_beta": 2.0 if values["linear_allow_neg_eigval"] else 1.0,
        },
    }


def _default_types(layers: int) -> list[str]:
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


def _is_rotary(values: Mapping[str, Any]) -> bool:
    """Whether keys are rotated: OLMo's own files name positions without a base, or as null, and none are."""
    return "rope_parameters" not in values or bool(rope_members(values).get("rope_theta") or values.get("rope_theta"))


def _sizes(values: Mapping[str, Any], heads: int, hidden: int) -> dict[str, int]:
    """Heads of the rule and their sizes, which follow from those of attention where they are not given."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    given = {name: size(values, name) for name in names if values.get(name) is not None}
    key_heads = given.get("linear_num_key_heads", heads)
    key_dim = given.get("linear_key_head_dim", 3 * hidden // (4 * key_heads))
    return {
        "key_heads": key_heads,
        "value_heads": given.get("linear_num_value_heads", heads),
        "key_dim": key_dim,
        "value_dim": given.get("linear_value_head_dim", 2 * key_dim),
    }


def _check(config: ModelConfig) -> None:
    if config.residual_multiplier != 1:
        raise ValueError("residual_multiplier is not supported for olmo_hybrid")


ARCHITECTURES = {"OlmoHybridForCausalLM": Architecture("olmo_hybrid", "OLMo hybrid", _parse, _DEFAULTS, fallback=False)}
FAMILY = Family(
    "olmo_hybrid",
    OlmoHybrid,
    needs={"delta": "the delta rule"},
    lacks=DELTA_LACKS,
    check=_check,
)
