"""The kernels of any model that only the runner of a GPU calls, as switches choose them at load."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.sizes import sized, unmeasured


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """The kernels that only the Triton runner calls; each of them documents shapes and dtypes.

    Attributes:
        tile_rows: maximum query tokens of a tile of packed steps.
        sample_rows: from logits to tokens inside a graph; None to sample by the operators of ``Ops``, outside.
    """

    tile_rows: int
    sample_rows: Callable[..., Tensor] | None
    adjust: Callable[..., Tensor]
    mask_: Callable[[Tensor, Tensor, Tensor], None]
    count_: Callable[[Tensor, Tensor, Tensor | None], None]
    logprob_rows: Callable[[Tensor, Tensor, int, int], Tensor]
    advance: Callable[..., None]
    propose: Callable[..., None]
    verify: Callable[..., None]


def device_ops(switches: Switches) -> DeviceOps:
    """The kernels of a run."""
    from rosebatch_kernels.drafts import kernel as drafts
    from rosebatch_kernels.feedback import kernel as feedback
    from rosebatch_kernels.logits import kernel as logits_kernel
    from rosebatch_kernels.logprobs import kernel as logprobs_kernel
    from rosebatch_kernels.paged_attention.prefill import TILE_ROWS
    from rosebatch_kernels.sampling import kernel as sampling_kernel

    device = device_of(torch.device("cuda"))
    return DeviceOps(
        tile_rows=TILE_ROWS,
        sample_rows=sized(sampling_kernel, "sample_rows", device) if switches.fused_sampler else None,
        adjust=sized(logits_kernel, "adjust", device),
        mask_=sized(logits_kernel, "mask_", device),
        count_=sized(logits_kernel, "count_", device),
        logprob_rows=sized(logprobs_kernel, "logprob_rows", device),
        advance=partial(feedback.advance, device=device),
        propose=partial(drafts.propose, device=device),
        verify=partial(drafts.verify, device=device),
    )


def keep_products_whole() -> None:
    """Let cuBLAS split no product's depth: leave it no memory for parts. Its first product in this process reads it."""
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.backends.cuda.preferred_blas_library("cublaslt")


def has_e4m3(device: torch.device) -> bool:
    """Whether the hardware converts e4m3, which kernels read; a CPU's operators need no such hardware."""
    return device_of(device).has_e4m3


def unmeasured_sizes(device: torch.device) -> str | None:
    """A sentence about a GPU on which the kernels' sizes were not measured; None for others and for a CPU."""
    return unmeasured(device_of(device))
