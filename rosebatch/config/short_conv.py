"""The shape of layers with a short convolution."""

import msgspec

from rosebatch.config.limits import require_in

# Tokens that a convolution spans: a tile of the kernel keeps them.
_MAX_TAPS = 16


class ConvConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """A gated convolution of some layers; the formula is in ``rosebatch_kernels.short_conv.kernel``.

    It has as many channels as hidden states have.

    Attributes:
        layers: whether a layer has it in place of attention, for each layer.
        taps: tokens that it spans, the token itself included.
    """

    layers: tuple[bool, ...]
    taps: int = 3

    def __post_init__(self) -> None:
        require_in("taps", self.taps, 1, _MAX_TAPS)
        if all(self.layers):
            raise ValueError("a model whose layers all have a short convolution is not supported")
