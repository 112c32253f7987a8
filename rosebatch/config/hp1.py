"""The shape of HP1 attention, and what models with it cannot have."""

import math
from typing import TYPE_CHECKING

import msgspec

from rosebatch.host.model_files import shown

if TYPE_CHECKING:
    from rosebatch.config.model import ModelConfig

# Keys that the filter spans: the kernels keep a sum for each in registers.
_MAX_TAPS = 8
_UNSUPPORTED = (
    *("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sliding_windows", "attention_soft_cap", "logit_soft_cap"),
    *("sliding_rope", "rotary_layers", "rotary_dim", "parallel_residual"),
)


class HP1Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        if not 1 <= self.fir_k <= _MAX_TAPS:
            raise ValueError(f"fir_k must be in [1, {_MAX_TAPS}], got {shown(self.fir_k)}")
        if not (math.isfinite(self.clip_min) and math.isfinite(self.clip_max)):
            raise ValueError(f"clip_min and clip_max must be finite, got {self.clip_min} and {self.clip_max}")
        if self.clip_min > self.clip_max:
            raise ValueError(f"clip_min {self.clip_min} is above clip_max {self.clip_max}")


def check_hp1(config: "ModelConfig") -> None:
    """Raise a ValueError if a model with HP1 attention has what it cannot have, or another model has its gate."""
    own = config.family == "hp1"
    if own is (config.hp1 is None):
        raise ValueError(f"hp1 {'is missing: the gate of attention' if own else f'has no meaning for {config.family}'}")
    if not own:
        return
    if 0 < config.norm_eps < math.inf:
        raise ValueError("norm_eps has no meaning for hp1")
    for name in _UNSUPPORTED:
        if getattr(config, name):
            raise ValueError(f"{name} is not supported for hp1")
    if config.activation != "relu":
        raise ValueError(f"activation {config.activation!r} is not supported for hp1: its MLP has relu")
