"""What a kernel touches in Triton's interpreter lies in a tensor that it was given: compute-sanitizer without a GPU.

The interpreter reads and writes wherever it is told to. What lies behind a tensor is mostly another one, so that a
kernel which goes too far passes by luck, or fails in another test. Masked elements may have any address.
"""

from bisect import bisect_right

import numpy as np
import torch
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


def check_addresses() -> None:
    """Loads, stores and atomic operations outside of all tensors of their launch raise MemoryError."""
    pieces = _Pieces()
    _note_tensors(pieces)
    _check_before("create_masked_load", pieces, pointer=0, mask=1)
    _check_before("create_masked_store", pieces, pointer=0, mask=2)
    _check_before("create_atomic_rmw", pieces, pointer=1, mask=3)
    _check_before("create_atomic_cas", pieces, pointer=0, mask=None)


class _Pieces:
    """The memory of a launch's tensors, where each piece starts and ends."""

    def __init__(self) -> None:
        self.starts = []
        self.ends = []

    def set(self, tensors) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        pieces = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages})
        self.starts, self.ends = [start for start, _ in pieces], [end for _, end in pieces]

    def one_holds(self, pointers, size) -> bool:
        """Whether the elements, and all between them, lie in one piece."""
        first = int(pointers.min())
        piece = bisect_right(self.starts, first) - 1
        return piece >= 0 and int(pointers.max()) + size <= self.ends[piece]


def _note_tensors(pieces: _Pieces) -> None:
    convert = interpreter.GridExecutor._init_args_hst

    def convert_and_note(self, args, kwargs):
        converted = convert(self, args, kwargs)
        pieces.set(_tensors((converted[0], converted[1].values())))
        return converted

    interpreter.GridExecutor._init_args_hst = convert_and_note


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, TensorDescriptor):
            yield value.base
        elif not isinstance(value, str) and np.iterable(value):
            yield from _tensors(value)


def _check_before(name, pieces, *, pointer, mask) -> None:
    operation = getattr(interpreter.InterpreterBuilder, name)

    def checked(self, *args, **options):
        pointers = args[pointer].data
        size = args[pointer].get_element_ty().primitive_bitwidth // 8
        # Those that are masked are mostly inside as well, and picking out the others takes longer than all the rest.
        if not pieces.one_holds(pointers, size):
            touched = pointers if mask is None else pointers[args[mask].data.astype(bool)]
            # Atomic operations may go to several tensors at once: signals to several ranks.
            groups = touched.reshape(-1, 1) if name == "create_atomic_rmw" else [touched]
            if touched.size and not all(pieces.one_holds(group, size) for group in groups):
                raise MemoryError(f"{name} outside of the launch's tensors")
        return operation(self, *args, **options)

    setattr(interpreter.InterpreterBuilder, name, checked)
