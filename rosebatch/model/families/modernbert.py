"""ModernBERT (arXiv 2412.13663): bidirectional attention, in most layers with a window; norms before sub-layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rosebatch.config.classifier import HeadLayer
from rosebatch.config.model import ModelConfig
from rosebatch.host.model_files import shown
from rosebatch.model.contract import Attention, load_embedding, rows_of
from rosebatch.model.family import Architecture, ClassifierHead, Family
from rosebatch.model.hf.fields import UnservedError, decoder, every, layer_types, supported
from rosebatch.model.hf.rope import ropes_by_type
from rosebatch.model.mixers.bidirectional_attention.sublayer import load_bidirectional_attention
from rosebatch.model.rope import Rotary, layer_rotaries
from rosebatch.model.sublayers import MLP, LayerNorm, SelfAttention, load_gated_mlp, load_layer_norm
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Ops


@dataclass(frozen=True, slots=True)
class _Layer:
    """The first has no norm of its own: embeddings are normed."""

    input_norm: LayerNorm | None
    attention: SelfAttention
    mlp_norm: LayerNorm
    mlp: MLP


class ModernBert:
    """Transformer with LayerNorm, rotary positions and a gated MLP, whose tokens see those after them.

    Args:
        config: with ``rope`` set.
        ops: the operators of this run.
        weights: by transformers' tensor names.
    """

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        self.config = config
        self.ops = ops
        self.embedding = load_embedding(config, ops, weights, "model.embeddings.tok_embeddings")
        self.embedding_norm = self._load_norm("model.embeddings.norm", weights)
        rotaries = layer_rotaries(config, self.embedding)
        self.layers = [self._load_layer(i, rotary, weights) for i, rotary in enumerate(rotaries)]
        self.mixers = [layer.attention.spec for layer in self.layers]
        self.norm = self._load_norm("model.final_norm", weights)

    def _load_norm(self, name: str, weights: WeightSource) -> LayerNorm:
        return load_layer_norm(self.config, weights, name, bias=weights.shape(f"{name}.bias") is not None)

    def _load_layer(self, index: int, rotary: Rotary | None, weights: WeightSource) -> _Layer:
        prefix = f"model.layers.{index}."
        qkv, out = [f"{prefix}attn.Wqkv"], f"{prefix}attn.Wo"
        return _Layer(
            input_norm=self._load_norm(f"{prefix}attn_norm", weights) if index else None,
            attention=load_bidirectional_attention(self.config, self.ops, weights, index, qkv, out, rotary=rotary),
            mlp_norm=self._load_norm(f"{prefix}mlp_norm", weights),
            mlp=load_gated_mlp(self.config, self.ops, weights, [f"{prefix}mlp.Wi"], f"{prefix}mlp.Wo"),
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """See ``rosebatch.model.contract.Model``."""
        ops, eps = self.ops, self.config.norm_eps
        embedded = ops.embed(input_ids, self.embedding, self.config.vocab_size)
        normed = residual = ops.layer_norm(embedded, *self.embedding_norm, eps)
        following = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, next_norm in zip(self.layers, following, strict=True):
            assert next_norm is not None, "only the first layer has no norm"
            rows = wanted if layer is self.layers[-1] else None
            attended = layer.attention(normed, attention, rows)
            normed, residual = ops.add_layer_norm(attended, rows_of(residual, rows), *layer.mlp_norm, eps)
            normed, residual = ops.add_layer_norm(layer.mlp(normed), residual, *next_norm, eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``rosebatch.model.contract.Model``."""
        raise AssertionError("the engine refuses requests for tokens")


# Defaults of transformers' config class.
_DEFAULTS = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "local_attention": 128,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 50282,
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = decoder(values, "modernbert", eps="norm_eps", activation="hidden_activation")
    layers, interval = fields["num_layers"], values.get("global_attn_every_n_layers", 3)
    # The first layer is full, and each ``interval``-th after it.
    first = every(interval, layers + interval)[interval - 1 : interval - 1 + layers]
    # Tokens at a distance of up to half of it are seen.
    window = values["local_attention"] // 2 + 1
    bases = {"theta": values.get("global_rope_theta") or 160_000.0}
    bases["sliding_theta"] = values.get("local_rope_theta") or 10_000.0
    full, sliding = ropes_by_type(values, **bases)
    return fields | {
        "tie_word_embeddings": False,
        "sliding_windows": [window * (kind == "sliding_attention") for kind in layer_types(values, first)],
        "qkv_bias": values["attention_bias"],
        "out_bias": values["attention_bias"],
        "mlp_bias": values["mlp_bias"],
        "rope": full,
        "sliding_rope": sliding,
        "bidirectional": True,
        "head": False,
    }


def _token_classifier(values: Mapping[str, Any]) -> tuple[HeadLayer, ...]:
    return _classifier({**values, "classifier_pooling": "cls"})[1]


def _classifier(values: Mapping[str, Any]) -> ClassifierHead:
    pooling = values.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise UnservedError(f"classifier_pooling {shown(pooling)} is not supported")
    activation = supported(
        "classifier_activation", values.get("classifier_activation", "gelu"), ("gelu", "relu", "silu")
    )
    before = HeadLayer(
        name="head.dense",
        bias=values.get("classifier_bias", False),
        activation=activation,
        norm="head.norm",
        norm_bias=values.get("norm_bias", False),
    )
    return pooling, (before, HeadLayer(name="classifier"))


ARCHITECTURES = {
    "ModernBertModel": Architecture(
        "modernbert",
        "ModernBERT, GTE and Nomic ModernBERT",
        _parse,
        _DEFAULTS,
        window=True,
        fallback=False,
        classifier=_classifier,
        token_classifier=_token_classifier,
    )
}
FAMILY = Family("modernbert", ModernBert, bidirectional=True)
