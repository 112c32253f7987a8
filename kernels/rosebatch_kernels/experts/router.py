"""The router's choice in Triton: one program a token."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.whole_numbers import next_power_of_2
from rosebatch_kernels.experts.reference import LARGEST, Choice


def route(
    logits: Tensor, k: int, *, normalize: bool, choice: Choice = LARGEST, device: Device
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
        bias=choice.bias,
        factors=choice.factors,
        scale=choice.scale,
        stride=logits.stride(0),
        E=experts,
        K=k,
        NORMALIZE=normalize,
        SIGMOID=choice.sigmoid,
        GROUPS=choice.groups,
        KEPT=choice.kept,
        SUM_EPS=choice.sum_eps,
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
    bias,
    factors,
    scale,
    stride,
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SUM_EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, 0)
    total = tl.sum(tl.exp(values - largest), 0)
    if SIGMOID:
        values = 1 / (1 + tl.exp(-values))
    left = values
    if bias is not None:
        left += tl.load(bias + expert, mask=expert < E, other=0.0)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    value = tl.full([SLOTS], float("-inf"), tl.float32)
    open_ids = expert < E
    if GROUPS > 1:
        open_ids = open_ids & _in_kept_groups(left, expert, E // GROUPS, GROUPS, KEPT, SIGMOID, BLOCK)
    for i in tl.static_range(K):
        first, top = _first_largest(left, open_ids, expert, BLOCK)
        chosen = tl.where(slot == i, first, chosen)
        if bias is not None:
            top = tl.max(tl.where(expert == first, values, float("-inf")), 0)
        value = tl.where(slot == i, top, value)
        open_ids = open_ids & (expert != first)
    if SIGMOID:
        share = tl.where(slot < K, value, 0.0)
        if NORMALIZE:
            share = share / (tl.sum(share, 0) + SUM_EPS)
    else:
        share = tl.exp(value - largest)
        share = share / (tl.sum(share, 0) if NORMALIZE else total)
    if factors is not None:
        share *= tl.load(factors + chosen, mask=slot < K, other=0.0)
    tl.store(ids + row * K + slot, chosen, mask=slot < K)
    tl.store(weights + row * K + slot, share * scale, mask=slot < K)


@triton.jit
def _first_largest(left, open_ids, expert, BLOCK: tl.constexpr):
    """The largest number of ``left [BLOCK]`` whose ``open_ids`` is set, after its id; of equal ones, the lowest."""
    top = tl.max(tl.where(open_ids, left, float("-inf")), 0)
    # Where a NaN equals nothing, the lowest id that is left.
    first = tl.min(tl.where(open_ids & (left == top), expert, BLOCK), 0)
    return tl.where(first < BLOCK, first, tl.min(tl.where(open_ids, expert, BLOCK), 0)), top


@triton.jit
def _in_kept_groups(
    left, expert, size, GROUPS: tl.constexpr, KEPT: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr
):
    """Whether each expert is in one of the groups of ``size`` neighbours that are kept."""
    group = expert // size
    # Each group's score, at the place of its first expert.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        own = group == g
        first, score = _first_largest(left, own, expert, BLOCK)
        if SIGMOID:
            score += tl.max(tl.where(own & (expert != first), left, float("-inf")), 0)
        best = tl.where(expert == g * size, score, best)
    open_groups = (expert % size == 0) & (group < GROUPS)
    kept = expert < 0
    for _ in tl.static_range(KEPT):
        first, _ = _first_largest(best, open_groups, expert, BLOCK)
        kept = kept | (group == first // size)
        open_groups = open_groups & (expert != first)
    return kept
