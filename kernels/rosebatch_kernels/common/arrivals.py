"""Programs of one launch that wait for each other's results: the last to arrive goes on."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def arrive(counter):
    """Count this program at ``counter`` and return how many arrived before it. Their stores are visible from here on.

    The last one must set the counter back to 0.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
