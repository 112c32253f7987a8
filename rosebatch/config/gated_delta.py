"""The shape of layers with the gated delta rule."""

import msgspec

from rosebatch.config.limits import MAX_SIZE, require_in
from rosebatch.host.model_files import shown

# Tokens that the convolution before the rule spans: a tile of the kernel keeps them.
_MAX_TAPS = 16
# Tokens of a tile of chunks at most.
_TILE = 64
# From here on, a state could grow without bound.
_MAX_BETA = 2


class DeltaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """The gated delta rule of some layers; the formula is in ``rosebatch_kernels.gated_delta.decode``.

    Attributes:
        layers: whether a layer has the rule in place of attention, for each layer.
        key_heads, value_heads: a key head serves ``value_heads / key_heads`` value heads.
        key_dim, value_dim: of a head of each kind.
        taps: tokens that the convolution spans, the token itself included.
        by_channel: whether each channel of a key has a decay of its own (Kimi Linear). Decays and the gate of the
            result are then made by two products each, the first as wide as a head.
        max_beta: most that is written of a change; beyond 1, a state's eigenvalues may be negative (OLMo hybrid).
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    by_channel: bool = False
    max_beta: float = 1.0

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            require_in(name, getattr(self, name), 1, MAX_SIZE)
        require_in("taps", self.taps, 1, _MAX_TAPS)
        if not 0 < self.max_beta <= _MAX_BETA:
            raise ValueError(f"max_beta must be in (0, {_MAX_BETA}], got {shown(self.max_beta)}")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads {self.value_heads} is no multiple of key_heads {self.key_heads}")
        if all(self.layers):
            raise ValueError("a model whose layers all have the delta rule is not supported")

    @property
    def memory_bytes(self) -> int:
        """Bytes of a sequence's matrices in one layer, which are fp32."""
        return 4 * self.value_heads * self.key_dim * self.value_dim

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's state in one layer, activations of ``itemsize``."""
        return self.memory_bytes + self.taps * self.channels * itemsize

    @property
    def channels(self) -> int:
        """Of q, k and v together, which the convolution mixes over time."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def step_channels(self) -> int:
        """Numbers of a token in a packed step."""
        # The projection, what the convolution makes of it, and the two sides of the tiles' systems.
        sides = 2 * self.value_heads * (2 * self.value_dim + self.key_dim)
        if self.by_channel:
            # Two more sides, decays of channels, and the products of q with the keys of a tile.
            sides += self.value_heads * (3 * self.key_dim + _TILE) + self.key_dim + self.value_dim
        return 2 * self.channels + sides

    @property
    def projected(self) -> int:
        """Weights of a layer's first and last products, by channels of the hidden state."""
        values = self.value_heads * self.value_dim
        # Of the result; then the gate and a, or what they are made of.
        gates = self.key_dim + self.value_dim if self.by_channel else values + self.value_heads
        return self.channels + values + self.value_heads + gates

    @property
    def within(self) -> int:
        """Weights of the products between these."""
        return self.value_heads * (self.key_dim**2 + self.value_dim**2) if self.by_channel else 0
