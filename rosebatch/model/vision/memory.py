"""What a tower takes of a device. It is known from the shapes of tensors: a tower is loaded at the first image."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

# Values of activations at the widest place of a layer, for each channel of a patch. On a CPU, 14 to 37 were measured:
# the most in bf16, because transformers turns queries and keys in fp32, and for Pixtral, whose mask has all pairs of
# patches (benchmarks/NOTEBOOK/2026-11.md).
ACTIVATIONS = 40


def tower_bytes(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, pixels: int, activations: int = ACTIVATIONS
) -> int:
    """Bytes of its weights, and of activations.

    Args:
        shapes: of its tensors, by name.
        itemsize: bytes of a weight.
        pixels: of images that are encoded together.
        activations: values at the widest place of a layer, for each channel of a patch.
    """
    weights = sum(map(prod, shapes.values())) * itemsize
    return weights + max(
        (activations * itemsize * each.channels * pixels // each.size for each in _cuts(shapes)), default=0
    )


def most_patches(shapes: Mapping[str, tuple[int, ...]], pixels: int) -> int:
    """Patches of images that have so many pixels; 0 if no tensor tells.

    Args:
        shapes: of the tower's tensors, by name.
        pixels: of the images.
    """
    return max((pixels // each.size for each in _cuts(shapes)), default=0)


class _Cut(NamedTuple):
    """The product that makes a vector of each patch: channels of the vector, and pixels of the patch."""

    channels: int
    size: int


def _cuts(shapes: Mapping[str, tuple[int, ...]]) -> list[_Cut]:
    """Tensors ``[channels, 3, ..., side, side]``, or ``[channels, 3 x side x side]``."""
    flat = [
        _Cut(each[0], each[1] // 3)
        for name, each in shapes.items()
        if name.endswith("patch_embedder.input_proj.weight")
    ]
    return flat + [_Cut(each[0], each[-1] ** 2) for each in shapes.values() if len(each) >= 4 and each[1] == 3]
