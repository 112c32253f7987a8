"""Programmatic dependent launch: a kernel starts before its predecessor has ended.

A launch takes ``launch_options``. The kernel calls ``wait`` before it touches anything that its predecessor reads or
writes. Work that does not depend on the predecessor, such as loading a weight, goes before ``wait``.

A program that touches nothing may return without ``wait`` if another program of the kernel waits: the kernel then
cannot complete before its predecessor. ``wait`` lets the next kernel start only after the predecessor is complete. So
code before ``wait`` overlaps with one other kernel, its predecessor, and may read what older kernels wrote.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra import cuda

from rosebatch_kernels.common.device import Device


def launch_options(device: Device) -> dict[str, bool]:
    """Keyword arguments of a launch: the kernel's own ``PDL``, and Triton's ``launch_pdl``."""
    return {"PDL": True, "launch_pdl": True} if device.pdl else {"PDL": False}


@triton.jit
def wait():
    """Wait for the predecessor, then let the next kernel start."""
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()


@triton.jit
def wait_before_return(first, PDL: tl.constexpr):
    """For a program with nothing to do: only the ``first`` of a group waits, which keeps the kernel from completing."""
    if PDL:  # noqa: SIM102 (a compile-time condition)
        if first:
            wait()


# Bytes that ``prefetch`` brings.
LINE = 128


def lines_of(size: int) -> int:
    """Cache lines of so many bytes, rounded up to a power of two."""
    return 1 << (-(-size // LINE) - 1).bit_length()


@triton.jit
def prefetch(addresses):
    """Start to bring the 128 bytes at each address into the L2 cache, and return at once."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
