"""The record of a GPU: what sizes and launches of kernels depend on."""

import os
from dataclasses import dataclass
from functools import cache

import torch

# Bytes of shared memory that one program may have, by architecture (source: CUDA C++ Programming Guide, table of
# technical specifications). One that is not listed counts as having the least of them. Turing (75) is not served: it
# has 64 KB, and no instructions for bf16.
SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
    120: 99 << 10,
}
# The first with e4m3.
ADA = 89
HOPPER = 90
# TMA copies matrices whose rows begin at multiples of so many bytes.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or Triton's interpreter.

    Attributes:
        arch: compute capability without its point: 90 for 9.0.
        processors: multiprocessors.
        shared_memory: bytes that one program may have.
        pdl: whether a kernel may start before its predecessor ends (programmatic dependent launch).
        tma: whether an engine copies whole tiles.
    """

    arch: int
    processors: int
    shared_memory: int
    pdl: bool
    tma: bool

    @property
    def has_e4m3(self) -> bool:
        """Whether the hardware converts and multiplies e4m3; Triton refuses it on others."""
        return self.arch >= ADA

    @classmethod
    def of_arch(cls, arch: int, processors: int) -> "Device":
        """A GPU of an architecture."""
        memory = SHARED_MEMORY.get(arch, min(SHARED_MEMORY.values()))
        return cls(arch, processors, memory, pdl=arch >= HOPPER, tma=arch >= HOPPER)


# The interpreter runs the sizes of a Hopper GPU. Few processors: tests have more tiles than programs.
INTERPRETER = Device(HOPPER, 4, SHARED_MEMORY[HOPPER], pdl=False, tma=True)


@cache
def device_of(device: torch.device) -> Device:
    """The record of a device; that of the interpreter for a CPU."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    return Device.of_arch(10 * found.major + found.minor, int(found.multi_processor_count))


def can_describe(columns: int, dtype: torch.dtype) -> bool:
    """Whether a descriptor of TMA can stand for contiguous rows of so many elements."""
    return columns * dtype.itemsize % _ALIGNMENT == 0
