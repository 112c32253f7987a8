"""Sizes of the attention kernels with a softmax, and what follows from them for a decode launch."""

import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.sizes import Program, Steps, table, value_at

# Registers of a part of a multiprocessor, and of a thread at most.
_PART_REGISTERS, _MAX_REGISTERS = 2**14, 255
_WARP_THREADS = 32
# Channels of a head.
_MAX_SIZE_OF_E4M3 = 128
# Above this, two tiles of keys nearly fill a multiprocessor's memory, and sums the registers of few warps.
_MAX_USUAL_SIZE = 256


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes of a decode program and of splits.

    Attributes:
        fp32: for fp32.
        one_head: for 16 bits and one query head to a K/V head.
        group: for 16 bits and several query heads to a K/V head.
        group_e4m3: the same with a cache of e4m3, see ``has_own_tiles``, measured on an H200.
        widest: for 16 bits and heads of more than 256 channels; not measured.
        group_registers: of a thread at most, where sequences are undivided, by channels of a head, measured on an H200.
            The first with the fewest rounds of programs is taken, because the last round may be nearly empty. Where
            keys are shared, it is the last: their kernel leaves few multiprocessors. Heads of more than 128 channels
            would spill.
        one_head_rows: rows of that one head's matrix product, all alike; 1 does without one.
        max_early: sequences up to which a program requests its first keys before its predecessor is complete. With
            more, the requests only compete with that kernel's.
        splits: splits of each sequence, by sequences times K/V heads. Few of these are divided to fill the GPU; more of
            them, for a long sequence not to outlast the others. Very many balance each other undivided.
        min_keys: keys that make a split worth its merge, by sequences times K/V heads times warps of a program. The
            number is larger where undivided sequences already fill the GPU.
        pieces: most pieces of a sequence's keys, whose sums are folded in order; 0 for the splits' own sums. The
            compiler takes 255 registers for them without a limit. The last of ``group_registers`` is the limit where
            it saves a round of programs, divided sequences included: not measured.
        piece_keys: of a piece, or a multiple for long sequences.
    """

    fp32: Program
    one_head: Program
    group: Program
    group_e4m3: Program
    widest: Program
    group_registers: tuple[tuple[int, tuple[int | None, ...]], ...] = (
        (129, (None,)),
        (65, (184, 168)),
        (0, (168, 128)),
    )
    one_head_rows: int = 16
    max_early: int = 128
    splits: Steps = ((2112, 1), (128, 4), (32, 8), (0, 16))
    min_keys: Steps = ((512, 512), (0, 128))
    pieces: int = 0
    piece_keys: int = 256


@dataclass(frozen=True)
class SharedSizes:
    """Sizes of a program that attends to shared keys; only ``narrow`` was measured.

    Attributes:
        fp32: for fp32, with a quarter of the queries.
        narrow: for 16 bits.
        large_heads: for 16 bits and heads of more than 128 channels.
        widest: for 16 bits and heads of more than 256 channels, with half of the queries.
    """

    fp32: Program
    narrow: Program
    large_heads: Program
    widest: Program


class HopperProgram(NamedTuple):
    """Sizes of a program of Hopper's own prefill kernel.

    Attributes:
        keys: of a tile: a thread's registers hold their scores, and the result.
        q_stages, k_stages, v_stages: tiles of Q for a head, of K and of V in shared memory.
    """

    keys: int
    q_stages: int
    k_stages: int
    v_stages: int


@dataclass(frozen=True)
class PrefillSizes:
    """Sizes of a prefill program.

    Attributes:
        fp32: for fp32.
        narrow: for 16-bit types.
        e4m3: for 16-bit types and a cache of e4m3, see ``has_own_tiles``, measured on an H200.
        shared: for 16-bit types where chunks share tiles.
        widest: for 16-bit types and heads of more than 256 channels; not measured.
        hopper: for 16-bit types on Hopper, by channels of a head; empty to leave its own kernel out. Measured on an
            H200.
        fuses: whether the compiler may round products and sums together. It does so where all rows see all keys of a
            tile, and not where some are masked: a row's bits then go by where its chunk begins. Hopper's own kernel
            masks products, and scales them alike.
    """

    fp32: Program
    narrow: Program
    e4m3: Program
    shared: Program
    widest: Program
    hopper: tuple[tuple[int, HopperProgram], ...] = ()
    fuses: bool = True


@dataclass(frozen=True)
class Sizes:
    """Sizes of decode, of the kernel of shared keys, and of prefill."""

    decode: DecodeSizes
    shared: SharedSizes
    prefill: PrefillSizes

    def invariant(self) -> "Sizes":
        """Pieces of keys go by the position alone, not by the batch as splits do; all tiles have one arithmetic."""
        return replace(self, decode=replace(self.decode, pieces=16), prefill=replace(self.prefill, fuses=False))


_DECODE = DecodeSizes(
    fp32=Program(keys=16, warps=4, stages=1),
    one_head=Program(keys=32, warps=1, stages=2),
    group=Program(keys=32, warps=2, stages=3),
    group_e4m3=Program(keys=64, warps=1, stages=2),
    widest=Program(keys=32, warps=4, stages=2),
)
SIZES = table(
    Sizes(
        decode=_DECODE,
        shared=SharedSizes(
            fp32=Program(keys=16, warps=4, stages=1),
            narrow=Program(keys=64, warps=8, stages=3),
            large_heads=Program(keys=32, warps=8, stages=3),
            widest=Program(keys=32, warps=8, stages=2),
        ),
        prefill=PrefillSizes(
            fp32=Program(keys=16, warps=8, stages=1),
            narrow=Program(keys=32, warps=4, stages=3),
            e4m3=Program(keys=128, warps=4, stages=2),
            shared=Program(keys=32, warps=4, stages=3),
            widest=Program(keys=32, warps=8, stages=2),
            hopper=(
                (129, HopperProgram(keys=64, q_stages=1, k_stages=3, v_stages=2)),
                (65, HopperProgram(keys=128, q_stages=2, k_stages=3, v_stages=2)),
                (0, HopperProgram(keys=128, q_stages=2, k_stages=4, v_stages=4)),
            ),
        ),
    ),
    sm_86=Sizes(
        decode=replace(_DECODE, widest=Program(keys=16, warps=4, stages=2)),
        shared=SharedSizes(
            fp32=Program(keys=16, warps=4, stages=1),
            narrow=Program(keys=32, warps=8, stages=2),
            large_heads=Program(keys=16, warps=8, stages=2),
            widest=Program(keys=16, warps=8, stages=1),
        ),
        prefill=PrefillSizes(
            fp32=Program(keys=16, warps=8, stages=1),
            narrow=Program(keys=32, warps=4, stages=2),
            e4m3=Program(keys=64, warps=4, stages=2),
            shared=Program(keys=32, warps=4, stages=2),
            widest=Program(keys=16, warps=8, stages=2),
        ),
    ),
)


def num_splits(batch: int, kv_heads: int, *, sizes: Sizes) -> int:
    """Parts of each sequence's keys. They follow from sizes that a CUDA graph fixes, never from lengths."""
    return value_at(sizes.decode.splits, batch * kv_heads)


