"""Calls of Triton's language as the few operations of the interpreter that each comes down to.

The language works as in a compiler: it looks at types, shapes and constants, promotes and spreads operands, and asks a
builder for operations. It knows no values: for operands of the same types and the same constants it asks for the same
ones. So such a call is recorded, and others repeat its operations: an addition takes 3 us in place of 7.
"""

import functools
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_Key = list[Any]
_TENSOR, _CONSTEXPR = tl.core.tensor, tl.core.constexpr
_TYPES = {tl.core.dtype, tl.core.pointer_type, tl.core.block_type}
_SEQUENCES = {list, tuple, tl.core.tuple}
_HASHED = {int, bool, str, type(None)}
# Without a tensor among their operands they make the same each time.
_CONSTANT = {"create_splat", "create_make_range"}


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, without ``_semantic``: a builtin of the language."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    seen: set[tuple[Any, ...]] = set()
    known: dict[tuple[Any, ...], Callable[..., Any] | None] = {}

    def call(*args: Any, _semantic: Any = None, **options: Any) -> Any:
        key: _Key = []
        handles: list[TensorHandle] = []
        # What a builtin calls is recorded with it.
        if semantic.builder is builder and _describe((*args, *options.values()) if options else args, key, handles):
            described = (*key, *options)
            if replay := known.get(described):
                return replay(*handles)
            # To record takes six times a call's time: what comes once, such as the numbers of a long loop, is not.
            if described in seen and described not in known:
                known[described], result = _record(function, args, options)
                return result
            seen.add(described)
        return function(*args, **options, _semantic=semantic)

    return call


def _describe(values: Iterable[Any], key: _Key, handles: list[TensorHandle]) -> bool:
    """Add all that the language knows of values, and the tensors among them; whether it is known."""
    for value in values:
        kind = type(value)
        if kind is _TENSOR:
            key.append(value.type.name)
            handles.append(value.handle)
            continue
        if kind is _CONSTEXPR:
            value = value.value
            kind = type(value)
        if kind in _HASHED:
            key += (kind, value)
        elif kind is float:
            # Zero has a sign, and NaN is not equal to itself.
            key += (kind, value if value and value == value else repr(value))
        elif kind in _TYPES:
            key += (kind, value.name)
        elif kind in _SEQUENCES:
            key += (kind, len(value))
            if not _describe(value, key, handles):
                return False
        elif kind is slice:
            key.append(kind)
            if not _describe((value.start, value.stop, value.step), key, handles):
                return False
        else:
            return False
    return True


class _Recorder:
    """A builder that notes which operations it is asked for.

    Attributes:
        made: the operands' handles, and those that operations made.
        steps: name and operands of each operation: a place in ``made``, or a constant.
        is_whole: whether nothing else was done.
    """

    def __init__(self, operands: list[TensorHandle]) -> None:
        self.made: list[Any] = operands
        self.steps: list[tuple[str, list[tuple[int | None, Any]]]] = []
        self.is_whole = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(interpreter.interpreter_builder, name)
        if not callable(member) or name.startswith("get_"):
            return member

        def noted(*args: Any) -> Any:
            result = member(*args)
            operands = [(self.place(each), each) for each in args]
            if name not in _CONSTANT or any(place is not None for place, _ in operands):
                self.is_whole &= result is None or type(result) is TensorHandle
                self.steps.append((name, operands))
                self.made.append(result)
            return result

        return noted

    def place(self, value: Any) -> int | None:
        """Where a handle was made; None for a constant."""
        if type(value) is TensorHandle:
            for place, made in enumerate(self.made):
                if made is value:
                    return place
            # Calls share it: no operation may write into it.
            value.data.flags.writeable = False
        elif type(value) in _SEQUENCES:
            self.is_whole &= not any(type(each) is TensorHandle for each in value)
        return None


def _record(function: Callable[..., Any], args: Any, options: dict[str, Any]) -> tuple[Callable[..., Any] | None, Any]:
    """What a function returns; before it what repeats the call, None where it is more than operations."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    operands: list[TensorHandle] = []

    def told_apart(value: Any) -> Any:
        """One tensor may be two of the operands, and other calls have others."""
        if type(value) in _SEQUENCES:
            return type(value)([told_apart(each) for each in value])
        if type(value) is not _TENSOR:
            return value
        operands.append(TensorHandle(value.handle.data, value.handle.dtype))
        return _TENSOR(operands[-1], value.type)

    args = [told_apart(each) for each in args]
    options = {name: told_apart(each) for name, each in options.items()}
    count, recorder = len(operands), _Recorder(operands)
    semantic.builder = recorder
    try:
        result = function(*args, **options, _semantic=semantic)
    finally:
        semantic.builder = builder
    if not recorder.is_whole or type(result) not in (_TENSOR, type(None)):
        return None, result
    return _replay(count, recorder, result), result


def _replay(count: int, recorder: _Recorder, result: Any) -> Callable[..., Any]:
    """A function of so many handles: the operations, one behind the other, without a loop over them."""
    names: dict[str, Any] = {"builder": interpreter.interpreter_builder, "tensor": _TENSOR}

    def name(place: int | None, value: Any) -> str:
        if place is not None:
            return f"made{place}"
        names[constant := f"constant{len(names)}"] = value
        return constant

    lines = [
        f"made{number} = builder.{operation}({', '.join(name(*each) for each in operands)})"
        for number, (operation, operands) in enumerate(recorder.steps, count)
    ]
    if result is not None:
        made, kind = name(recorder.place(result.handle), result.handle), name(None, result.type)
        lines.append(f"return tensor({made}, {kind})")
    parameters = ", ".join(f"made{number}" for number in range(count))
    exec(_compiled(f"def replay({parameters}):\n " + "\n ".join(lines or ["pass"])), names)
    replay: Callable[..., Any] = names["replay"]
    return replay


@functools.cache
def _compiled(source: str) -> CodeType:
    """Calls that differ in their constants alone are of one source."""
    return compile(source, "recorded call", "exec")
