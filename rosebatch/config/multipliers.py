"""Factors of a layer's products."""

import msgspec


class MultipliersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True):
    """Factors of what a layer's products put out (Falcon-H1), the same in all layers.

    Attributes:
        qkv: of q, k and v.
        attention_out: of the product after attention.
        mamba: of the gate, x, B, C and the steps.
        mamba_out: of the product after Mamba2.
        gate, down: of the gate of the MLP before its activation, and of its last product.
    """

    qkv: tuple[float, float, float] = (1.0, 1.0, 1.0)
    attention_out: float = 1.0
    mamba: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    mamba_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0
