"""A short convolution with its projections, as a sub-layer."""

from dataclasses import dataclass

from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention
from rosebatch.model.mixers.short_conv.mixer import ConvSpec
from rosebatch.model.sublayers import columns, load_linear
from rosebatch.model.weights import WeightSource, lazy_tensor
from rosebatch.ops.ops import Linear, Ops, Partial


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Three numbers a channel of the normed input in one product, the convolution, a last product."""

    ops: Ops
    projection: Linear
    spec: ConvSpec
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """See ``rosebatch.model.sublayers.Mixer``."""
        return self.ops.project(self.out, attention(self.spec, self.projection(normed), wanted=wanted))


def load_short_conv(config: ModelConfig, ops: Ops, weights: WeightSource, layer: int, prefix: str) -> ShortConv:
    """The convolution of a layer.

    Args:
        config, ops, weights: of the model.
        layer: counted from 0 among the layers with a state.
        prefix: of the names of its tensors.
    """
    assert config.conv is not None, "the family has short convolutions"
    size = config.hidden_size
    own = ops.shard.of(size)
    pieces = columns((size, own), (size, own), (size, own))
    projection = load_linear(ops, weights, [f"{prefix}in_proj"], (3 * size,), size, bias=False, own=pieces)
    out = load_linear(ops, weights, [f"{prefix}out_proj"], (size,), size, bias=False, inputs=own)
    weight = lazy_tensor(weights, f"{prefix}conv.weight", (size, 1, config.conv.taps)).take(0, own).read()
    return ShortConv(ops, projection, ConvSpec(layer=layer, weight=weight[:, 0].contiguous()), out)
