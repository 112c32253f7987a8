"""Gemma 4 (text): layers with a window and without have other heads, and v is normed.

Experts of 26B-A4B stand beside the MLP. Layers of E2B and E4B have inputs of their own, and the last ones share keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.host.model_files import shown
from rosebatch.model.contract import Attention, ImageRows, LayerStates, rows_of
from rosebatch.model.experts import ExpertNames, ExpertsMLP
from rosebatch.model.families.llama import Layer, Llama
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf.fields import (
    UnservedError,
    attention_biases,
    decoder,
    decoder_values,
    every,
    layer_types,
    size,
    windows,
)
from rosebatch.model.hf.rope import ropes_by_type
from rosebatch.model.mixers.paged_attention.sublayer import load_paged_attention
from rosebatch.model.quantization.forms import load_weight
from rosebatch.model.rope import Rotary, halves_together, qkv_order
from rosebatch.model.sublayers import MLP, Mixer, SelfAttention, load_gated_mlp, load_linear
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import HeadRMSNorm, Linear, Ops, Partial, ValueRMSNorm


@dataclass(frozen=True, slots=True)
class BesideExperts:
    """Experts beside a layer's MLP. Both read the residual through norms of their own, and are normed before the sum.

    Attributes:
        router_norm, norm: of what the router reads, and the experts.
        mlp_post_norm, post_norm: of what the MLP makes, and the experts.
    """

    ops: Ops
    eps: float
    experts: ExpertsMLP
    router_norm: Tensor
    norm: Tensor
    mlp_post_norm: Tensor
    post_norm: Tensor

    def __call__(self, of_mlp: Partial, residual: Tensor) -> Partial:
        """The sum ``[T, H]`` of both; ``residual [T, H]`` is what comes before either."""
        ops, eps = self.ops, self.eps
        dense, _ = ops.add_post_norm(of_mlp, torch.zeros_like(residual), self.mlp_post_norm, None, eps)
        of_router = ops.rms_norm(residual, self.router_norm, eps)
        routed = self.experts(ops.rms_norm(residual, self.norm, eps), of_router)
        both, _ = ops.add_post_norm(routed, dense, self.post_norm, None, eps)
        return Partial(both)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What follows the MLP: ``out(activation(gate(x)) · input)``, x being the residual.

    Attributes:
        post_norm: of the result.
    """

    ops: Ops
    activation: str
    gate: Linear
    out: Linear
    post_norm: Tensor

    def __call__(self, residual: Tensor, given: Tensor) -> Partial:
        """``[T, H]`` of the residual and the layer's input ``[T, size]``. All processes compute all of it."""
        return Partial(self.out(self.ops.activated(self.activation, self.gate, residual) * given))


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of all layers.

    Attributes:
        table: ``[V, layers · size]``, this process's rows.
        vocab_size, size, image_id: see ``LayerInputsConfig``.
        multiplier: of the table, in the dtype of the run.
        projection: of embeddings, to as many numbers.
        norm: ``[size]``, of what the projection makes for a layer.
    """

    ops: Ops
    eps: float
    table: Tensor
    vocab_size: int
    size: int
    image_id: int
    multiplier: Tensor
    projection: Linear
    norm: Tensor

    def __call__(self, input_ids: Tensor, embedded: Tensor, images: ImageRows | None) -> Tensor:
        """``[T, layers, size]`` of ids, and of embeddings ``[T, H]`` with vectors of images."""
        if images is not None:
            input_ids = input_ids.index_fill(0, images.rows, self.image_id)
        of_ids = self.ops.embed(input_ids, self.table, self.vocab_size).mul_(self.multiplier)
        projected = self.projection(embedded) * embedded.shape[1] ** -0.5
        projected = self.ops.rms_norm(projected.unflatten(1, (-1, self.size)), self.norm, self.eps)
        return (projected + of_ids.view_as(projected)) * 2**-0.5


@dataclass(frozen=True, slots=True)
class Gemma4Layer(Layer):
    """See ``Layer``.

    Attributes:
        factor: ``[1]`` fp32, of all that leaves the layer.
        beside: None where there is an MLP alone.
        own_input: None where layers have no inputs of their own.
    """

    factor: Tensor
    beside: BesideExperts | None
    own_input: LayerInput | None


class Gemma4(Llama):
    """See ``Llama``."""

    layers: Sequence[Gemma4Layer]
    post_attention_norm_name: ClassVar[str | None] = "post_attention_layernorm"
    mlp_norm_name = "pre_feedforward_layernorm"
    post_mlp_norm_name: ClassVar[str | None] = "post_feedforward_layernorm"
    expert_names = ExpertNames(router="router.proj", expert="experts", whole=True, factors="router.per_expert_scale")
    scales_vectors = False

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        super().__init__(config, ops, weights)
        self.inputs = self._load_inputs(weights) if config.layer_inputs else None
        # Behind its K and V, no layer needs rows that nobody reads.
        self._last_own = config.num_layers - 1 - (config.shared_kv.layers if config.shared_kv else 0)

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """In fp32: only the normed result is rounded."""
        return weights.get(f"{name}.weight", (size,), dtype=torch.float32, fill=1.0)

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """See ``Llama``."""
        full, own = self.config.full_heads, self.config.of_layer(index)
        q_name, k_name, v_name = (prefix + name for name in self.qkv_names)
        if full is not None and full.keys_are_values and own is not self.config:
            # The same rows are read twice, and those of v stay in their order.
            v_name = k_name
        channels, shared = halves_together(own), self.config.kv_layer(index)

        def norm(name: str) -> Tensor:
            return self.load_norm(prefix + name, own.head_dim, weights)[channels]

        q_norm, k_norm = self.qk_norm_names
        load = partial(load_paged_attention, own, self.ops, weights, index, rotary=rotary)
        order, out_name, q_weight = qkv_order(own, channels), prefix + self.out_name, norm(q_norm)
        if shared != index:
            order = order[: own.num_heads * own.head_dim]
            # There is no k to norm.
            both = HeadRMSNorm(q_weight, q_weight, own.norm_eps)
            return load([q_name], out_name, qk_norm=both, qkv_order=order, shared=shared)
        every = ValueRMSNorm(q_weight, norm(k_norm), own.norm_eps)
        return load([q_name, k_name, v_name], out_name, qk_norm=every, qkv_order=order)

    def load_mlp(self, index: int, prefix: str, weights: WeightSource) -> MLP:
        """See ``Llama``: the dense one."""
        names, size = [prefix + name for name in self.gate_up_names], self.config.inner_size(index)
        config = msgspec.structs.replace(self.config, intermediate_size=size)
        return load_gated_mlp(config, self.ops, weights, names, prefix + self.down_name)

    def load_layer(self, index: int, rotary: Rotary | None, weights: WeightSource) -> Gemma4Layer:
        """See ``Llama``."""
        plain, prefix = super().load_layer(index, rotary, weights), f"model.layers.{index}."
        return Gemma4Layer(
            **{name: getattr(plain, name) for name in Layer.__dataclass_fields__},
            factor=weights.get(f"{prefix}layer_scalar", (1,), dtype=torch.float32, fill=1.0),
            beside=self._load_beside(prefix, weights) if self.config.experts else None,
            own_input=self._load_input(prefix, weights) if self.config.layer_inputs else None,
        )

    def _load_inputs(self, weights: WeightSource) -> LayerInputs:
        c, given = self.config, self.config.layer_inputs
        assert given is not None
        numbers = c.num_layers * given.size
        table = load_weight(weights, "model.embed_tokens_per_layer.weight", (given.vocab_size, numbers))
        own = table.rows(self.ops.shard.vocabulary(given.vocab_size)).dense()
        name = "model.per_layer_model_projection"
        return LayerInputs(
            ops=self.ops,
            eps=c.norm_eps,
            table=own,
            vocab_size=given.vocab_size,
            size=given.size,
            image_id=given.image_id,
            multiplier=torch.tensor(given.size**0.5, dtype=own.dtype),
            projection=load_linear(self.ops, weights, [name], (numbers,), c.hidden_size, bias=False),
            norm=self.load_norm("model.per_layer_projection_norm", given.size, weights),
        )

    def _load_input(self, prefix: str, weights: WeightSource) -> LayerInput:
        c, given = self.config, self.config.layer_inputs
        assert given is not None
        gate, out = f"{prefix}per_layer_input_gate", f"{prefix}per_layer_projection"
        return LayerInput(
            ops=self.ops,
            activation=c.activation,
            gate=load_linear(self.ops, weights, [gate], (given.size,), c.hidden_size, bias=False),
            out=load_linear(self.ops, weights, [out], (c.hidden_size,), given.size, bias=False),
            post_norm=self.load_norm(f"{prefix}post_per_layer_input_norm", c.hidden_size, weights),
        )

    def _load_beside(self, prefix: str, weights: WeightSource) -> BesideExperts:
        c = self.config
        hidden = c.hidden_size
        scale = weights.get(f"{prefix}router.scale", (hidden,), dtype=torch.float32, fill=1.0)
        experts = self.load_experts(prefix, weights)
        assert isinstance(experts, ExpertsMLP)
        return BesideExperts(
            ops=self.ops,
            eps=c.norm_eps,
            experts=experts,
            router_norm=scale * hidden**-0.5,
            norm=self.load_norm(f"{prefix}pre_feedforward_layernorm_2", hidden, weights),
            mlp_post_norm=self.load_norm(f"{prefix}post_feedforward_layernorm_1", hidden, weights),
            post_norm=self.load_norm(f"{prefix}post_feedforward_layernorm_2", hidden, weights),
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
        images: ImageRows | None = None,
        states: LayerStates | None = None,
    ) -> Tensor:
        """See ``SeeingModel`` and ``OpenModel`` of ``rosebatch.model.contract``."""
        ops, eps = self.ops, self.config.norm_eps
        residual, _ = self.embed(input_ids, images)
        inputs = None if self.inputs is None else self.inputs(input_ids, residual, images)
        # States are of all rows.
        last_own = self._last_own if states is None else len(self.layers) - 1
        norms = [*(layer.input_norm for layer in self.layers), self.norm]
        assert norms[0] is not None
        normed = ops.rms_norm(residual, norms[0], eps)
        for number, (layer, then) in enumerate(zip(self.layers, norms[1:], strict=True)):
            if states is not None:
                states.keep(number, residual)
            if number > last_own and wanted is not None:
                attended = _attend_rows(layer.attention, normed, attention, wanted, len(input_ids))
            else:
                rows = wanted if number == last_own else None
                attended, residual = layer.attention(normed, attention, rows), rows_of(residual, rows)
                inputs = None if inputs is None else rows_of(inputs, rows)
            normed, residual = ops.add_post_norm(attended, residual, layer.post_attention_norm, layer.mlp_norm, eps)
            made = layer.mlp(normed)
            if layer.beside is not None:
                made = layer.beside(made, residual)
            post_norm = layer.post_mlp_norm
            if inputs is not None and layer.own_input is not None:
                _, residual = ops.add_post_norm(made, residual, post_norm, None, eps)
                made, post_norm = layer.own_input(residual, inputs[:, number]), layer.own_input.post_norm
            normed, residual = ops.add_post_norm(made, residual, post_norm, then, eps, factor=layer.factor)
        return normed


def _attend_rows(mixer: Mixer, normed: Tensor, attention: Attention, wanted: Tensor, count: int) -> Partial:
    """A layer's attention that shares K and V, of the wanted rows ``normed [S, H]`` of so many."""
    assert isinstance(mixer, SelfAttention), "its product is q alone"
    q = mixer.qkv(normed)
    every = q.new_zeros(count, q.shape[1])
    every[wanted] = q
    return mixer.ops.project(mixer.out, attention(mixer.spec, every, wanted=wanted))


