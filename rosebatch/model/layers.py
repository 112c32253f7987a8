"""What the model families share: how a model describes its attention, the contract of a model."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rosebatch.config.model import KVShape, ModelConfig
from rosebatch.model.weights import Take, WeightSource
from rosebatch.ops.ops import DeltaWeights, Gate, Heads, Ops, QKNorm, Weight


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Rotary tables; layers with the same positions share one object.

    Attributes:
        cos, sin: ``[max_len, R]`` in the model's dtype, both halves of cos alike, the first half of sin negated. R is
            even and at most D: the first R channels of a head are rotated, channel ``i`` with channel ``i + R/2``; the
            others stay (partial rotary). Factors on attention (yarn, longrope) are inside the tables.
        trained_len: of longrope, if sequences may be longer: rows of positions in front of it have short factors, and
            behind the rows of all positions, as many follow with long ones. 0 if each position has one row.
    """

    cos: Tensor
    sin: Tensor
    trained_len: int = 0

    @property
    def max_len(self) -> int:
        """Positions that have a row."""
        return len(self.cos) - self.trained_len


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionSpec:
    """The attention of one layer. The model owns it, a runner carries it out; layers may differ in all of it.

    Attributes:
        layer: counted from 0 among the layers with a KV cache.
        num_heads, num_kv_heads: of q, and of k and v.
        head_dim: D.
        scale: factor on q·k.
        window: keys that a query sees, its own included; 0 for all.
        soft_cap: a score becomes ``soft_cap · tanh(score / soft_cap)`` before the mask; 0 for no cap (Gemma 2).
        sinks: ``[num_heads]``, a further logit of each head's softmax, which has no value (gpt-oss); None for none.
        qk_norm: what q and k go through before the rotation.
        rotary: None if positions are not rotary.
        gate: of HP1 attention, which has no cap and no sinks; None for softmax.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    qk_norm: QKNorm | None = None
    rotary: Rotary | None = None
    gate: Gate | None = None

    def __post_init__(self) -> None:
        assert self.gate is None or (self.soft_cap == 0 and self.sinks is None), "a gate takes the softmax's place"

    @property
    def heads(self) -> Heads:
        """Query heads, K/V heads and head size."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def kv_shape(self) -> KVShape:
        """What the layer keeps in the KV cache."""
        return KVShape(self.num_kv_heads, self.head_dim)


def heads_of(specs: Sequence[AttentionSpec]) -> tuple[Collection[Heads], Collection[Heads]]:
    """The heads of the layers with softmax, and of those with a gate."""
    softmax = {spec.heads for spec in specs if spec.gate is None}
    return softmax, {spec.heads for spec in specs if spec.gate is not None}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StateSpec:
    """The gated delta rule of one layer: a sequence keeps a state of fixed size there, in place of K and V.

    Attributes:
        layer: counted from 0 among the layers with a state.
        key_heads, value_heads: a key head serves ``value_heads / key_heads`` successive value heads.
        key_dim, value_dim: of a head of each kind.
        weights: of the convolution and of the decay.
    """

    layer: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    weights: DeltaWeights

    @property
    def input_shape(self) -> tuple[int, int]:
        """Of the convolution's last inputs, in the model's dtype."""
        channels, taps = self.weights.conv.shape
        return taps, channels

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """Of the rule's matrices, in fp32."""
        return self.value_heads, self.key_dim, self.value_dim


class CachedAttention(Protocol):
    """The attention of one step, over whatever cache the runner keeps."""

    def __call__(self, spec: AttentionSpec, qkv: Tensor) -> Tensor:
        """Norm and rotate q and k, write the new tokens' K and V to the cache, attend over all of each sequence.

        Args:
            spec: of the layer.
            qkv: ``[T, (heads + 2 · kv_heads) · D]``, q then k then v, as projected; may be overwritten.

        Returns:
            ``[T, heads · D]``.
        """
        ...


class Attention(CachedAttention, Protocol):
    """What layers of a step keep of each sequence: K and V, or a state."""

    def of_rows(self, spec: AttentionSpec, qkv: Tensor, wanted: Tensor) -> Tensor:
        """The same of these rows alone, ``[S, heads · D]`` for ``wanted [S]``: what a model's last layer needs."""
        ...

    def delta(self, spec: StateSpec, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Continue each sequence's state by its new tokens, see ``rosebatch_kernels.gated_delta``.

        Args:
            spec: of the layer.
            qkv: ``[T, C]``, q then k then v, as projected, rows at any stride.
            a, b: ``[T, value_heads]``, rows at any stride.

        Returns:
            ``[T, value_heads · value_dim]``.
        """
        ...


class Model(Protocol):
    """A causal language model over packed tokens: sequences stand one behind the other, padding comes last.

    A model whose layers keep states has ``states`` as well, see ``states_of``.
    """

    @property
    def attention(self) -> Sequence[AttentionSpec]:
        """Of each layer with a KV cache, in order."""
        ...

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """Hidden states ``[T, H]`` before the output projection, of ``input_ids [T]`` at ``positions [T]``.

        With ``wanted [S]``, those of these rows alone, ``[S, H]``: behind attention, the last layer needs no others.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, V]`` logits of the rows ``hidden [S, H]``."""
        ...


def attend(attention: Attention, spec: AttentionSpec, qkv: Tensor, wanted: Tensor | None) -> Tensor:
    """Attention of these rows; of all for None."""
    return attention(spec, qkv) if wanted is None else attention.of_rows(spec, qkv, wanted)


def rows_of(x: Tensor, rows: Tensor | None) -> Tensor:
    """These rows of x; all of them for None."""
    return x if rows is None else x[rows]


def states_of(model: Model) -> Sequence[StateSpec]:
    """The spec of each layer with a state, in order; most models have none."""
    specs: Sequence[StateSpec] = getattr(model, "states", ())
    return specs


def load_embedding(config: ModelConfig, ops: Ops, weights: WeightSource, name: str) -> Tensor:
    """This process's rows of the table of embeddings ``[V, H]``, for ``Ops.embed``."""
    return weights.get(f"{name}.weight", (config.vocab_size, config.hidden_size), take=_rows(config, ops))


def _rows(config: ModelConfig, ops: Ops) -> Take | None:
    return Take.of(0, ops.shard.vocabulary(config.vocab_size), config.vocab_size)


def load_head(config: ModelConfig, ops: Ops, weights: WeightSource, embedding: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes logits of hidden states: a product, and the model's scale and soft cap if it has them.

    The product's weight is its own, or the embedding ``[V, H]``; each process has its rows of it. A model without one
    makes none.
    """
    if not config.head:
        return _no_head
    weight = embedding
    if not config.tie_word_embeddings:
        weight = weights.get("lm_head.weight", (config.vocab_size, config.hidden_size), take=_rows(config, ops))
    own, scale, cap = ops.head(Weight(weight)), config.logit_multiplier, config.logit_soft_cap
    divided = ops.shard.size > 1
    head = (lambda hidden: ops.gather(own(hidden), config.vocab_size)) if divided else own
    return head if scale == 1 and not cap else lambda hidden: ops.scale_and_cap_(head(hidden), scale, cap)


def _no_head(hidden: Tensor) -> Tensor:
    raise AssertionError("the engine refuses requests for tokens")
