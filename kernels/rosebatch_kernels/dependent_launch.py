"""Programmatic dependent launch: a kernel starts while the one before it ends, and fetches what does not depend on it.

A program of a kernel launched with ``launch_options()`` calls ``wait`` before it touches anything that the kernel in
front reads or writes. One that touches nothing may return without, as long as some program waits: so the kernel is
never complete before the one in front. ``wait`` lets the next kernel start only once the kernel in front is complete.
So what comes before ``wait`` runs beside one other kernel, the immediate predecessor, and may read whatever was written
earlier than by that one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@cache
def launch_options() -> dict[str, bool]:
    """Keyword arguments of a launch: the kernel's own ``PDL``, and Triton's ``launch_pdl``. Hopper and later."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    known = not interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return {"PDL": True, "launch_pdl": True} if known else {"PDL": False}


@triton.jit
def wait():
    """Wait for the kernel before this one, then let the next one start."""
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()


@triton.jit
def prefetch(addresses):
    """Bring the 128 bytes at each address into the second-level cache; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
