"""The shape of HP1 attention."""

import math

import msgspec

from rosebatch.config.limits import require_in

# Keys that the filter spans: the kernels keep a sum for each in registers.
_MAX_TAPS = 8


class HP1Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """The gate of HP1 attention; the formula is in ``rosebatch_kernels.hp1.reference``.

    Attributes:
        fir_k: keys that the filter spans, the key itself included.
        relu_pre: subtract only the positive part of a score from others.
        clip_min, clip_max: bounds of a weight before its head's factor.
    """

    fir_k: int = 3
    relu_pre: bool = True
    clip_min: float = 0.0
    clip_max: float = 1.0

    def __post_init__(self) -> None:
        require_in("fir_k", self.fir_k, 1, _MAX_TAPS)
        if not (math.isfinite(self.clip_min) and math.isfinite(self.clip_max)):
            raise ValueError(f"clip_min and clip_max must be finite, got {self.clip_min} and {self.clip_max}")
        if self.clip_min > self.clip_max:
            raise ValueError(f"clip_min {self.clip_min} is above clip_max {self.clip_max}")
