"""The products that vectors go through after they are pooled: the Dense parts of sentence-transformers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.core.pooling_params import Dense
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.ops import Linear, Ops


@dataclass(frozen=True, slots=True)
class PoolingHead:
    """Products in fp32, and whether tanh follows each.

    Attributes:
        layers: in order.
    """

    layers: Sequence[tuple[Linear, bool]]

    def __call__(self, vectors: Tensor) -> Tensor:
        """``[P, H]`` fp32 to ``[P, outputs]`` fp32."""
        for linear, tanh in self.layers:
            vectors = linear(vectors)
            vectors = vectors.tanh() if tanh else vectors
        return vectors


def load_pooling_head(parts: Sequence[Dense], hidden_size: int, ops: Ops, device: torch.device) -> PoolingHead | None:
    """What follows the pooling of a model with this hidden size; None if nothing does.

    Raises:
        UserError: a weight is missing or has the wrong shape.
    """
    layers, size = [], hidden_size
    for part in parts:
        if part.inputs != size:
            raise UserError(f"{part.folder}: takes vectors of {part.inputs} numbers, there are {size}")
        weights, size = SafetensorsWeights(part.folder, torch.float32, device), part.outputs
        weight = DenseWeight.of(weights.get("linear.weight", (part.outputs, part.inputs)))
        bias = weights.get("linear.bias", (part.outputs,)) if part.bias else None
        layers.append((ops.linear(weight, bias), part.tanh))
    return PoolingHead(layers) if layers else None
