"""Heads of layers without a sliding window, where those differ from the other layers'."""

import msgspec

from rosebatch.config.limits import MAX_SIZE, require_in


class FullHeadsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """K/V heads of full attention in a model whose other layers have a sliding window (Gemma 4).

    Attributes:
        num_kv_heads, head_dim: as of ``ModelConfig``.
        rotary_dim: channels of a head that are rotated; half of them begin each half of a head. 0 for all.
        keys_are_values: whether one projection makes k and v, before their norms.
    """

    num_kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    keys_are_values: bool = False

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim"):
            require_in(f"{name} of full attention", getattr(self, name), 1, MAX_SIZE)
        require_in("rotary_dim of full attention", self.rotary_dim, 0, self.head_dim)
        if self.rotary_dim % 2 or self.head_dim % 2:
            raise ValueError("heads of full attention have whole pairs of channels")
