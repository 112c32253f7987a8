"""Kernels that touch what they were not given, and kernels that do not: the check refuses the first alone."""

import os

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="of the interpreter")


@triton.jit
def _copy(source, target, first, count, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(target + index, tl.load(source + first + index, mask=index < count), mask=index < count)


@triton.jit
def _read_one(source, target, place):
    tl.store(target, tl.load(source + place))


@triton.jit
def _count(counters, place):
    tl.atomic_add(counters + place, 1)


@triton.jit
def _swap(values, place):
    tl.atomic_cas(values + place, 0, 1)


@triton.jit
def _sum(sources, target):
    tl.store(target, tl.load(sources[0]) + tl.load(sources[1]))


@triton.jit
def _ends(first, second, distance):
    index = tl.arange(0, 2) * distance
    tl.store(second + tl.arange(0, 2), tl.load(first + index))


def refused():
    return pytest.raises(InterpreterError, match="outside of the launch's tensors")


@pytest.mark.parametrize(("first", "count"), [(0, 8), (3, 5), (8, 0), (10**9, 0)])
def test_what_is_masked_may_be_anywhere(first, count):
    source, target = torch.arange(8.0), torch.zeros(8)
    _copy[(1,)](source, target, first, count, size=16)
    assert target[:count].tolist() == source[first : first + count].tolist()


@pytest.mark.parametrize(("first", "count"), [(0, 9), (-1, 2), (8, 1)])
def test_reading_in_front_or_behind(first, count):
    with refused():
        _copy[(1,)](torch.arange(8.0), torch.zeros(16), first, count, size=16)


def test_writing_behind():
    with refused():
        _copy[(1,)](torch.arange(16.0), torch.zeros(8), 0, 9, size=16)


def test_a_single_element():
    target = torch.zeros(1)
    _read_one[(1,)](torch.arange(8.0), target, 7)
    assert target.item() == 7
    with refused():
        _read_one[(1,)](torch.arange(8.0), target, 8)


def test_an_element_that_is_half_inside():
    source = torch.zeros(0).set_(torch.UntypedStorage(10), 0, (2,))
    with refused():
        _read_one[(1,)](source, torch.zeros(1), 2)


@pytest.mark.parametrize("kernel", [_count, _swap])
def test_atomic_operations(kernel):
    values = torch.zeros(4, dtype=torch.int32)
    kernel[(1,)](values, 3)
    assert values.tolist() == [0, 0, 0, 1]
    with refused():
        kernel[(1,)](values, 4)


def test_one_tensor_is_no_way_into_another():
    """A block that begins in one and ends in the other reads what lies between them."""
    first, second = sorted((torch.zeros(4), torch.zeros(4)), key=torch.Tensor.data_ptr)
    distance = (second.data_ptr() - first.data_ptr()) // 4
    with refused():
        _ends[(1,)](first, second, distance)


def test_rows_of_a_wider_tensor():
    """A view may go to the end of what it is a view of."""
    wide, target = torch.arange(16.0), torch.zeros(8)
    _copy[(1,)](wide[4:6], target, 0, 8, size=8)
    assert target.tolist() == wide[4:12].tolist()


def test_tensors_in_a_tuple():
    target = torch.zeros(1)
    _sum[(1,)]((torch.ones(1), torch.ones(2)), target)
    assert target.item() == 2
