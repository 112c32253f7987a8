"""Triton's interpreter without what it does over and over, and with numbers of 8 bits rounded as a GPU rounds them.

It replaces the functions of ``triton.language`` by its own when a kernel is launched, and once more for each call
within the kernel, where all of them have been replaced already: looking for what is left took a third of a test's time.
Of what is left, a quarter went into the shapes of tensors: into describing, comparing and looking up the same few; and
a third into overflow that nobody hears of. Then a third went into calls around calls, into looking for constants among
what has none, and into blocks full of one number. Then a fifth went into replacing the same functions at each launch,
and into making the same numbers and types.
"""

import dataclasses
import functools
import inspect
import math

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up() -> None:
    """Kernels compute the same, sooner."""
    _patch_once()
    _call_at_once()
    _unwrap_constants_alone()
    _describe_once()
    _make_integers_once()
    _broadcast_what_differs()
    _promote_what_differs()
    _leave_overflow_out()
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
    patch = interpreter._patch_lang
    languages = {}

    def patch_for_good(fn):
        if fn not in languages:
            modules = [x for x in fn.__globals__.values() if inspect.ismodule(x)]
            languages[fn] = [x for x in (tl, tl.core) if x in modules]
        if not languages[fn] or any(tl.core.is_builtin(language.load) for language in languages[fn]):
            patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_for_good


def _call_at_once() -> None:
    """A builtin is called without the wrapper that only asks for its semantic."""
    asks = tl.core.builtin(lambda: None).__code__

    def patch(owner, name, member, builder, scope):
        call = member.__wrapped__ if getattr(member, "__code__", None) is asks else member

        def call_with_semantic(*args, _semantic=None, **options):
            return call(*args, **options, _semantic=interpreter.interpreter_semantic)

        scope.set_attr(owner, name, call_with_semantic)

    interpreter._patch_attr = patch


def _unwrap_constants_alone() -> None:
    """Numbers and tensors are no constants, and hold none."""
    unwrap, constexpr = tl.core._unwrap_if_constexpr, tl.core.constexpr
    plain = {int, float, bool, str, type(None), tl.core.tensor, tl.core.dtype}

    def unwrap_unless_plain(value):
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constexpr else unwrap(value)

    tl.core._unwrap_if_constexpr = unwrap_unless_plain


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


def _make_integers_once() -> None:
    """A kernel computes with the same few numbers, and no operation writes into its operands."""
    make, known = TritonSemantic._cast_to_computation_type, {}

    def make_unless_made(self, value, dtype):
        if type(value) is not int:
            return value if type(value) is tl.core.tensor and value.dtype is dtype else make(self, value, dtype)
        key = value, dtype.name
        if key not in known:
            known[key] = make(self, value, dtype)
            known[key].handle.data.flags.writeable = False
        return known[key]

    TritonSemantic._cast_to_computation_type = make_unless_made


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
    """Operands of one type keep it, and so do a tensor next to a Python number of its kind, and a pointer."""
    tensor, dtype, block, pointer = tl.core.tensor, tl.core.dtype, tl.core.block_type, tl.core.pointer_type
    signed, floats = {"int8", "int16", "int32", "int64"}, {"fp16", "bf16", "fp32", "fp64"}
    kept = {int: signed | floats, float: floats}
    promote = TritonSemantic.binary_op_type_checking_impl

    def spread(self, left, right):
        """NumPy spreads operands itself. The result has all elements of a block: one operand of each axis has them."""
        a, b = left.type, right.type
        if type(a) is not block:
            return (left if type(b) is not block else tensor(left.handle, block(a.scalar, b.shape.values))), right
        if type(b) is not block:
            return left, tensor(right.handle, block(b.scalar, a.shape.values))
        if a is b or a.shape.values == b.shape.values:
            return left, right
        if len(a.shape.values) != len(b.shape.values):
            return self.broadcast_impl_value(left, right)
        sizes = [max(pair) for pair in zip(a.shape.values, b.shape.values, strict=True)]
        if any(1 != size != whole for each in (a, b) for size, whole in zip(each.shape.values, sizes, strict=True)):
            return self.broadcast_impl_value(left, right)
        return tensor(left.handle, block(a.scalar, sizes)), tensor(right.handle, block(b.scalar, sizes))

    def promote_unless_alike(self, left, right, *flags, **named):
        # Flags behind the two of pointers, and named ones, are those of divisions and others that convert.
        if len(flags) <= 2 and not named:
            a, b = type(left), type(right)
            if a is tensor and type(left.dtype) is pointer and flags and b is tensor and right.dtype.is_int():
                return spread(self, left, right)
            if a is tensor and type(left.dtype) is dtype:
                if b is tensor and left.dtype is right.dtype:
                    return spread(self, left, right)
                if b in kept and left.dtype.name in kept[b]:
                    return spread(self, left, self._cast_to_computation_type(right, left.dtype))
            elif b is tensor and type(right.dtype) is dtype and a in kept and right.dtype.name in kept[a]:
                return spread(self, self._cast_to_computation_type(left, right.dtype), right)
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
