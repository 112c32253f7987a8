"""What the model families share: the contract of a model, and its embedding and head."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.mixers.mixer import MixerSpec
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.forms import is_stored, load_weight
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Ops
from rosebatch.ops.weight import Weight

_HEAD = "lm_head.weight"


class Attention(Protocol):
    """The mixing of one step, over what the runner keeps of each sequence: K and V, or a state."""

    def __call__(self, spec: MixerSpec, *inputs: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Mix the new tokens of each sequence with those before them, and keep what later ones need.

        Args:
            spec: of the layer; its class documents the inputs, which may be overwritten.
            inputs: ``[T, ...]`` each.
            wanted: ``[S]``, rows that are read; None for all. A model's last layer needs no others.

        Returns:
            ``[T, out]``, or ``[S, out]`` of the wanted rows.
        """
        ...


class ImageRows(NamedTuple):
    """The rows of a packed step that are of images.

    Attributes:
        rows: ``[N]`` int64.
        vectors: ``[1 + added, N, H]``: the first take the place of embeddings, and each further ``[N, H]`` is added to
            what the next layer leaves, from the first layer on (deepstack, arXiv 2406.04334).
    """

    rows: Tensor
    vectors: Tensor


class Model(Protocol):
    """A causal language model over packed tokens: one sequence follows the other, padding comes last."""

    @property
    def mixers(self) -> Sequence[MixerSpec]:
        """The spec of each layer, in order."""
        ...

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """Hidden states ``[T, H]`` before the output projection, of ``input_ids [T]`` at ``positions [T]``.

        Where images have rotary positions of their own, ``positions`` are these: ``[T, 3]`` in a step with images.

        With ``wanted [S]``, those of these rows alone, ``[S, H]``: after attention, the last layer needs no others.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, V]`` logits of the rows ``hidden [S, H]``."""
        ...


class SeeingModel(Model, Protocol):
    """A model that takes images."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """See ``Model``; ``images`` are the rows of images, None if there are none."""
        ...


class LayerStates:
    """The hidden states before some layers, which a step leaves to what drafts from them.

    Args:
        layers: counted from 0, ascending.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers
        self._found: list[Tensor] = []

    def keep(self, layer: int, residual: Tensor) -> None:
        """Take ``[T, H]`` before a layer, if it is asked for. Copied: the layer may add to it in place."""
        if layer in self.layers:
            self._found.append(residual.clone())

    def joined(self) -> Tensor:
        """``[T, layers · H]``."""
        return torch.cat(self._found, -1)


class OpenModel(Model, Protocol):
    """A model that leaves the states before its layers.

    Attributes:
        embedding: ``[V, H]``, this process's rows of the table.
    """

    embedding: Tensor

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
        *,
        states: LayerStates | None = None,
    ) -> Tensor:
        """See ``Model``; ``states`` take what is asked for, of all T rows."""
        ...


class PoolingHeads(NamedTuple):
    """What pooled states ``[P, H]`` fp32 go through, by what becomes of them; None for nothing.

    Attributes:
        embed: to vectors ``[P, D]`` fp32.
        classify: to numbers ``[P, labels]`` fp32; those of tokens too.
    """

    embed: Callable[[Tensor], Tensor] | None = None
    classify: Callable[[Tensor], Tensor] | None = None


NO_HEADS = PoolingHeads()


def rows_of(x: Tensor, rows: Tensor | None) -> Tensor:
    """These rows of x; all of them for None."""
    return x if rows is None else x[rows]


def load_embedding(config: ModelConfig, ops: Ops, weights: WeightSource, name: str) -> Tensor:
    """This process's rows of the table of embeddings ``[V, H]``, for ``Ops.embed``.

    A checkpoint with tied weights may have them by the name of the head alone.
    """
    shape, name = (config.vocab_size, config.hidden_size), f"{name}.weight"
    if config.tie_word_embeddings and not is_stored(weights, name, shape) and is_stored(weights, _HEAD, shape):
        name = _HEAD
    return load_weight(weights, name, shape).rows(ops.shard.vocabulary(config.vocab_size)).dense()


def load_head(config: ModelConfig, ops: Ops, weights: WeightSource, embedding: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes logits of hidden states: a product, and the model's scale and soft cap if it has them.

    The product's weight is its own, or the embedding ``[V, H]``; each process has its rows of it. A weight of its own
    that is stored and differs wins over a config that says tied, as in transformers. A model without one makes none.
    """
    if not config.head:
        return _no_head
    shape, tied = (config.vocab_size, config.hidden_size), config.tie_word_embeddings
    weight: Weight = DenseWeight.of(embedding)
    if not tied or is_stored(weights, _HEAD, shape):
        stored = load_weight(weights, _HEAD, shape).rows(ops.shard.vocabulary(config.vocab_size))
        # Headers alone have no values to compare.
        if not tied or embedding.is_meta or not torch.equal(stored.dense(), embedding):
            weight = stored
    own, scale, cap = ops.head(weight), config.logit_multiplier, config.logit_soft_cap
    divided = ops.shard.size > 1
    head = (lambda hidden: ops.gather(own(hidden), config.vocab_size)) if divided else own
    return head if scale == 1 and not cap else lambda hidden: ops.scale_and_cap_(head(hidden), scale, cap)


def _no_head(hidden: Tensor) -> Tensor:
    raise AssertionError("the engine refuses requests for tokens")
