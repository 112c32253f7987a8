"""The products that make numbers for labels of a pooled state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch.config.classifier import HeadLayer
from rosebatch.config.model import ModelConfig
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Linear, Ops

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


@dataclass(frozen=True, slots=True)
class _Layer:
    product: Linear
    activation: Callable[[Tensor], Tensor]
    norm: tuple[Tensor, Tensor | None] | None
    eps: float


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """Computes in fp32, whatever the dtype of the run is.

    Attributes:
        layers: in order.
    """

    layers: Sequence[_Layer]

    def __call__(self, states: Tensor) -> Tensor:
        """``[P, H]`` fp32 to ``[P, labels]`` fp32, before the activation of outputs."""
        for layer in self.layers:
            states = layer.activation(layer.product(states))
            if layer.norm is not None:
                weight, bias = layer.norm
                states = functional.layer_norm(states, weight.shape, weight, bias, layer.eps)
        return states


def load_classifier(config: ModelConfig, ops: Ops, weights: WeightSource) -> ClassifierHead | None:
    """The head of a model; None if it has none.

    Raises:
        UserError: a weight is missing or has the wrong shape.
    """
    if config.classifier is None:
        return None
    hidden, labels = config.hidden_size, len(config.classifier.labels)
    *before, last = config.classifier.layers
    sizes = [(layer, hidden) for layer in before] + [(last, labels)]
    return ClassifierHead([_load(layer, size, config, ops, weights) for layer, size in sizes])


def _load(layer: HeadLayer, outputs: int, config: ModelConfig, ops: Ops, weights: WeightSource) -> _Layer:
    def vector(name: str) -> Tensor:
        return weights.get(name, (outputs,)).float()

    weight = DenseWeight.of(weights.get(f"{layer.name}.weight", (outputs, config.hidden_size)).float())
    product = ops.linear(weight, vector(f"{layer.name}.bias") if layer.bias else None)
    norm = None
    if layer.norm:
        norm = vector(f"{layer.norm}.weight"), vector(f"{layer.norm}.bias") if layer.norm_bias else None
    return _Layer(product, _ACTIVATIONS[layer.activation], norm, config.norm_eps)