# Defaults of transformers' config classes.
_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    # Read where there are experts.
    "num_experts": None,
}
_UNIFIED_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
# Of full layers, where config.json has neither this nor ``per_layer_config``.
_FULL_HEAD_DIM = 512
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    if (both := values.get("use_bidirectional_attention")) not in (None, "vision"):
        # Of images, the tower knows.
        raise UnservedError(f"use_bidirectional_attention {shown(both)} is not supported")
    fields = decoder(values, "gemma4", activation="hidden_activation")
    layers = fields["num_layers"]
    kinds = layer_types(values, every(6, layers))
    # As in transformers, whatever its type.
    kinds[-1:] = ["full_attention"]
    heads = _full_heads(values, kinds)
    rotated, full, sliding = _ropes(values, heads["head_dim"])
    return fields | {
        **attention_biases(values),
        "qk_norm": True,
        "sliding_windows": windows(values, kinds),
        "attention_scales": [1.0] * layers,
        "full_heads": {**heads, "rotary_dim": rotated, "keys_are_values": values.get("attention_k_eq_v") or False},
        "rope": full,
        "sliding_rope": sliding,
        "logit_soft_cap": values.get("final_logit_softcapping") or 0.0,
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
        "experts": _experts(values, layers) if values.get("enable_moe_block") else None,
        "shared_kv": _shared_kv(values),
        "layer_inputs": _layer_inputs(values),
    }


