"""Whether the files of a model hold what its config says: all headers are looked at, and no matrix is read."""

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.adapters.by_row import by_row
from rosebatch.model.registry import build_model
from rosebatch.model.weights import WeightSource
from rosebatch.ops.adapters import AdapterRows
from rosebatch.ops.ops import Experts, HeadProducts, Linear, Ops, Partial, RoutedExperts
from rosebatch.ops.weight import Weight

# Tensors there have a shape and no values.
HEADERS = torch.device("meta")


class _NoProduct(Linear):
    """Of a weight without values."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        weight.dense()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        raise AssertionError("there are no values")

    product = __call__


def require_loadable(config: ModelConfig, weights: WeightSource) -> None:
    """Check that a model can be built of these weights.

    Args:
        config: of the model.
        weights: on ``HEADERS``.

    Raises:
        UserError: as ``build_model``, but for what values say.
    """
    with torch.inference_mode():
        build_model(config, NO_PRODUCTS, weights)


def _experts(layer: Experts) -> RoutedExperts:
    layer.gate_up.dense()
    layer.down.dense()

    def run(x: Tensor, logits: Tensor, shared: Tensor | None) -> Partial:
        raise AssertionError("there are no values")

    return run


def _each_head(weight: Tensor) -> HeadProducts:
    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        raise AssertionError("there are no values")

    return run


# The operators of a model that is never called.
NO_PRODUCTS = by_row(
    Ops(
        linear=_NoProduct,
        head=lambda weight: _NoProduct(weight, None),
        experts=_experts,
        each_head=_each_head,
    ),
    AdapterRows(),
)
