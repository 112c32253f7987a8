"""Qwen3-Next: the gated delta rule in most layers, gated attention in the others."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rosebatch.host.model_files import shown
from rosebatch.model.families.llama import Llama
from rosebatch.model.families.qwen import GGUF_EXPERTS, GGUF_SHARED, gguf_experts, gguf_shared_size, qwen_experts
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.gguf import gated_delta as gguf_delta
from rosebatch.model.hf.fields import attention_biases, decoder, size, supported
from rosebatch.model.hf.rope import rope, rotary_dim, rotary_share
from rosebatch.model.mixers.gated_delta.sublayer import load_delta
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import Mixer
from rosebatch.model.weights import WeightSource


class Qwen3Next(Llama):
    """See ``Llama``. The weights of norms are stored less one, but for the norm after the delta rule."""

    delta_names: ClassVar[tuple[str, ...]] = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """``1 + weight`` in fp32: only the normed result is rounded."""
        return 1 + weights.get(f"{name}.weight", (size,), dtype=torch.float32, fill=0.0)

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """See ``Llama``."""
        delta = self.config.delta
        assert delta is not None, "the family has the delta rule"
        before = sum(delta.layers[:index])
        if delta.layers[index]:
            names = [prefix + name for name in self.delta_names]
            own = f"{prefix}linear_attn."
            sizes, order, eps = self.delta_sizes(), self.delta_order(), self.config.norm_eps
            return load_delta(self.config, self.ops, weights, before, names, own, sizes=sizes, order=order, eps=eps)
        qk_norm = self.load_qk_norm(prefix, weights)
        return self.load_paged_attention(index - before, prefix, weights, rotary=rotary, qk_norm=qk_norm, gated=True)

    def delta_sizes(self) -> tuple[int, ...]:
        """What each of the projections of ``delta_names`` puts out."""
        delta = self.config.delta
        assert delta is not None
        return delta.channels + delta.value_heads * delta.value_dim, 2 * delta.value_heads

    def delta_order(self) -> Tensor | None:
        """The rows of these projections in the order q, k, v, gate, b, a; None for the stored order.

        The checkpoint has them by key head: its q and k, then v and gate of its value heads; and after all of these, b
        and a of its value heads.
        """
        delta = self.config.delta
        assert delta is not None
        group = delta.value_heads // delta.key_heads
        wide = group * delta.value_dim
        first, second = self.delta_sizes()
        of_heads = torch.arange(first).view(delta.key_heads, -1).split([delta.key_dim, delta.key_dim, wide, wide], 1)
        b_and_a = first + torch.arange(second).view(delta.key_heads, 2, group)
        return torch.cat([*(part.flatten() for part in of_heads), b_and_a[:, 0].flatten(), b_and_a[:, 1].flatten()])


# Defaults of transformers' config classes.
DELTA_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_DEFAULTS = {
    **DELTA_DEFAULTS,
    "num_key_value_heads": 2,
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_LAYER_TYPES = ("linear_attention", "full_attention")


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = parse_delta(values, "qwen3_next")
    return fields | {"experts": qwen_experts(values, fields["num_layers"], shared=True)}


def parse_delta(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Fields of ``ModelConfig`` without experts."""
    # The convolutions of transformers' layers have it too; ours have SiLU.
    fields = decoder(values, family, activations=("silu",))
    return fields | {
        **attention_biases(values),
        "qk_norm": True,
        "rope": rope(values),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 0.25)),
        "delta": {
            "layers": [kind == "linear_attention" for kind in _layer_types(values, fields["num_layers"])],
            "key_heads": size(values, "linear_num_key_heads"),
            "value_heads": size(values, "linear_num_value_heads"),
            "key_dim": size(values, "linear_key_head_dim"),
            "value_dim": size(values, "linear_value_head_dim"),
            "taps": size(values, "linear_conv_kernel_dim"),
        },
    }


def _layer_types(values: Mapping[str, Any], layers: int) -> list[str]:
    given = values.get("layer_types")
    if given:
        return [supported("layer_types", kind, _LAYER_TYPES) for kind in given]
    interval = values["full_attention_interval"]
    if type(interval) is not int or interval < 1:
        raise ValueError(f"full_attention_interval must be a whole number > 0, got {shown(interval)}")
    return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]


def gguf_config(model: GGUFModel) -> dict[str, Any]:
    """The fields of config.json of a file with experts."""
    return {**gguf_delta.config(model, dense=False), **gguf_experts(model, normalize=True), **gguf_shared_size(model)}


_GGUF = GGUF(
    "qwen3next",
    "model.layers",
    gguf_decoder.NAMES,
    {**gguf_delta.FUSED, **GGUF_EXPERTS, **GGUF_SHARED},
    gguf_config,
    absent=gguf_delta.absent,
    bare=gguf_delta.BARE,
    values=gguf_delta.fused,
    join=gguf_delta.join,
)
ARCHITECTURES = {
    "Qwen3NextForCausalLM": Architecture(
        "qwen3_next", "Qwen3-Next", _parse, _DEFAULTS, experts=True, fallback=False, gguf=(_GGUF,)
    ),
}
# Its gated attention has none of these.
DELTA_LACKS = ("sliding_windows", "attention_scales", "attention_soft_cap")
FAMILY = Family(
    "qwen3_next",
    Qwen3Next,
    attention_matrices=3,
    needs={"delta": "the delta rule"},
    may_have=("experts",),
    lacks=DELTA_LACKS,
)
