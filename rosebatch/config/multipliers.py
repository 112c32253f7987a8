"""Factors of a layer's products."""

import msgspec


class MultipliersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """Factors of what a layer's products read and put out (Falcon-H1), the same in all layers.

    Attributes:
        attention_in, attention_out: of what attention reads, and of its last product.
        key: of k.
        mamba_in, mamba_out: of what Mamba2 reads, and of its last product.
        mamba: of the gate, x, B, C and the steps.
        gate, down: of the gate of the MLP before its activation, and of its last product.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0
    mamba: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    gate: float = 1.0
    down: float = 1.0

    @property
    def of_qkv(self) -> tuple[float, float, float]:
        """Of q, k and v."""
        return self.attention_in, self.attention_in * self.key, self.attention_in

    @property
    def of_mamba(self) -> tuple[float, ...]:
        """Of the columns of Mamba2's first product, see ``mamba``."""
        return tuple(self.mamba_in * factor for factor in self.mamba)