def _full_heads(values: Mapping[str, Any], kinds: list[str]) -> dict[str, int]:
    """K/V heads and head size of full layers; transformers 5.24 writes them layer by layer."""
    heads = {"num_kv_heads": values["num_key_value_heads"], "head_dim": values.get("global_head_dim", _FULL_HEAD_DIM)}
    given = values.get("num_global_key_value_heads")
    if values.get("attention_k_eq_v") and given is not None:
        heads["num_kv_heads"] = given
    by_layer = values.get("per_layer_config")
    if by_layer is None:
        return heads
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    found = [by_layer.get(str(layer), {}) for layer in range(len(kinds))]
    full = found[-1]
    if found != [full if kind == "full_attention" else {} for kind in kinds] or not names.keys() >= full.keys():
        raise UnservedError(f"per_layer_config must say the same heads of all full layers, got {shown(by_layer)}")
    own = {"num_kv_heads": values["num_key_value_heads"], "head_dim": values["head_dim"]}
    return own | {names[name]: value for name, value in full.items()}


def _ropes(values: Mapping[str, Any], head_dim: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Channels of full layers' heads that are rotated, and the positions of full and of sliding layers."""
    given: Mapping[str, Any] = values.get("rope_parameters") or _ROPES
    full = given["full_attention"]
    if full.get("rope_type") != "proportional":
        both = ropes_by_type({**values, "rope_parameters": given}, theta=1_000_000.0, sliding_theta=10_000.0)
        return 0, *both
    factor, share = full.get("factor", 1.0), full.get("partial_rotary_factor", 1.0)
    plain: dict[str, Any] = {"rope_theta": full["rope_theta"], "rope_type": "default"}
    if factor != 1:
        plain |= {"rope_type": "linear", "factor": factor}
    given = {**given, "full_attention": plain}
    rope, sliding = ropes_by_type({**values, "rope_parameters": given}, theta=1_000_000.0, sliding_theta=10_000.0)
    rotated = 2 * int(share * head_dim // 2)
    if not 0 < rotated <= head_dim:
        raise ValueError(f"partial_rotary_factor {shown(share)} leaves no channels of {head_dim} to rotate")
    return (0, rope, sliding) if rotated == head_dim else (rotated, rope | {"spread": head_dim}, sliding)


def _experts(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        "layers": [True] * layers,
        "num_experts": size(values, "num_experts"),
        "experts_per_token": size(values, "top_k_experts"),
        "expert_size": size(values, "moe_intermediate_size"),
        "beside_mlp": True,
    }


def _shared_kv(values: Mapping[str, Any]) -> dict[str, Any] | None:
    if not values.get("num_kv_shared_layers"):
        return None
    return {"layers": size(values, "num_kv_shared_layers"), "wide_mlp": values.get("use_double_wide_mlp") or False}


def _layer_inputs(values: Mapping[str, Any]) -> dict[str, Any] | None:
    if not values.get("hidden_size_per_layer_input"):
        return None
    return {
        "size": size(values, "hidden_size_per_layer_input"),
        "vocab_size": values["vocab_size_per_layer_input"],
        "image_id": values.get("pad_token_id") or 0,
    }


def _check(config: ModelConfig) -> None:
    if config.experts and not (config.experts.beside_mlp and all(config.experts.layers)):
        raise ValueError("experts of gemma4 are in all layers, beside the MLP")
    if not config.qk_norm:
        raise ValueError("q and k of gemma4 are always normalised")


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    rope, sliding, full = config.rope, config.sliding_rope, config.full_heads
    assert rope is not None and full is not None, "the family has rotary positions and full layers"
    experts = config.experts
    share = (full.rotary_dim or full.head_dim) / full.head_dim
    of_full: dict[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": rope.theta}
    of_full |= {"factor": rope.factor} if rope.scaling == "linear" else {}
    return {
        **decoder_values(config),
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": config.activation,
        "sliding_window": max(config.sliding_windows, default=0),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.sliding_windows],
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "attention_k_eq_v": full.keys_are_values,
        "rope_parameters": {
            "full_attention": of_full,
            "sliding_attention": {"rope_type": "default", "rope_theta": (sliding or rope).theta},
        },
        "final_logit_softcapping": config.logit_soft_cap or None,
        "num_kv_shared_layers": config.shared_kv.layers if config.shared_kv else 0,
        "use_double_wide_mlp": config.shared_kv is not None and config.shared_kv.wide_mlp,
        "hidden_size_per_layer_input": config.layer_inputs.size if config.layer_inputs else 0,
        "vocab_size_per_layer_input": config.layer_inputs.vocab_size if config.layer_inputs else config.vocab_size,
        "enable_moe_block": experts is not None,
        "num_experts": experts.num_experts if experts else None,
        "top_k_experts": experts.experts_per_token if experts else None,
        "moe_intermediate_size": experts.expert_size if experts else None,
    }


ARCHITECTURES = {
    "Gemma4ForCausalLM": Architecture("gemma4_text", "Gemma 4", _parse, _DEFAULTS, window=True, experts=True),
    "Gemma4UnifiedForCausalLM": Architecture(
        "gemma4_unified_text", "Gemma 4 12B", _parse, _UNIFIED_DEFAULTS, window=True
    ),
}
FAMILY = Family(
    "gemma4",
    Gemma4,
    needs={"full_heads": "the heads of layers without a window"},
    may_have=("experts", "shared_kv", "layer_inputs"),
    check=_check,
    hf_values=_hf_values,
)
