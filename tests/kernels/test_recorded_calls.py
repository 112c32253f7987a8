"""What is recorded of a call for some operands is right for others of their types."""

import pytest
import torch
import triton
import triton.language as tl

from tests.helpers.marks import needs_interpreter

pytestmark = needs_interpreter
# The first call is not recorded, the second one is, and others repeat it.
TIMES = 4


@triton.jit
def _sum_of_two(x, y, out, size: tl.constexpr):
    place = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out + place, tl.load(x + place) + tl.load(y + place))


@triton.jit
def _sum_with_itself(x, out, size: tl.constexpr):
    place = tl.program_id(0) * size + tl.arange(0, size)
    loaded = tl.load(x + place)
    tl.store(out + place, loaded + loaded)


@triton.jit
def _product(x, out, factor: tl.constexpr, size: tl.constexpr):
    place = tl.arange(0, size)
    tl.store(out + place, tl.load(x + place) * factor)


def test_a_tensor_beside_itself():
    """Recorded as an addition of the first operand to itself, it would add no other. Each program has its place."""
    x, y = torch.arange(64.0).split(32)
    out = torch.empty(32)
    for _ in range(TIMES):
        _sum_with_itself[(8,)](x, out, size=4)
        assert torch.equal(out, x + x)
    for _ in range(TIMES):
        _sum_of_two[(8,)](x, y, out, size=4)
        assert torch.equal(out, x + y)


@pytest.mark.parametrize("kind", [torch.float32, torch.int32])
def test_constants_that_are_equal(kind):
    """0.0 equals -0.0, and 1 equals 1.0: products of them have other signs and types."""
    x = torch.tensor([1, -2, 3, 4], dtype=kind)
    for factor in (0.0, -0.0, 1, 1.0, 0.5):
        for _ in range(TIMES):
            out = torch.full((4,), float("nan"))
            _product[(1,)](x, out, factor=factor, size=4)
            exact = x.float() * factor
            assert torch.equal(out, exact) and torch.equal(out.signbit(), exact.signbit())
