"""Limits of the shapes of all models."""

from rosebatch.host.model_files import shown

# Of any size of a model: far above those of all models, and low enough to compute with.
MAX_SIZE = 2**24
MAX_LAYERS = 2**12
# Kernels hold token ids and positions in 32 bits.
MAX_ID = 2**31


def require_in(name: str, value: int, least: int, most: int) -> None:
    """Check a number of a model's config.

    Raises:
        ValueError: it is outside of its range.
    """
    if not least <= value <= most:
        raise ValueError(f"{name} must be in [{least}, {most}], got {shown(value)}")
