"""The kernels of paged attention, and the workspace of decode kernels, which other kinds share."""

import sys
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch.ops.ops import Heads
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.shared_keys import Pieces
from rosebatch_kernels.paged_attention import torch_attention

__all__ = ["PagedAttentionKernels", "paged_attention_kernels", "torch_attention", "with_workspaces"]


@dataclass(frozen=True, slots=True)
class PagedAttentionKernels:
    """Paged attention in the Triton runner; each kernel documents shapes and dtypes.

    Attributes:
        prefill_shared: if chunks share tiles.
        undivided_keys: maximum keys of a row, by batch size, that ``decode`` never divides.
        decode_form: what batch size, and whether rows are divided, change in the compiled ``decode``.
        shares_keys: whether rows of ``decode`` may share keys.
        pieces: how shared keys are cut then; None where they may be cut anywhere.
    """

    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    prefill_shared: Callable[..., Tensor]
    undivided_keys: Callable[[int], int]
    decode_form: Callable[..., Hashable]
    shares_keys: bool
    pieces: Pieces | None


def paged_attention_kernels(
    max_num_seqs: int,
    heads: Collection[Heads],
    stored: Collection[bool],
    switches: Switches,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedAttentionKernels:
    """The kernels for layers with these heads, with the memory that they keep between calls.

    Args:
        max_num_seqs: most sequences of a step.
        heads: of the layers.
        stored: whether K and V are stored as e4m3: both where layers differ.
        switches: of the run.
        dtype: of K and V.
        device: of the run.
    """
    from rosebatch_kernels.paged_attention import decode, prefill, prefill_shared
    from rosebatch_kernels.paged_attention import sizes as module

    record = device_of(device)
    sizes = module.SIZES.of(record)
    if switches.batch_invariant:
        sizes = sizes.invariant()
    if not switches.hopper_prefill:
        sizes = replace(sizes, prefill=replace(sizes.prefill, hopper=()))

    in_order = all(module.adds_in_order(dtype, e4m3=e4m3) for e4m3 in stored)
    shares = switches.shared_prefix_attention and (in_order or not switches.batch_invariant)

    def undivided_keys(batch: int) -> int:
        if not switches.split_keys:
            return sys.maxsize
        return min(
            module.undivided_keys(batch, *each, dtype, e4m3=e4m3, sizes=sizes) for each, e4m3 in product(heads, stored)
        )

    def decode_form(batch: int, *, divided: bool) -> Hashable:
        divides = divided and switches.split_keys
        return tuple(
            module.form(batch, *each, dtype, record, divided=divides, e4m3=e4m3, sizes=sizes)
            for each, e4m3 in sorted(product(heads, stored))
        )

    return PagedAttentionKernels(
        decode=with_workspaces(
            partial(decode.decode, sizes=sizes, device=record),
            max_num_seqs,
            heads,
            partial(module.num_splits, sizes=sizes),
            switches,
            device,
            shares_keys=shares,
            pieces=sizes.decode.pieces,
        ),
        prefill=partial(prefill.prefill, sizes=sizes, device=record),
        prefill_shared=partial(prefill_shared.prefill_shared, sizes=sizes, device=record),
        undivided_keys=undivided_keys,
        decode_form=decode_form,
        shares_keys=shares,
        pieces=Pieces(sizes.decode.piece_keys, sizes.decode.pieces) if sizes.decode.pieces else None,
    )


def with_workspaces(
    kernel: Callable[..., Tensor],
    max_num_seqs: int,
    heads: Collection[Heads],
    num_splits: Callable[[int, int], int],
    switches: Switches,
    device: torch.device,
    *,
    shares_keys: bool,
    pieces: int = 0,
) -> Callable[..., Tensor]:
    """A decode kernel with one workspace for all layers with the same heads: layers run one after the other."""
    from rosebatch_kernels.common.splits import DecodeWorkspace

    spaces = {
        each: DecodeWorkspace(
            max_num_seqs,
            *each,
            device,
            num_splits if switches.split_keys else None,
            shares=shares_keys,
            pieces=pieces,
        )
        for each in heads
    }

    def run(qkv: Tensor, cache: Tensor, *args: Any, num_heads: int, **options: Any) -> Tensor:
        workspace = spaces[num_heads, cache.shape[2], cache.shape[4]]
        options = {"append": switches.fused_kv_append, **options}
        return kernel(qkv, cache, *args, workspace=workspace, num_heads=num_heads, **options)

    return run