def undivided_keys(
    batch: int, num_heads: int, kv_heads: int, size: int, dtype: torch.dtype, *, e4m3: bool = False, sizes: Sizes
) -> int:
    """Most keys of a sequence that are never divided among splits."""
    if num_splits(batch, kv_heads, sizes=sizes) == 1:
        return sys.maxsize
    program = program_of(num_heads // kv_heads, size, dtype, e4m3=e4m3, sizes=sizes)
    return (2 * tiles_of_split(batch, kv_heads, program, sizes=sizes) - 1) * program.keys


def form(
    batch: int,
    num_heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    device: Device,
    *,
    divided: bool,
    e4m3: bool = False,
    sizes: Sizes,
) -> tuple[bool, int, int | None]:
    """What the batch size changes in the compiled kernel: early requests, splits, and registers at most."""
    group, splits = num_heads // kv_heads, num_splits(batch, kv_heads, sizes=sizes) if divided else 1
    program = program_of(group, size, dtype, e4m3=e4m3, sizes=sizes)
    registers = program.registers
    if splits == 1 or sizes.decode.pieces:
        registers = max_registers(program, group, dtype, size, batch * kv_heads * splits, device, sizes=sizes)
    return requests_early(batch, sizes=sizes), splits, registers


def requests_early(batch: int, *, sizes: Sizes) -> bool:
    """Whether a program requests its first keys before its predecessor is complete."""
    return batch <= sizes.decode.max_early


def tiles_of_split(batch: int, kv_heads: int, program: Program, *, sizes: Sizes) -> int:
    """Tiles of keys that make a split worth its merge, at least."""
    return max(1, value_at(sizes.decode.min_keys, batch * kv_heads * program.warps) // program.keys)


def max_registers(
    program: Program,
    group: int,
    dtype: torch.dtype,
    size: int,
    programs: int | None,
    device: Device,
    *,
    sizes: Sizes,
) -> int | None:
    """The most registers of a thread: of so many programs that may run at once, or of any that share keys (None)."""
    if program.registers is not None or group == 1 or dtype.itemsize == 4:
        return program.registers
    choices = value_at(sizes.decode.group_registers, size)
    if programs is None:
        return choices[-1]
    if sizes.decode.pieces:
        choices = None, choices[-1]
    return min(choices, key=lambda each: -(-programs // (_at_once(each, program.warps) * device.processors)))


def _at_once(registers: int | None, warps: int) -> int:
    """Programs that a multiprocessor runs at a time: all registers of a warp lie in one of its four parts."""
    return 4 * (_PART_REGISTERS // (_WARP_THREADS * (registers or _MAX_REGISTERS))) // warps


def tile_rows(group: int, dtype: torch.dtype, *, sizes: Sizes) -> int:
    """Rows of a program's matrix product, for ``group`` query heads to a K/V head; 1 for none."""
    if group == 1:
        return 1 if dtype.itemsize == 4 else sizes.decode.one_head_rows
    return max(16, 1 << (group - 1).bit_length())


def is_widest(size: int) -> bool:
    """Whether programs for heads of so many channels have sizes of their own."""
    return size > _MAX_USUAL_SIZE


def has_own_tiles(size: int, *, e4m3: bool) -> bool:
    """Whether programs over a cache of e4m3 have sizes of their own: heads of more channels nearly fill its memory."""
    return e4m3 and size <= _MAX_SIZE_OF_E4M3


def adds_in_order(dtype: torch.dtype, *, e4m3: bool) -> bool:
    """Whether pieces of keys have the same sums in tiles of any number of rows: 16 bits, as they are stored."""
    return dtype.itemsize == 2 and not e4m3


def program_of(group: int, size: int, dtype: torch.dtype, *, e4m3: bool, sizes: Sizes) -> Program:
    """Sizes of a program for ``group`` query heads to a K/V head, of ``size`` channels, and a cache of e4m3 or not."""
    if dtype.itemsize == 4:
        return sizes.decode.fp32
    if is_widest(size):
        return sizes.decode.widest
    if group == 1:
        return sizes.decode.one_head
    return sizes.decode.group_e4m3 if has_own_tiles(size, e4m3=e4m3) else sizes.decode.group


def prefill_program_of(size: int, dtype: torch.dtype, *, e4m3: bool, shares: bool = False, sizes: Sizes) -> Program:
    """Sizes of a prefill program, for heads of ``size`` channels; ``shares``: of tiles that chunks share."""
    if dtype.itemsize == 4:
        return sizes.prefill.fp32
    if is_widest(size):
        return sizes.prefill.widest
    if shares:
        return sizes.prefill.shared
    return sizes.prefill.e4m3 if has_own_tiles(size, e4m3=e4m3) else sizes.prefill.narrow
