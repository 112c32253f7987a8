"""The shape of layers with Mamba2."""

import msgspec

from rosebatch.config.limits import MAX_SIZE, require_in

# Tokens that the convolution before the state space spans: a tile of the kernel keeps them.
_MAX_TAPS = 16


class MambaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """Mamba2 of some layers; the formula is in ``rosebatch_kernels.mamba2.decode``.

    Attributes:
        layers: whether a layer has it, for each layer.
        heads, head_dim: heads, and their size.
        groups: of heads that share B and C; the norm is over the channels of a group.
        state_size: numbers of B and C, and columns of a head's matrix.
        taps: tokens that the convolution spans, the token itself included.
        conv_bias, proj_bias: whether the convolution, and the projections before and after, have a bias.
        norm: whether a norm follows the gate.
    """

    layers: tuple[bool, ...]
    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    norm: bool = True

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "groups", "state_size"):
            require_in(name, getattr(self, name), 1, MAX_SIZE)
        require_in("taps", self.taps, 1, _MAX_TAPS)
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is no multiple of groups {self.groups}")

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of x, B and C together, which the convolution mixes over time."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def projected(self) -> int:
        """Columns of the first projection: the gate, what the convolution mixes, and a step for each head."""
        return self.inner + self.channels + self.heads

    @property
    def memory_bytes(self) -> int:
        """Bytes of a sequence's matrices in one layer, which are fp32."""
        return 4 * self.inner * self.state_size

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's state in one layer, activations of ``itemsize``."""
        return self.memory_bytes + self.taps * self.channels * itemsize

    @property
    def step_channels(self) -> int:
        """Numbers of a token in a packed step."""
        # The projection, what the convolution makes of it, and what the gate makes of the result.
        return self.projected + self.channels + self.inner
