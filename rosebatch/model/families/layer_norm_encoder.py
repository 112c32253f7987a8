"""What BERT, RoBERTa, DistilBERT, MPNet, NomicBERT and GTE share: bidirectional attention, norms after sub-layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rosebatch.config.classifier import HeadLayer
from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, rows_of
from rosebatch.model.family import ClassifierHead
from rosebatch.model.hf.fields import refuse, size, supported
from rosebatch.model.mixers.bidirectional_attention.sublayer import load_bidirectional_attention
from rosebatch.model.quantization.forms import load_weight
from rosebatch.model.rope import Rotary, layer_rotaries
from rosebatch.model.sublayers import MLP, LayerNorm, SelfAttention, load_layer_norm, load_plain_mlp
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import ACTIVATIONS, GATES, Ops


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: SelfAttention
    attention_norm: LayerNorm
    mlp: MLP
    mlp_norm: LayerNorm


class LayerNormEncoder:
    """Transformer whose tokens see all of their prompt; norms come after the residual's addition.

    Positions are rows of a table, or rotary. There is no output projection.

    Args:
        config: of the model.
        ops: the operators of this run.
        weights: by transformers' tensor names, with the prefix that classes with a head have.
    """

    # Names of tensors, of the model and in a layer. A single name in place of several: the checkpoint holds them fused.
    # What names begin with in classes with a head; any of these.
    prefixes: ClassVar[tuple[str, ...]] = ("bert.",)
    layers_name: ClassVar[str] = "encoder.layer"
    embedding_norm_name: ClassVar[str] = "embeddings.LayerNorm"
    qkv_names: ClassVar[tuple[str, ...]] = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
    out_name: ClassVar[str] = "attention.output.dense"
    attention_norm_name: ClassVar[str] = "attention.output.LayerNorm"
    mlp_names: ClassVar[tuple[str, str]] = ("intermediate.dense", "output.dense")
    mlp_norm_name: ClassVar[str] = "output.LayerNorm"

    def __init__(self, config: ModelConfig, ops: Ops, weights: WeightSource) -> None:
        self.config = config
        self.ops = ops
        words = "embeddings.word_embeddings.weight"
        self.prefix = next((each for each in self.prefixes if weights.shape(each + words)), self.prefixes[0])
        self.embedding = self._load_embedding(weights)
        self.positions = None if config.rope else self._load_positions(weights)
        self.norm = self.load_norm(self.prefix + self.embedding_norm_name, weights)
        self.bias = self.load_bias(weights)
        rotaries = layer_rotaries(config, self.embedding)
        self.layers = [self._load_layer(i, rotary, weights) for i, rotary in enumerate(rotaries)]
        self.mixers = [layer.attention.spec for layer in self.layers]

    def load_norm(self, name: str, weights: WeightSource) -> LayerNorm:
        """A LayerNorm; checkpoints of BERT's first years name its tensors ``gamma`` and ``beta``."""
        if weights.shape(f"{name}.gamma") is None:
            return load_layer_norm(self.config, weights, name)
        shape = (self.config.hidden_size,)
        return LayerNorm(weights.get(f"{name}.gamma", shape), weights.get(f"{name}.beta", shape))

    def load_bias(self, weights: WeightSource) -> Tensor | None:
        """What attention adds to scores, see ``BidirectionalSpec``; None for nothing."""
        return None

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """The MLP of the layer whose names begin with ``prefix``."""
        up, down = (prefix + name for name in self.mlp_names)
        return load_plain_mlp(self.config, self.ops, weights, up, down)

    def _load_embedding(self, weights: WeightSource) -> Tensor:
        """This process's rows of ``[types · V, H]``: those of tokens, with what is added for each type of them."""
        c, name = self.config, f"{self.prefix}embeddings."
        own = self.ops.shard.vocabulary(c.num_token_ids)
        rows = np.arange(own.start, own.stop)
        words = load_weight(weights, f"{name}word_embeddings.weight", (c.vocab_size, c.hidden_size))
        if not c.token_types:
            return words.rows(own).dense()
        types = weights.get(f"{name}token_type_embeddings.weight", (c.token_types, c.hidden_size))
        return words.rows(rows % c.vocab_size).dense() + types[rows // c.vocab_size]

    def _load_positions(self, weights: WeightSource) -> Tensor:
        """``[max_model_len, H]``; where positions begin after the padding token's id, that token's row comes first."""
        c = self.config
        shape, first = (c.position_offset + c.max_model_len, c.hidden_size), max(0, c.position_offset - 1)
        return weights.get(f"{self.prefix}embeddings.position_embeddings.weight", shape)[first:]

    def _position_rows(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """``[T]``, rows of the positions' table. Padding tokens, which a text may have, are not counted."""
        if not self.config.position_offset:
            return positions
        is_padding = input_ids % self.config.vocab_size == self.config.position_offset - 1
        counted = is_padding.cumsum(0)
        begins = torch.arange(len(positions), device=positions.device) - positions
        own = counted - (counted - is_padding.long())[begins]
        return torch.where(is_padding, 0, positions + 1 - own)

    def _load_layer(self, index: int, rotary: Rotary | None, weights: WeightSource) -> _Layer:
        prefix = f"{self.prefix}{self.layers_name}.{index}."
        names = [prefix + name for name in self.qkv_names]
        out, options = prefix + self.out_name, (self.config, self.ops, weights, index)
        return _Layer(
            load_bidirectional_attention(*options, names, out, rotary=rotary, bias=self.bias),
            self.load_norm(prefix + self.attention_norm_name, weights),
            self.load_mlp(prefix, weights),
            self.load_norm(prefix + self.mlp_norm_name, weights),
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """See ``rosebatch.model.contract.Model``."""
        ops, eps = self.ops, self.config.norm_eps
        embedded = ops.embed(input_ids, self.embedding, self.config.num_token_ids)
        if self.positions is not None:
            embedded = embedded + functional.embedding(self._position_rows(input_ids, positions), self.positions)
        hidden = ops.layer_norm(embedded, *self.norm, eps)
        for layer in self.layers:
            rows = wanted if layer is self.layers[-1] else None
            attended = layer.attention(hidden, attention, rows)
            hidden, _ = ops.add_layer_norm(attended, rows_of(hidden, rows), *layer.attention_norm, eps)
            hidden, _ = ops.add_layer_norm(layer.mlp(hidden), hidden, *layer.mlp_norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``rosebatch.model.contract.Model``."""
        raise AssertionError("the engine refuses requests for tokens")


def encoder(values: Mapping[str, Any], family: str, **names: str) -> dict[str, Any]:
    """The fields of ``ModelConfig`` that all encoders have.

    Args:
        values: of config.json, completed by the architecture's defaults.
        family: see ``ModelConfig``.
        names: of fields in config.json -> what this one calls them.
    """
    refuse(values, "is_decoder", "add_cross_attention")
    supported("position_embedding_type", values.get("position_embedding_type", "absolute"), ("absolute", "rope"))

    def own(name: str) -> str:
        return names.get(name, name)

    hidden, layers, heads = (
        size(values, own(name)) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    return {
        "family": family,
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": values[own("intermediate_size")],
        "max_model_len": values[own("max_position_embeddings")],
        "norm_eps": values[own("layer_norm_eps")],
        "activation": values[own("hidden_act")],
        "token_types": values.get("type_vocab_size") or 0,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "bidirectional": True,
        "head": False,
    }


def first_token_head(first: str, last: str, activation: Literal["tanh", "relu"] = "tanh") -> ClassifierHead:
    """A classification head of the first token's state: two products, whose tensors have these names."""
    return "cls", (HeadLayer(name=first, activation=activation), HeadLayer(name=last))


def plain_encoder(values: Mapping[str, Any], family: str, **names: str) -> dict[str, Any]:
    """Those of encoders whose MLP has no gate."""
    fields = encoder(values, family, **names)
    return fields | {"activation": supported("hidden_act", fields["activation"], ACTIVATIONS)}


def gated_encoder(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Those of encoders whose MLP has a gate."""
    fields = encoder(values, family)
    return fields | {"activation": supported("hidden_act", fields["activation"], GATES)}


def after_padding(fields: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields, where positions of tokens begin after the padding token's id."""
    offset = values["pad_token_id"] + 1
    return fields | {"position_offset": offset, "max_model_len": fields["max_model_len"] - offset}
