"""The gated delta rule."""

from dataclasses import dataclass

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
    def input_shape(self) -> tuple[int, int]:
        """Of the convolution's last inputs, in the model's dtype."""
        channels, taps = self.weights.conv.shape
        return taps, channels

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """Of the rule's matrices, in fp32."""
        return self.value_heads, self.key_dim, self.value_dim
