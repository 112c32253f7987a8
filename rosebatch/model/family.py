"""What a file of ``rosebatch.model.families`` defines. ``rosebatch.model.registry`` lists these files."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.classifier import ClassifierConfig, HeadLayer
from rosebatch.config.model import ModelConfig
from rosebatch.core.pooling_params import AnyPooling
from rosebatch.model.contract import Model
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Ops

# In transformers' name of a tensor: the number of an expert. GGUF has one tensor of all.
EACH = "{expert}"


def integers(at_least: int = 0, below: int | None = None) -> Any:
    """The type of whole numbers in a range."""
    return Annotated[int, msgspec.Meta(ge=at_least, lt=below)]


def list_of(kind: Any, length: int | None = None) -> Any:
    """The type of lists, of any length or of this one."""
    return Annotated[list[kind], msgspec.Meta(min_length=length, max_length=length)]


class GGUFModel(Protocol):
    """A GGUF file of an architecture.

    Attributes:
        names: of its tensors.
    """

    names: set[str]

    def need(self, key: str, kind: Any = ...) -> Any:
        """The metadata ``ARCHITECTURE.key``, of a type, see ``Metadata``; raises UserError if there is none."""
        ...

    def get(self, key: str, default: Any = None, kind: Any = None) -> Any:
        """The metadata ``ARCHITECTURE.key``, or the default, whose type it has if no other ``kind`` is given."""
        ...

    def require(self, key: str, *neutral: Any) -> None:
        """Raise UserError if there is the metadata ``ARCHITECTURE.key``, with none of these values."""
        ...

    def without_drafts(self) -> int:
        """The number of layers but for those at the end that draft tokens: nothing of them is read."""
        ...

    def values(self, name: str) -> NDArray[np.float32] | None:
        """A tensor that is part of the config, dequantized; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class GGUF:
    """How GGUF files hold an architecture.

    Attributes:
        architecture: their name of it.
        layers: the first part of transformers' names in a layer, before its number.
        names: GGUF's names of tensors outside of layers -> transformers' names, both without suffix.
        layer_names: the same of a layer's tensors, without prefix; ``EACH`` stands for the numbers of experts. A name
            with a suffix stands for that tensor alone. Tensors may have one name in transformers: see ``join``.
        config: the fields of config.json that are not those of all architectures.
        biases: config.json -> GGUF's names of those with a bias. All have a weight.
        absent: config.json -> GGUF's names of those that such a model lacks: in all layers, or, with the prefix of a
            layer, in that.
        bare: GGUF's names of tensors without a suffix.
        values: transformers' name of a tensor, its values and config.json -> its values as transformers stores them.
        join: tensors with one name in transformers, in the order of ``layer_names`` -> the tensor of that name.
        mxfp4: blocks of MXFP4 of tensors with one name, or their scales, each ``[E, out, G, ...]`` uint8 -> those of
            the tensor of that name, which stays in MXFP4; None: such tensors are dequantized.
        pieces: whose rules a sentencepiece tokenizer has: see ``gguf_sentencepiece``.
        when: whether a file of its architecture is one of these; None: all files that no other form takes.
    """

    architecture: str
    layers: str
    names: Mapping[str, str]
    layer_names: Mapping[str, str]
    config: Callable[[GGUFModel], dict[str, Any]]
    biases: Callable[[Mapping[str, Any]], Collection[str]] = lambda _: ()
    absent: Callable[[Mapping[str, Any]], Collection[str]] = lambda _: ()
    bare: Collection[str] = ()
    values: Callable[[str, NDArray[np.float32], Mapping[str, Any]], NDArray[np.float32]] = lambda _, values, __: values
    join: Callable[[list[Tensor]], Tensor] = torch.cat
    mxfp4: Callable[[list[NDArray[np.uint8]]], NDArray[np.uint8]] | None = None
    pieces: Literal["llama", "phi", "gemma"] = "llama"
    when: Callable[[GGUFModel], bool] | None = None


# Of a classification head: which state it takes, and its layers.
ClassifierHead = tuple[AnyPooling, tuple[HeadLayer, ...]]

# The head for tokens of encoders, and of some decoders.
TOKEN_CLASSIFIER = (HeadLayer(name="classifier"),)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of transformers' classes that rosebatch runs by its own code.

    Attributes:
        model_type: transformers' name of its config.
        models: that have it, for people.
        parse: config.json, completed by ``defaults`` -> fields of ``ModelConfig``; raises ValueError or KeyError.
        defaults: of fields that config.json leaves out: those of transformers' config class.
        window: whether models of it may have sliding windows.
        experts: whether its MLPs are mixtures of experts.
        fallback: whether transformers' own code may run it, with ``--model-impl transformers``.
        gguf: how GGUF files hold it, each form of them; none if they are not served.
        classifier: config.json -> the head of its class for whole prompts; None: that of decoders, one product.
        token_classifier: config.json -> the layers of its head for tokens; None: one product, as most have it.
        rewards: further classes with a head, by what follows the stem of their names -> that head.
    """

    model_type: str
    models: str
    parse: Callable[[Mapping[str, Any]], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    window: bool = False
    experts: bool = False
    fallback: bool = True
    gguf: tuple[GGUF, ...] = ()
    classifier: Callable[[Mapping[str, Any]], ClassifierHead] | None = None
    token_classifier: Callable[[Mapping[str, Any]], tuple[HeadLayer, ...]] | None = None
    rewards: Mapping[str, ClassifierConfig] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """A class of models.

    Attributes:
        name: see ``ModelConfig.family``.
        load: makes a model of a shape; raises UserError if a weight is missing or has the wrong shape.
        activations: that its MLP may have; None: those of all MLPs, with a gate or without.
        mlp_matrices: of hidden size x intermediate size in a layer's MLP; the floor of a run counts their bytes. An MLP
            with a gate has three.
        attention_matrices: of hidden size x all heads' channels in a layer's attention, K and V left out: of q, of the
            result, and of a gate where there is one. Latent attention has its own.
        needs: parts of ``ModelConfig`` that a shape must have -> what they are, for people.
        may_have: further parts that a shape may have. Other families' parts are refused.
        lacks: other options of ``ModelConfig`` that the class does not have.
        check: raises ValueError for other shapes that the class cannot have.
        bidirectional: whether its tokens may, or must, see those after them.
        hf_values: config.json of a shape, but for the fields of all families; None if other engines do not have it.
    """

    name: str
    load: Callable[[ModelConfig, Ops, WeightSource], Model]
    activations: Collection[str] | None = None
    mlp_matrices: int = 3
    attention_matrices: int = 2
    needs: Mapping[str, str] = field(default_factory=dict)
    may_have: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    check: Callable[[ModelConfig], None] = lambda _: None
    bidirectional: bool = False
    hf_values: Callable[[ModelConfig], dict[str, Any]] | None = None
