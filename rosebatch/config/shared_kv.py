"""Last layers that have no keys and values of their own."""

import msgspec

from rosebatch.config.limits import MAX_LAYERS, require_in


class SharedKVConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """Last layers that read K and V of the last layer before them with the same sliding window (Gemma 4 E2B, E4B).

    Attributes:
        layers: so many.
        wide_mlp: whether their MLPs are twice as wide.
    """

    layers: int
    wide_mlp: bool = False

    def __post_init__(self) -> None:
        require_in("layers of shared_kv", self.layers, 1, MAX_LAYERS)
