"""What GPT-2, GPT-NeoX, StableLM, Cohere and Starcoder 2 share: LayerNorm; attention and MLP in turn or in parallel."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, ImageRows, LayerStates, load_embedding, load_head, rows_of
from rosebatch.model.mixers.paged_attention.sublayer import load_paged_attention
from rosebatch.model.rope import Rotary, layer_rotaries
from rosebatch.model.sublayers import MLP, LayerNorm, Mixer, load_gated_mlp, load_layer_norm
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Ops, QKNorm


@dataclass(frozen=True, slots=True)
class _Layer:
    """Without a norm of its own, the MLP reads what attention reads."""

    input_norm: LayerNorm
    attention: Mixer
    mlp_norm: LayerNorm | None
    mlp: MLP


class LayerNormDecoder:
    """Transformer with LayerNorm and grouped K/V heads.

    Args:
        config: of the model.
        ops: the operators of this run.
        weights: by transformers' tensor names.
    """

    # Names of tensors: of the model, and in a layer.
    embedding_name: ClassVar[str] = "model.embed_tokens"
    layers_name: ClassVar[str] = "model.layers"
    norm_name: ClassVar[str] = "model.norm"
    norm_names: ClassVar[tuple[str, str]] = ("input_layernorm", "post_attention_layernorm")
    qkv_names: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out_name: ClassVar[str] = "self_attn.o_proj"
    norm_bias: ClassVar[bool] = True
    # Of products, see ``load_weight``.
    transposed: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        self.config = config
        self.ops = ops
        self.embedding = load_embedding(config, ops, weights, self.embedding_name)
        rotaries = layer_rotaries(config, self.embedding)
        self.layers = [self._load_layer(i, rotary, weights) for i, rotary in enumerate(rotaries)]
        self.mixers = [layer.attention.spec for layer in self.layers]
        self.norm = self._load_norm(self.norm_name, weights)
        self.logits = load_head(config, ops, weights, self.embedding)

    def embed(self, input_ids: Tensor, positions: Tensor, images: ImageRows | None) -> Tensor:
        """The first layer's input ``[T, H]``."""
        embedded = self.ops.embed(input_ids, self.embedding, self.config.vocab_size)
        if images is None:
            return embedded
        (own,) = images.vectors.to(embedded.dtype)
        return embedded.index_copy(0, images.rows, own)

    def has_mlp_norm(self) -> bool:
        """Whether the MLP has a norm of its own."""
        return not self.config.parallel_residual

    def load_qk_norm(self, prefix: str, weights: WeightSource) -> QKNorm:
        """What q and k of the layer whose names begin with ``prefix`` go through before the rotation."""
        raise NotImplementedError

    def qkv_order(self) -> Tensor | None:
        """The rows of the fused q, k and v projection in the order that attention wants; None for the stored order."""
        return None

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """The MLP of the layer whose names begin with ``prefix``."""
        names = [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]
        return load_gated_mlp(self.config, self.ops, weights, names, f"{prefix}mlp.down_proj")

    def _load_norm(self, name: str, weights: WeightSource) -> LayerNorm:
        return load_layer_norm(self.config, weights, name, bias=self.norm_bias)

    def _load_layer(self, index: int, rotary: Rotary | None, weights: WeightSource) -> _Layer:
        prefix = f"{self.layers_name}.{index}."
        attention = load_paged_attention(
            self.config,
            self.ops,
            weights,
            index,
            [prefix + name for name in self.qkv_names],
            prefix + self.out_name,
            rotary=rotary,
            qk_norm=self.load_qk_norm(prefix, weights) if self.config.qk_norm else None,
            qkv_order=self.qkv_order(),
            transposed=self.transposed,
        )
        first, second = (prefix + name for name in self.norm_names)
        mlp_norm = self._load_norm(second, weights) if self.has_mlp_norm() else None
        return _Layer(self._load_norm(first, weights), attention, mlp_norm, self.load_mlp(prefix, weights))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
        images: ImageRows | None = None,
        states: LayerStates | None = None,
    ) -> Tensor:
        """See ``SeeingModel`` and ``OpenModel`` of ``rosebatch.model.contract``; no vectors are added behind layers."""
        ops, eps = self.ops, self.config.norm_eps
        residual = self.embed(input_ids, positions, images)
        normed = ops.layer_norm(residual, *self.layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for number, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            if states is not None:
                states.keep(number, residual)
            rows = wanted if layer is self.layers[-1] else None
            attended, residual, norm = layer.attention(normed, attention, rows), rows_of(residual, rows), layer.mlp_norm
            if self.config.parallel_residual:
                normed = rows_of(normed, rows) if norm is None else ops.layer_norm(residual, *norm, eps)
                residual = ops.add(attended, residual)
            else:
                assert norm is not None, "each sub-layer has a norm before it"
                normed, residual = ops.add_layer_norm(attended, residual, *norm, eps)
            normed, residual = ops.add_layer_norm(layer.mlp(normed), residual, *next_norm, eps)
        return normed
