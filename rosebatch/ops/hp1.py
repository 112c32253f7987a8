"""The kernels of HP1 attention."""

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch.ops.ops import Heads
from rosebatch.ops.paged_attention import with_workspaces
from rosebatch_kernels.common.chunks import TILE_ROWS
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.hp1 import torch_attention
from rosebatch_kernels.hp1.gate import Gate, mean_taps

__all__ = ["TILE_ROWS", "Gate", "HP1Kernels", "hp1_kernels", "mean_taps", "torch_attention"]


@dataclass(frozen=True, slots=True)
class HP1Kernels:
    """HP1 attention in the Triton runner; each kernel documents shapes and dtypes.

    Attributes:
        decode_form: what the batch size changes in the compiled ``decode``.
        shares_keys: whether rows of ``decode`` may share keys: they are then added up in an order of their own.
    """

    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    decode_form: Callable[[int], Hashable]
    shares_keys: bool


def hp1_kernels(max_num_seqs: int, heads: Collection[Heads], switches: Switches, device: torch.device) -> HP1Kernels:
    """The kernels for layers with these heads, see ``paged_attention_kernels``."""
    from rosebatch_kernels.hp1 import decode, prefill
    from rosebatch_kernels.hp1.sizes import SIZES, num_splits

    record = device_of(device)
    sizes = SIZES.of(record).invariant() if switches.batch_invariant else SIZES.of(record)
    kernel = partial(decode.decode, sparse=switches.sparse_values, sizes=sizes, device=record)
    splits = partial(num_splits, sizes=sizes)
    shares = switches.shared_prefix_attention and not switches.batch_invariant
    return HP1Kernels(
        decode=with_workspaces(kernel, max_num_seqs, heads, splits, switches, device, shares_keys=shares),
        prefill=partial(prefill.prefill, sizes=sizes, device=record),
        decode_form=lambda batch: tuple(splits(batch, kv_heads) for _, kv_heads, _ in sorted(heads)),
        shares_keys=shares,
    )
