"""The gated delta rule."""

from dataclasses import dataclass

import torch

from rosebatch.model.mixers.mixer import StatePlane
from rosebatch.ops.ops import DeltaWeights


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
    def channels(self) -> int:
        """Channels of q, k and v together."""
        return len(self.weights.conv)

    @property
    def states(self) -> tuple[StatePlane, ...]:
        """What a sequence keeps, see ``DeltaState``: the convolution's last inputs, and the rule's matrices."""
        channels, taps = self.weights.conv.shape
        memory = self.value_heads, self.key_dim, self.value_dim
        return StatePlane((taps, channels)), StatePlane(memory, torch.float32)
