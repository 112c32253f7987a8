"""What a tower takes of a device. It is known from the shapes of tensors: a tower is loaded at the first image."""

from collections.abc import Mapping
from math import prod

# Values of activations at the widest place of a layer, for each channel of a patch. On a CPU, 14 to 37 were measured:
# the most in bf16, because transformers turns queries and keys in fp32, and for Pixtral, whose mask has all pairs of
# patches (benchmarks/NOTEBOOK/2026-11.md).
_ACTIVATIONS = 40


def tower_bytes(shapes: Mapping[str, tuple[int, ...]], itemsize: int, pixels: int) -> int:
    """Bytes of its weights, and of activations.

    Args:
        shapes: of its tensors, by name.
        itemsize: bytes of a weight.
        pixels: of images that are encoded together.
    """
    weights = sum(map(prod, shapes.values())) * itemsize
    # The product that makes a vector of each patch: [channels, 3, ..., side, side].
    cut = [shape for shape in shapes.values() if len(shape) >= 4 and shape[1] == 3]
    return weights + max((_ACTIVATIONS * itemsize * each[0] * pixels // each[-1] ** 2 for each in cut), default=0)
