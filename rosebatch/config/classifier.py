"""What a model's head makes of a pooled state: a number for each label."""

from typing import Literal

import msgspec

from rosebatch.core.pooling_params import Activation, AnyPooling


class HeadLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """A product of a head, in the order: product, activation, norm.

    Attributes:
        name: of its tensors, without suffix.
        bias: whether the product has one.
        activation: what follows it; empty for nothing.
        norm: name of the tensors of a LayerNorm after that; empty for none.
        norm_bias: whether that has a bias.
    """

    name: str
    bias: bool = True
    activation: Literal["", "tanh", "relu", "gelu", "silu"] = ""
    norm: str = ""
    norm_bias: bool = False


class ClassifierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """A classification head.

    Attributes:
        labels: names of its outputs.
        layers: all but the last have as many outputs as inputs.
        pooling: which state it takes; ``all`` for those of all tokens.
        activation: what outputs go through.
        step_token: id of the token after each step of an answer, where only these are read.
        padding: id of the token that the last state is never of, unless a prompt has no other.
    """

    labels: tuple[str, ...]
    layers: tuple[HeadLayer, ...]
    pooling: AnyPooling = "last"
    activation: Activation = "softmax"
    step_token: int | None = None
    padding: int | None = None
