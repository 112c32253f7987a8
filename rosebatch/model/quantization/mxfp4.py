"""MXFP4: 4-bit floats in blocks that share a power of two (OCP Microscaling Formats v1.0)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.model.lazy_tensor import LazyTensor, join, stack
from rosebatch.model.weights import WeightSource, lazy_tensor
from rosebatch.ops.weight import Indices, Weight

# By code: a sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_SCALE_BIAS = 127
# Values that share a scale, and the bytes that hold them.
_BLOCK, _BLOCK_BYTES = 32, 16


@dataclass(frozen=True, slots=True)
class MXFP4Weight(Weight):
    """See ``Weight``.

    Attributes:
        blocks: ``[..., out, G, 16]`` uint8.
        scales: ``[..., out, G]`` uint8.
        inputs: the matrix's columns among the ``32 · G`` of its blocks.
        dtype: of the run.
    """

    blocks: LazyTensor
    scales: LazyTensor
    inputs: range
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Weight``."""
        return *self.scales.shape[:-1], len(self.inputs)

    def rows(self, indices: Indices) -> "MXFP4Weight":
        """See ``Weight``."""
        return MXFP4Weight(self.blocks.take(-3, indices), self.scales.take(-2, indices), self.inputs, self.dtype)

    def columns(self, indices: range) -> "MXFP4Weight":
        """See ``Weight``: all blocks that these columns touch are read."""
        inputs = self.inputs[indices.start : indices.stop]
        touched = range(inputs.start // _BLOCK, -(-inputs.stop // _BLOCK))
        start = inputs.start - touched.start * _BLOCK
        blocks, scales = self.blocks.take(-2, touched), self.scales.take(-1, touched)
        return MXFP4Weight(blocks, scales, range(start, start + len(inputs)), self.dtype)

    def join(self, others: Sequence["MXFP4Weight"]) -> "MXFP4Weight":
        """See ``Weight``."""
        blocks, scales = _each(self, others)
        return MXFP4Weight(join(blocks, -3), join(scales, -2), self.inputs, self.dtype)

    def stack(self, others: Sequence["MXFP4Weight"]) -> "MXFP4Weight":
        """See ``Weight``."""
        blocks, scales = _each(self, others)
        return MXFP4Weight(stack(blocks), stack(scales), self.inputs, self.dtype)

    def dense(self) -> Tensor:
        """See ``Weight``; expanded expert by expert, because the codes of all would fill the memory."""
        blocks, scales = self.blocks.read(), self.scales.read()
        out = blocks.new_empty(self.shape, dtype=self.dtype)
        for place, (block, scale) in enumerate(zip(blocks, scales, strict=True)):
            out[place] = expand(block, scale, self.dtype)[..., self.inputs.start : self.inputs.stop]
        return out


def find(weights: WeightSource, name: str, shape: tuple[int, ...]) -> MXFP4Weight | None:
    """The weight ``name``, if the checkpoint has blocks and scales in its place."""
    if weights.shape(f"{name}_blocks") is None:
        return None
    groups = *shape[:-1], shape[-1] // _BLOCK
    blocks = lazy_tensor(weights, f"{name}_blocks", (*groups, _BLOCK_BYTES), dtype=torch.uint8)
    scales = lazy_tensor(weights, f"{name}_scales", groups, dtype=torch.uint8)
    return MXFP4Weight(blocks, scales, range(shape[-1]), weights.dtype)


def expand(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values ``[..., G · 2 · B]`` of ``blocks [..., G, B]`` uint8 with ``scales [..., G]`` uint8.

    A byte holds two codes, the first in its low half. All values are exact in bf16.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    table = torch.tensor(_VALUES, device=blocks.device)
    exponents = scales.int() - _SCALE_BIAS
    return torch.ldexp(table[codes.long()], exponents[..., None]).to(dtype).flatten(-2)


def _each(first: MXFP4Weight, others: Sequence[MXFP4Weight]) -> tuple[list[LazyTensor], list[LazyTensor]]:
    weights = [first, *others]
    return [weight.blocks for weight in weights], [weight.scales for weight in weights]
