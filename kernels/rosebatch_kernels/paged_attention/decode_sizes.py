"""Sizes of decode attention's programs, and what follows from them for a launch."""

import sys
from dataclasses import dataclass

import torch

from rosebatch_kernels.common.processors import processors
from rosebatch_kernels.common.splits import min_keys, num_splits
from rosebatch_kernels.common.tuned import Program, value_at

# Of a part of a multiprocessor; and of a thread, however many the compiler wants.
_PART_REGISTERS, _MAX_REGISTERS = 2**14, 255
_WARP_THREADS = 32


@dataclass(frozen=True)
class Tuned:
    """Sizes of a program, measured on an H100 80GB HBM3; those of splits are in ``rosebatch_kernels.common.splits``.

    Attributes:
        fp32: for fp32.
        one_head: for 16 bits and one query head to a K/V head.
        group: for 16 bits and several query heads to a K/V head.
        group_registers: of a thread at most, where sequences are undivided, by channels of a head, measured on an H200.
            The first with the fewest rounds of programs is taken, because the last round may be nearly empty. Where
            keys are shared, it is the last: their kernel leaves few multiprocessors. Heads of more than 128 channels
            would spill.
        one_head_rows: rows of that one head's matrix product, all alike; 1 does without one.
        max_early: sequences up to which a program requests its first keys before the kernel in front is complete.
            With more, the requests only compete with that kernel's.
    """

    fp32: Program
    one_head: Program
    group: Program
    group_registers: tuple[tuple[int, tuple[int | None, ...]], ...] = (
        (129, (None,)),
        (65, (184, 168)),
        (0, (168, 128)),
    )
    one_head_rows: int = 16
    max_early: int = 128


TUNED = Tuned(
    fp32=Program(keys=16, warps=4, stages=1),
    one_head=Program(keys=32, warps=1, stages=2),
    group=Program(keys=32, warps=2, stages=3),
)


def undivided_keys(batch: int, num_heads: int, kv_heads: int, dtype: torch.dtype) -> int:
    """Most keys of a sequence that are never divided among splits."""
    if num_splits(batch, kv_heads) == 1:
        return sys.maxsize
    tuned = program_of(num_heads // kv_heads, dtype)
    return (2 * tiles_of_split(batch, kv_heads, tuned) - 1) * tuned.keys


def form(
    batch: int, num_heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device, *, divided: bool
) -> tuple[bool, int, int | None]:
    """What the batch size changes in the compiled kernel: early requests, splits, and registers at most."""
    group, splits = num_heads // kv_heads, num_splits(batch, kv_heads) if divided else 1
    if splits > 1:
        return requests_early(batch), splits, program_of(group, dtype).registers
    return requests_early(batch), splits, max_registers(group, dtype, size, batch * kv_heads, device)


def requests_early(batch: int) -> bool:
    """Whether a program requests its first keys before the kernel in front is complete."""
    return batch <= TUNED.max_early


def tiles_of_split(batch: int, kv_heads: int, tuned: Program) -> int:
    """Tiles of keys that make a split worth its merge, at least."""
    return max(1, min_keys(batch, kv_heads, tuned.warps) // tuned.keys)


def max_registers(group: int, dtype: torch.dtype, size: int, programs: int | None, device: torch.device) -> int | None:
    """The most registers of a thread: of so many programs of undivided sequences, or of any that share keys (None)."""
    tuned = program_of(group, dtype)
    if tuned.registers is not None or group == 1 or dtype.itemsize == 4:
        return tuned.registers
    choices = value_at(TUNED.group_registers, size)
    if programs is None:
        return choices[-1]
    return min(choices, key=lambda each: -(-programs // (_at_once(each, tuned.warps) * processors(device))))


def _at_once(registers: int | None, warps: int) -> int:
    """Programs that a multiprocessor runs at a time: all registers of a warp lie in one of its four parts."""
    return 4 * (_PART_REGISTERS // (_WARP_THREADS * (registers or _MAX_REGISTERS))) // warps


def tile_rows(group: int, dtype: torch.dtype) -> int:
    """Rows of a program's matrix product, for ``group`` query heads to a K/V head; 1 for none."""
    if group == 1:
        return 1 if dtype.itemsize == 4 else TUNED.one_head_rows
    return max(16, 1 << (group - 1).bit_length())


def program_of(group: int, dtype: torch.dtype) -> Program:
    """Sizes of a program for ``group`` query heads to a K/V head."""
    if dtype.itemsize == 4:
        return TUNED.fp32
    return TUNED.one_head if group == 1 else TUNED.group
