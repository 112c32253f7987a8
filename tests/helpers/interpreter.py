"""Triton's interpreter without what it does over and over, and with numbers of 8 bits rounded as a GPU rounds them.

It replaces the functions of ``triton.language`` by its own at each launch and for each call within a kernel, and asks
each time for a kernel's parameters. Each call then looks at types and shapes: see ``recorded_calls.py``. A third of a
test's processor time went into overflow that nobody hears of.
"""

import dataclasses
import functools
import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter, jit

from tests.helpers.recorded_calls import recorded


def speed_up() -> None:
    """Kernels compute the same, sooner."""
    _patch_once()
    _inspect_once()
    _record_calls()
    _describe_once()
    _spread_by_numpy()
    _leave_overflow_out()
    _check_no_sizes()
    _round_to_fp8()


def add_up_exactly(patch: pytest.MonkeyPatch) -> None:
    """Give a row of a product of tiles the same bits wherever it stands in them: numpy's go by its place."""

    def wide(each):
        data = each.data
        if each.dtype.scalar.is_fp8():
            data = interpreter._convert_float(data, each.dtype.scalar, tl.float16, None).view(np.float16)
        return data.astype(np.float64)

    def create_dot(self, a, b, acc, *_):
        return interpreter.TensorHandle((wide(a) @ wide(b)).astype(acc.data.dtype) + acc.data, acc.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _patch_once() -> None:
    """The language stays the interpreter's from the first launch on: nothing is compiled in a process of the tests."""
    patch, patched, restores_nothing = interpreter._patch_lang, set(), interpreter._LangPatchScope()

    def patch_for_good(fn):
        if fn not in patched:
            patched.add(fn)
            modules = [x for x in fn.__globals__.values() if inspect.ismodule(x)]
            if any(tl.core.is_builtin(x.load) for x in (tl, tl.core) if x in modules):
                patch(fn)
        return restores_nothing

    interpreter._patch_lang = patch_for_good


def _inspect_once() -> None:
    """Each launch asked again for the kernel's parameters, and for their types."""
    known = {name: functools.cache(getattr(inspect, name)) for name in ("getfullargspec", "get_annotations")}
    interpreter.inspect = SimpleNamespace(**vars(inspect) | known)
    tl.str_to_ty = functools.cache(tl.str_to_ty)
    jit._normalize_ty = functools.cache(jit._normalize_ty)


def _record_calls() -> None:
    """Without the wrapper of a builtin, which only asks for its semantic."""
    asks = tl.core.builtin(lambda: None).__code__

    def patch(owner, name, member, builder, scope):
        function = member.__wrapped__ if getattr(member, "__code__", None) is asks else member
        scope.set_attr(owner, name, recorded(function))

    interpreter._patch_attr = patch


def _describe_once() -> None:
    """Blocks of one shape and type share their description, of one type all the numpy types of their elements."""
    look_up = functools.cache(interpreter._get_np_dtype)
    pointer = np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda dtype: pointer if dtype.scalar.is_ptr() else look_up(dtype.scalar)

    describe, known = tl.block_type.__init__, {}

    def init_block(self, element_ty, shape):
        sizes = tuple([tl.core._unwrap_if_constexpr(size) for size in shape])
        # The name of a pointer's type does not tell its address space.
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in known:
            describe(self, element_ty, list(sizes))
            self.tensor_shape = _described(sizes)
            known[key] = vars(self)
        self.__dict__ = known[key]

    tl.block_type.__init__ = init_block
    single = _described(())

    def init(self, handle, type):
        self.handle = handle
        self.type = type
        if type.__class__ is tl.block_type:
            self.dtype = type.element_ty
            self.shape, self.numel = type.tensor_shape
        else:
            self.dtype = type
            self.shape, self.numel = single

    tl.core.tensor.__init__ = init


@functools.cache
def _described(shape):
    return tl.core.tuple([tl.core.constexpr(size) for size in shape]), tl.core.constexpr(math.prod(shape))


def _spread_by_numpy() -> None:
    """Operands of two shapes: NumPy spreads them itself. One operand of each axis has all elements of the result."""
    tensor, block = tl.core.tensor, tl.core.block_type
    promote, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value

    def spread(left, right):
        a, b = left.type, right.type
        if type(a) is not block:
            return (left if type(b) is not block else tensor(left.handle, block(a.scalar, b.shape.values))), right
        if type(b) is not block:
            return left, tensor(right.handle, block(b.scalar, a.shape.values))
        if len(a.shape.values) != len(b.shape.values):
            return broadcast(interpreter.interpreter_semantic, left, right)
        sizes = [max(pair) for pair in zip(a.shape.values, b.shape.values, strict=True)]
        if any(1 != size != whole for each in (a, b) for size, whole in zip(each.shape.values, sizes, strict=True)):
            return broadcast(interpreter.interpreter_semantic, left, right)
        return tensor(left.handle, block(a.scalar, sizes)), tensor(right.handle, block(b.scalar, sizes))

    def promote_and_spread(self, *operands, **flags):
        self.broadcast_impl_value = spread
        try:
            return promote(self, *operands, **flags)
        finally:
            del self.broadcast_impl_value

    TritonSemantic.binary_op_type_checking_impl = promote_and_spread


def _leave_overflow_out() -> None:
    """Sums and products were computed again in 64 bits, for an assertion that is made in debug mode alone."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _check_no_sizes() -> None:
    """A handle asked twice whether its elements fit its type. Those of a result do if they are no wider than before."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    operate, truth = builder.binary_op, np.dtype(bool)

    def init(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, attr or {}

    def binary_op(self, left, right, operation):
        kind = left.data.dtype
        if kind is not truth:
            data = operation(left.data, right.data)
            if data.dtype.itemsize <= kind.itemsize:
                return handle(data, left.dtype.scalar)
        return operate(self, left, right, operation)

    handle.__init__, builder.binary_op = init, binary_op


def _round_to_fp8() -> None:
    """To nearest even, and not past the largest number: it cuts bits off, and takes the smallest for others."""
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if target != tl.float8e4nv or source != tl.float32:
            return convert(data, source, target, mode)
        values = torch.from_numpy(data.astype(np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return values.view(torch.uint8).numpy()

    interpreter._convert_float = rounded
