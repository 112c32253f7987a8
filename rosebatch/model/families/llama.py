"""Llama 2 and 3 and SmolLM2; the class of all families with RMSNorm, rotary positions and a gated MLP.

Families with other options use the class as it is: only their config.json is read in files of their own. Families whose
checkpoints have other names, norms or orders have subclasses, which say so in the attributes at the top of ``Llama``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, ImageRows, LayerStates, load_embedding, load_head, rows_of
from rosebatch.model.experts import ExpertNames, load_experts
from rosebatch.model.family import GGUF, Architecture, Family
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import attention_biases, decoder, decoder_values
from rosebatch.model.hf.rope import whole_rope
from rosebatch.model.mixers.paged_attention.sublayer import load_paged_attention
from rosebatch.model.rope import Rotary, layer_rotaries
from rosebatch.model.sublayers import MLP, Mixer, load_gated_mlp
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import HeadRMSNorm, Ops, Partial, QKNorm


@dataclass(frozen=True, slots=True)
class Layer:
    """A norm that the family does not have is None."""

    input_norm: Tensor | None
    attention: Mixer
    post_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: MLP
    post_mlp_norm: Tensor | None


class Llama:
    """Transformer with RMSNorm, rotary positions, grouped K/V heads and a gated MLP.

    Norms come before a sub-layer, as in Llama, after it, as in OLMo 2, or both, as in Gemma.

    Args:
        config: with ``rope`` set.
        ops: the operators of this run.
        weights: by transformers' tensor names.
    """

    # Names of a layer's tensors. A single name in place of several: the checkpoint holds them fused.
    qkv_names: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out_name: ClassVar[str] = "self_attn.o_proj"
    qk_norm_names: ClassVar[tuple[str, str]] = ("self_attn.q_norm", "self_attn.k_norm")
    gate_up_names: ClassVar[tuple[str, ...]] = ("mlp.gate_proj", "mlp.up_proj")
    down_name: ClassVar[str] = "mlp.down_proj"
    expert_names: ClassVar[ExpertNames] = ExpertNames()
    # A norm without a name does not exist.
    input_norm_name: ClassVar[str | None] = "input_layernorm"
    post_attention_norm_name: ClassVar[str | None] = None
    mlp_norm_name: ClassVar[str | None] = "post_attention_layernorm"
    post_mlp_norm_name: ClassVar[str | None] = None
    norm_name: ClassVar[str] = "model.norm"
    # Whether vectors of images are multiplied as embeddings are.
    scales_vectors: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        assert config.rope is not None, "the Llama family has rotary positions"
        self.config = config
        self.ops = ops
        self.embedding = load_embedding(config, ops, weights, "model.embed_tokens")
        # Rounded as transformers does for Gemma; the multipliers of other families are exact in 16 bits.
        self.embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=self.embedding.dtype)
        rotaries = layer_rotaries(config, self.embedding)
        self.layers: Sequence[Layer] = [self.load_layer(i, rotary, weights) for i, rotary in enumerate(rotaries)]
        self.mixers = [layer.attention.spec for layer in self.layers]
        self.norm = self.load_norm(self.norm_name, config.hidden_size, weights)
        self.logits = load_head(config, ops, weights, self.embedding)

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """The weight of an RMSNorm ``[size]``; an fp32 one is applied before the result is rounded."""
        return weights.get(f"{name}.weight", (size,), fill=1.0)

    def load_qk_norm(self, prefix: str, weights: WeightSource) -> QKNorm:
        """What q and k of the layer whose names begin with ``prefix`` go through before the rotation."""
        size = self.config.head_dim
        q_weight, k_weight = (self.load_norm(prefix + name, size, weights) for name in self.qk_norm_names)
        return HeadRMSNorm(q_weight, k_weight, self.config.norm_eps)

    def qkv_order(self) -> Tensor | None:
        """The rows of the fused q, k and v projection in the order that attention wants; None for the stored order."""
        return None

    def load_mlp(self, index: int, prefix: str, weights: WeightSource) -> MLP:
        """The MLP of the layer whose names begin with ``prefix``, or its experts."""
        if self.config.experts and self.config.experts.layers[index]:
            return self.load_experts(prefix, weights)
        names = [prefix + name for name in self.gate_up_names]
        return load_gated_mlp(self.config, self.ops, weights, names, prefix + self.down_name)

    def load_experts(self, prefix: str, weights: WeightSource) -> MLP:
        """The experts of such a layer."""
        return load_experts(self.config, self.ops, weights, prefix, self.expert_names)

    def load_layer(self, index: int, rotary: Rotary | None, weights: WeightSource) -> Layer:
        """A layer, with these positions."""
        prefix = f"model.layers.{index}."
        input_norm, post_attention_norm, mlp_norm, post_mlp_norm = (
            None if name is None else self.load_norm(prefix + name, self.config.hidden_size, weights)
            for name in self.norm_names(index)
        )
        return Layer(
            input_norm=input_norm,
            attention=self.load_mixer(index, prefix, rotary, weights),
            post_attention_norm=post_attention_norm,
            mlp_norm=mlp_norm,
            mlp=self.load_mlp(index, prefix, weights),
            post_mlp_norm=post_mlp_norm,
        )

    def norm_names(self, index: int) -> tuple[str | None, ...]:
        """Of a layer's norms before and after its attention, and before and after its MLP; None for those it lacks."""
        return self.input_norm_name, self.post_attention_norm_name, self.mlp_norm_name, self.post_mlp_norm_name

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """The attention of the layer whose names begin with ``prefix``, or what replaces it."""
        qk_norm = self.load_qk_norm(prefix, weights) if self.config.qk_norm else None
        return self.load_paged_attention(index, prefix, weights, rotary=rotary, qk_norm=qk_norm)

    def load_paged_attention(self, index: int, prefix: str, weights: WeightSource, **options: Any) -> Mixer:
        """Attention with these options of ``load_paged_attention``."""
        names, out_name = [prefix + name for name in self.qkv_names], prefix + self.out_name
        order = self.qkv_order()
        return load_paged_attention(self.config, self.ops, weights, index, names, out_name, qkv_order=order, **options)

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
        residual, added = self.embed(input_ids, images)
        first = self.layers[0].input_norm
        normed = residual if first is None else self.ops.rms_norm(residual, first, self.config.norm_eps)
        following = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for number, (layer, then) in enumerate(zip(self.layers, following, strict=True)):
            if states is not None:
                states.keep(number, residual)
            rows = wanted if layer is self.layers[-1] else None
            attended, residual = layer.attention(normed, attention, rows), rows_of(residual, rows)
            normed, residual = self._add(attended, residual, layer.post_attention_norm, layer.mlp_norm)
            if images is not None and (vectors := next(added, None)) is not None:
                # Not of the last layer, whose rows are others.
                residual = residual.index_add(0, images.rows, vectors)
            normed, residual = self._add(layer.mlp(normed), residual, layer.post_mlp_norm, then)
        return normed

    def embed(self, input_ids: Tensor, images: ImageRows | None) -> tuple[Tensor, Iterator[Tensor]]:
        """The embeddings ``[T, H]`` with the vectors of images, and what images add to later layers."""
        embedded = self.ops.embed(input_ids, self.embedding, self.config.vocab_size)
        if self.config.embedding_multiplier != 1:
            embedded = embedded.mul_(self.embedding_multiplier)
        if images is None:
            return embedded, iter(())
        own, *further = images.vectors.to(embedded.dtype)
        if self.scales_vectors and self.config.embedding_multiplier != 1:
            own = own * self.embedding_multiplier
        return embedded.index_copy(0, images.rows, own), iter(further)

    def _add(
        self, partial: Partial, residual: Tensor, post_norm: Tensor | None, norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The residual with the sub-layer's result, normed and as it is."""
        eps, scale = self.config.norm_eps, self.config.residual_multiplier
        if post_norm is not None:
            return self.ops.add_post_norm(partial, residual, post_norm, norm, eps)
        if norm is None:
            assert scale == 1, "the next layer reads what is added as it is"
            added = self.ops.add(partial, residual)
            return added, added
        return self.ops.add_rms_norm(partial, residual, norm, eps, scale, overwrite=True)


# Defaults of transformers' config class.
LLAMA_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2, "hidden_act": "silu"}


