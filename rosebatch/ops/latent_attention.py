"""The kernels of latent attention."""

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch_kernels.common.device import HOPPER, INTERPRETER, device_of
from rosebatch_kernels.latent_attention import torch_attention
from rosebatch_kernels.norm.reference import rms_norm
from rosebatch_kernels.qkv.torch_heads import rope

__all__ = ["LatentKernels", "latent_kernels", "rms_norm", "rope", "torch_attention"]


@dataclass(frozen=True, slots=True)
class LatentKernels:
    """Latent attention in the Triton runner; each kernel documents shapes and dtypes.

    Attributes:
        expands: whether prompts have ``attend_fresh`` and ``attend_prefix_``, and not ``prefill``.
        decode_form: what the batch size changes in the compiled ``decode``.
    """

    expands: bool
    attend_fresh: Callable[..., tuple[Tensor, Tensor]]
    attend_prefix_: Callable[..., None]
    prepare: Callable[..., None]
    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    decode_form: Callable[[int], Hashable]


def latent_kernels(
    heads: Collection[int], switches: Switches, dtype: torch.dtype, device: torch.device
) -> LatentKernels:
    """The kernels, which a run on a CPU need not load.

    Args:
        heads: of the layers.
        switches, dtype, device: of the run.
    """
    from rosebatch_kernels.latent_attention import expanded, kernel
    from rosebatch_kernels.latent_attention.sizes import num_splits

    record = device_of(device)
    sizes = kernel.SIZES.of(record)
    if switches.batch_invariant:
        sizes = sizes.invariant()
    elif not switches.split_keys:
        sizes = sizes.undivided()
    # Tiles of fp32 have room in the interpreter alone.
    has_room = record.arch == HOPPER and (dtype.itemsize == 2 or record == INTERPRETER)
    return LatentKernels(
        # Bits of a chunk depend on where it begins then.
        expands=has_room and not switches.batch_invariant,
        attend_fresh=partial(expanded.attend_fresh, sizes=sizes, device=record),
        attend_prefix_=partial(expanded.attend_prefix_, sizes=sizes, device=record),
        prepare=partial(kernel.prepare, sizes=sizes, device=record),
        decode=partial(kernel.decode, sizes=sizes, device=record),
        prefill=partial(kernel.prefill, sizes=sizes, device=record),
        decode_form=lambda batch: tuple(num_splits(batch, each, dtype, sizes=sizes) for each in sorted(heads)),
    )
