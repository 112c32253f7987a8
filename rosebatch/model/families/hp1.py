"""HP1: attention gated by a filter instead of a softmax, clips instead of norms (source: article S4).

The article leaves some things open, among them the names of tensors and the final norm (here: a clip too). Names are
transformers' for the parts that it has::

    model.embed_tokens.weight           [V, H]
    model.layers.I.
        input_layernorm, post_attention_layernorm, pre_mlp_layernorm, post_mlp_layernorm
            .alpha, .gamma                      [H] each
        self_attn.q_norm, self_attn.k_norm
            .alpha, .gamma                      [D] each
        self_attn.sigma, self_attn.gamma        [heads] each
        self_attn.taps                          [heads, fir_k] or [fir_k], in place of sigma
        self_attn.q_proj, .k_proj, .v_proj, .o_proj, mlp.gate_proj, .up_proj, .down_proj
            .weight
    model.norm.alpha, model.norm.gamma  [H] each
    lm_head.weight                      [V, H], unless it is the embedding

Each alpha, gamma and sigma may also be one number for all channels or heads, ``[1]`` or ``[]``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, LayerStates, load_embedding, load_head, rows_of
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf.fields import decoder, refuse
from rosebatch.model.hf.rope import whole_rope
from rosebatch.model.mixers.hp1.gate import NUMBERS, load_gate, load_vector
from rosebatch.model.mixers.hp1.mixer import HP1Spec
from rosebatch.model.random_weights import DEVIATION
from rosebatch.model.rope import rope_tables
from rosebatch.model.sublayers import GatedMLP, load_gated_mlp, load_projections
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Gain, HeadUClip, Linear, Ops

# What a clip to -1 .. 1 leaves of a deviation of 1; it cuts off a third of the channels.
_CLIPPED = 0.72
# Deviation of the gate's weighted sum of some 50 values with deviation 1: nothing divides the sum by their number.
_ATTENDED = 1.0
# Factor on what a sub-layer adds. With 1 it would drown the embedding; the first tokens, which attend to almost
# nothing, would stay close to zero in every layer. With 0.1 many completions repeat their last token.
_POST_GAMMA = 0.2


class _Clip(NamedTuple):
    """A UClipNorm: ``alpha [H]``, and gamma as one number or ``[H]`` fp32."""

    alpha: Tensor
    gamma: Gain


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: _Clip
    qkv: Linear
    attention: HP1Spec
    out: Linear
    post_attention: _Clip
    pre_mlp: _Clip
    mlp: GatedMLP
    post_mlp: _Clip


class HP1:
    """Transformer with clips before and after each sub-layer, rotary positions, grouped K/V heads and a ReGLU.

    Args:
        config: with ``rope`` and ``hp1`` set.
        ops: the operators of this run.
        weights: by the names above.
    """

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        assert config.rope is not None, "HP1 has rotary positions"
        self.config = config
        self.ops = ops
        self.embedding = load_embedding(config, ops, weights, "model.embed_tokens")
        self.rotary = rope_tables(
            config.rope, config.head_dim, config.max_model_len, self.embedding.dtype, self.embedding.device
        )
        self.layers = [self._load_layer(i, weights) for i in range(config.num_layers)]
        self.mixers = [layer.attention for layer in self.layers]
        self.norm = _load_clip("model.norm", config.hidden_size, weights, _of_residual(2 * config.num_layers))
        self.logits = load_head(config, ops, weights, self.embedding)

    def _load_layer(self, index: int, weights: WeightSource) -> _Layer:
        c = self.config
        prefix = f"model.layers.{index}."
        parts = self.ops, weights
        names = [f"{prefix}self_attn.{name}_proj" for name in "qkvo"]
        heads, kv_heads, qkv, out = load_projections(c, *parts, names[:3], names[3])
        gate, up, down = (f"{prefix}mlp.{name}_proj" for name in ("gate", "up", "down"))

        def hidden_clip(name: str, deviation: float, gamma: float = 1.0) -> _Clip:
            return _load_clip(f"{prefix}{name}_layernorm", c.hidden_size, weights, deviation, gamma)

        # Deviations with random weights: of a projection of a clipped input, and of ReLU(gate) * up of two of them.
        projected = _of_product(c.hidden_size, _CLIPPED)
        gated = projected**2 * math.sqrt(0.5)
        q_norm, k_norm = (_load_clip(f"{prefix}self_attn.{n}_norm", c.head_dim, weights, projected) for n in "qk")
        q_gamma, k_gamma = _alike(q_norm.gamma, k_norm.gamma, q_norm.alpha)
        return _Layer(
            input_norm=hidden_clip("input", _of_residual(2 * index)),
            qkv=qkv,
            attention=HP1Spec(
                layer=index,
                num_heads=len(heads),
                num_kv_heads=len(kv_heads),
                head_dim=c.head_dim,
                scale=c.attention_scale(index),
                qk_norm=HeadUClip(q_norm.alpha, k_norm.alpha, q_gamma, k_gamma),
                rotary=self.rotary,
                gate=load_gate(c, self.ops, weights, prefix),
            ),
            out=out,
            post_attention=hidden_clip(
                "post_attention", _of_product(c.num_heads * c.head_dim, _ATTENDED * projected), _POST_GAMMA
            ),
            pre_mlp=hidden_clip("pre_mlp", _of_residual(2 * index + 1)),
            mlp=load_gated_mlp(c, *parts, [gate, up], down),
            post_mlp=hidden_clip("post_mlp", _of_product(c.intermediate_size, gated), _POST_GAMMA),
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
        *,
        states: LayerStates | None = None,
    ) -> Tensor:
        """See ``rosebatch.model.contract.OpenModel``."""
        ops = self.ops
        residual = ops.embed(input_ids, self.embedding, self.config.vocab_size)
        normed = ops.uclip_norm(residual, *self.layers[0].input_norm)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for number, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            if states is not None:
                states.keep(number, residual)
            rows = wanted if layer is self.layers[-1] else None
            values = attention(layer.attention, layer.qkv(normed), wanted=rows)
            attended, residual = ops.project_to_clip(layer.out, values), rows_of(residual, rows)
            normed, residual = ops.add_uclip_norm(attended, residual, *layer.post_attention, *layer.pre_mlp)
            mlp = layer.mlp
            hidden = ops.project_to_clip(mlp.down, ops.gated("relu_mul", mlp.gate_up, normed, mlp.down))
            normed, residual = ops.add_uclip_norm(hidden, residual, *layer.post_mlp, *next_norm)
        return normed


def _load_clip(name: str, size: int, weights: WeightSource, deviation: float, gamma: float = 1.0) -> _Clip:
    """A clip. With random weights it has this one gamma and brings an input of this deviation to 1."""
    alpha = load_vector(f"{name}.alpha", size, weights, None, 1 / deviation)
    name = f"{name}.gamma"
    stored = weights.shape(name)
    shape = (1,) if stored is None else stored if stored in NUMBERS else (size,)
    gain = weights.get(name, shape, dtype=torch.float32, fill=gamma)
    return _Clip(alpha, float(gain) if shape in NUMBERS else gain)


def _alike(q_gamma: Gain, k_gamma: Gain, like: Tensor) -> tuple[Gain, Gain]:
    """Both as numbers, or both ``[D]``: the kernels have a form for either."""
    if isinstance(q_gamma, float) and isinstance(k_gamma, float):
        return q_gamma, k_gamma
    q_each, k_each = (torch.as_tensor(g, dtype=torch.float32, device=like.device) for g in (q_gamma, k_gamma))
    return q_each.expand(len(like)).contiguous(), k_each.expand(len(like)).contiguous()


def _of_product(in_size: int, deviation: float) -> float:
    """Deviation of the product of a random weight with an input of this deviation."""
    return DEVIATION * math.sqrt(in_size) * deviation


def _of_residual(added: int) -> float:
    """Deviation of the sum of a random embedding and the clipped results of so many sub-layers."""
    return math.hypot(DEVIATION, _POST_GAMMA * _CLIPPED * math.sqrt(added))


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    refuse(values, "attention_bias", "mlp_bias", "use_sliding_window")
    return decoder(values, "hp1", eps=None, activations=("relu",)) | {
        "rope": whole_rope(values),
        "hp1": {name: values[name] for name in ("fir_k", "relu_pre", "clip_min", "clip_max") if name in values},
    }


def _check(config: ModelConfig) -> None:
    if 0 < config.norm_eps < math.inf:
        raise ValueError("norm_eps has no meaning for hp1")
    if config.activation != "relu":
        raise ValueError(f"activation {config.activation!r} is not supported for hp1: its MLP has relu")


# transformers has no such class.
ARCHITECTURES = {
    "HP1ForCausalLM": Architecture(
        "hp1", "[HP1](hp1.md), attention without softmax", _parse, {"hidden_act": "relu"}, fallback=False
    ),
}
FAMILY = Family(
    "hp1",
    HP1,
    needs={"hp1": "the gate of attention"},
    lacks=(
        *("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sliding_windows", "attention_soft_cap", "logit_soft_cap"),
        *("sliding_rope", "rotary_layers", "rotary_dim", "parallel_residual"),
    ),
    check=_check,
)
