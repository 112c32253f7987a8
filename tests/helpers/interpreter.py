"""Triton's interpreter without what it does over and over, and with numbers of 8 bits rounded as a GPU rounds them.

It replaces the functions of ``triton.language`` by its own when a kernel is launched, and once more for each call
within the kernel, where all of them have been replaced already: looking for what is left took a third of a test's time.
Of what is left, a quarter went into the shapes of tensors: into describing, comparing and looking up the same few; and
a third into overflow that nobody hears of.
"""

import dataclasses
import functools
import inspect
import math

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up() -> None:
    """Kernels compute the same, sooner."""
    _patch_once()
    _describe_once()
    _broadcast_what_differs()
    _promote_what_differs()
    _leave_overflow_out()
    _round_to_fp8()


def _patch_once() -> None:
    """Leave the language alone where it is the interpreter's already."""
    patch = interpreter._patch_lang
    languages = {}

    def patch_unless_patched(fn):
        if fn not in languages:
            modules = [x for x in fn.__globals__.values() if inspect.ismodule(x)]
            languages[fn] = [x for x in (tl, tl.core) if x in modules]
        if not languages[fn] or any(tl.core.is_builtin(language.load) for language in languages[fn]):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_unless_patched


def _describe_once() -> None:
    """Tensors of one shape share its description, of one type that type, all the numpy types of their elements."""
    look_up = functools.cache(interpreter._get_np_dtype)
    pointer = np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda dtype: pointer if dtype.scalar.is_ptr() else look_up(dtype.scalar)

    def init(self, handle, type):
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = _described(tuple(type.shape.values) if type.is_block() else ())

    tl.core.tensor.__init__ = init

    block = tl.block_type
    share = functools.cache(lambda scalar, shape: block(scalar, list(shape)))

    def block_of(scalar, shape):
        # A pointer's type has no hash.
        return block(scalar, shape) if scalar.is_ptr() else share(scalar, tuple(shape))

    block.with_element_ty = lambda self, scalar: block_of(scalar, self.shape)
    interpreter.InterpreterBuilder.get_block_ty = lambda self, scalar, shape: block_of(scalar, shape)


@functools.cache
def _described(shape):
    return tl.core.tuple([tl.core.constexpr(size) for size in shape]), tl.core.constexpr(math.prod(shape))


def _broadcast_what_differs() -> None:
    """Operands of one shape are ready as they are."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unless_equal(self, left, right):
        a, b = left.type, right.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return left, right
        return broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast_unless_equal


def _promote_what_differs() -> None:
    """Operands of one type keep it, and so does a tensor next to a Python number of its kind."""
    tensor, dtype = tl.core.tensor, tl.core.dtype
    signed, floats = {"int8", "int16", "int32", "int64"}, {"fp16", "bf16", "fp32", "fp64"}
    kept = {int: signed | floats, float: floats}
    promote = TritonSemantic.binary_op_type_checking_impl

    def promote_unless_alike(self, left, right, *flags, **named):
        # Flags behind the two of pointers, and named ones, are those of divisions and others that convert.
        if len(flags) <= 2 and not named:
            a, b = type(left), type(right)
            if a is tensor and type(left.dtype) is dtype:
                if b is tensor and left.dtype is right.dtype:
                    return self.broadcast_impl_value(left, right)
                if b in kept and left.dtype.name in kept[b]:
                    return self.broadcast_impl_value(left, self._cast_to_computation_type(right, left.dtype))
            elif b is tensor and type(right.dtype) is dtype and a in kept and right.dtype.name in kept[a]:
                return self.broadcast_impl_value(self._cast_to_computation_type(left, right.dtype), right)
        return promote(self, left, right, *flags, **named)

    TritonSemantic.binary_op_type_checking_impl = promote_unless_alike


def _leave_overflow_out() -> None:
    """Sums and products were computed again in 64 bits, for an assertion that is made in debug mode alone."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _round_to_fp8() -> None:
    """To nearest even, and not past the largest number: it cuts bits off, and takes the smallest for others."""
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if target != tl.float8e4nv or source != tl.float32:
            return convert(data, source, target, mode)
        values = torch.from_numpy(data.astype(np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return values.view(torch.uint8).numpy()

    interpreter._convert_float = rounded
