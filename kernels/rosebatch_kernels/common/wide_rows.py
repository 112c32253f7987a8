"""Rows of logits, which kernels read 16 bytes at a time wherever they lie well."""

# mypy: allow-untyped-decorators, allow-untyped-defs

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.whole_numbers import cdiv


def group_of(logits: Tensor) -> int:
    """How many logits a thread reads at once.

    16 bytes of them if all rows of ``logits [S, V]`` begin on 16 bytes and the tensor's memory holds the last 16 bytes
    of each; else 1.
    """
    assert logits.stride(-1) == 1, "the last axis is contiguous"
    group = 16 // logits.element_size()
    rows, vocab = logits.shape
    end = logits.storage_offset() + (rows - 1) * logits.stride(0) + cdiv(vocab, group) * group
    room = end * logits.element_size() <= logits.untyped_storage().nbytes()
    return group if logits.data_ptr() % 16 == 0 and logits.stride(0) % group == 0 and room else 1


@triton.jit
def load(base, offset, size, GROUP: tl.constexpr):
    """Numbers of a row in fp32, -inf past its end. The last group is read whole."""
    x = tl.load(base + offset, mask=offset < (size + GROUP - 1) // GROUP * GROUP, other=float("-inf"))
    return tl.where(offset < size, x.to(tl.float32), float("-inf"))
