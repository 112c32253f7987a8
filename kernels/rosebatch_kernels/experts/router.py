"""The router's choice in Triton: one program a token."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import logistic
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.whole_numbers import next_power_of_2


def route(
    logits: Tensor,
    k: int,
    *,
    normalize: bool,
    correction: Tensor | None = None,
    scale: float = 1.0,
    device: Device,
) -> tuple[Tensor, Tensor]:
    """See ``reference.route``; rows of ``logits`` may lie apart. Every id is valid, whatever the logits are."""
    assert logits.stride(-1) == 1, "the last axis is contiguous"
    tokens, experts = logits.shape
    ids = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    sizes = {"BLOCK": next_power_of_2(experts), "SLOTS": next_power_of_2(k)}
    _route[(tokens,)](
        logits=logits,
        ids=ids,
        weights=weights,
        correction=correction,
        stride=logits.stride(0),
        E=experts,
        K=k,
        NORMALIZE=normalize,
        SCALE=scale,
        num_warps=1 if experts <= 128 else 4,
        **sizes,
        **launch_options(device),
    )
    return ids, weights


@triton.jit
def _route(
    logits,
    ids,
    weights,
    correction,
    stride,
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    logit = tl.load(logits + row * stride + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
    left = logit
    if correction is not None:
        score = logistic(logit)
        left = score + tl.load(correction + expert, mask=expert < E, other=0.0)
    largest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - largest), 0)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    value = tl.full([SLOTS], float("-inf"), tl.float32)
    open_ids = expert < E
    for i in tl.static_range(K):
        top = tl.max(tl.where(open_ids, left, float("-inf")), 0)
        # Where a NaN equals nothing, the lowest id that is left.
        first = tl.min(tl.where(open_ids & (left == top), expert, BLOCK), 0)
        first = tl.where(first < E, first, tl.min(tl.where(open_ids, expert, BLOCK), 0))
        chosen = tl.where(slot == i, first, chosen)
        if correction is not None:
            value = tl.where(slot == i, tl.sum(tl.where(expert == first, score, 0.0), 0), value)
        else:
            value = tl.where(slot == i, top, value)
        open_ids = open_ids & (expert != first)
    if correction is not None:
        share = tl.where(slot < K, value, 0.0)
        share = share / (tl.sum(share, 0) + 1e-20 if NORMALIZE else 1.0) * SCALE
    else:
        share = tl.exp(value - largest)
        share = share / (tl.sum(share, 0) if NORMALIZE else total)
    tl.store(ids + row * K + slot, chosen, mask=slot < K)
    tl.store(weights + row * K + slot, share, mask=slot < K)