def parse_llama(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    return decoder(values, "llama") | biases(values) | {"rope": whole_rope(values)}


def biases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Which projections have biases, as fields of ``ModelConfig``."""
    return attention_biases(values) | {"mlp_bias": values.get("mlp_bias", False)}


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    assert rope is not None, "the Llama family has rotary positions"
    scaling: dict[str, Any] | None = None
    if rope.scaling != "default":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if scaling and rope.scaling == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling |= {name: getattr(rope, name) for name in names}
    kind, name = ("qwen3", "Qwen3") if config.qk_norm else ("llama", "Llama")
    values = {
        **decoder_values(config),
        "hidden_act": config.activation,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }
    if config.experts:
        kind, name = "qwen3_moe", "Qwen3Moe"
        values |= {
            "num_experts": config.experts.num_experts,
            "num_experts_per_tok": config.experts.experts_per_token,
            "moe_intermediate_size": config.experts.expert_size,
            "norm_topk_prob": config.experts.normalize,
            "mlp_only_layers": [i for i, routed in enumerate(config.experts.layers) if not routed],
        }
    return {**values, "architectures": [f"{name}ForCausalLM"], "model_type": kind}


LLAMA_GGUF = GGUF(
    "llama",
    "model.layers",
    gguf_decoder.NAMES,
    {**gguf_decoder.ATTENTION, **gguf_decoder.MLP, **gguf_decoder.NORMS},
    gguf_decoder.llama,
    biases=gguf_decoder.biases,
    values=gguf_decoder.halves,
)
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        "llama", "Llama 2 and 3.x, SmolLM2", parse_llama, LLAMA_DEFAULTS, gguf=(LLAMA_GGUF,)
    ),
}
FAMILY = Family("llama", Llama, may_have=("experts",), hf_values=_hf_values)
