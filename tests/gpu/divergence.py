"""The rule of the first divergence: if two implementations' greedy tokens differ, the choice must have been close.

Two implementations round differently, so their tokens may differ at some position. After that the sequences have
nothing in common; before it they are the same computation. At that position each side's token must be among the few
likeliest of both sides, and below the likeliest by no more than rounding explains. The number of sequences that
diverge must not exceed what rounding explains either.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine

# Tokens that count as the likeliest few.
FEW = 5
# How far a logit may be below the largest, in roundings of a logit: the dtype's eps times the largest magnitude. Three
# layers of rounding and the last one, on both sides, made up to 5 when this was measured.
ROUNDINGS = 16


@dataclass(frozen=True)
class Divergence:
    """Where a sequence's tokens first differ; ``position`` counts generated tokens from 0."""

    sequence: int
    position: int
    ours: int
    theirs: int


def first_divergences(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[Divergence]:
    """The first divergence of each sequence whose tokens differ."""
    found = []
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert len(mine) == len(other), f"sequence {index} has {len(mine)} tokens instead of {len(other)}"
        parted = [i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b]
        if parted:
            found.append(Divergence(index, parted[0], mine[parted[0]], other[parted[0]]))
    return found


def objection(divergence: Divergence, our_logits: Tensor, their_logits: Tensor, dtype: torch.dtype) -> str:
    """Why a divergence is not a close call; empty if it is one. Logits ``[V]`` in fp32 follow the common prefix."""
    for side, logits in (("rosebatch", our_logits), ("transformers", their_logits)):
        if not logits.isfinite().all():
            return f"{side} has logits that are not finite"
        allowed = ROUNDINGS * torch.finfo(dtype).eps * logits.abs().max().item()
        for owner, token in (("rosebatch", divergence.ours), ("transformers", divergence.theirs)):
            # Equal logits share a place, because rounding makes many logits equal.
            place = 1 + int((logits > logits[token]).sum())
            if place > FEW:
                return f"the token of {owner} is number {place} for {side}"
            gap = (logits.max() - logits[token]).item()
            if gap > allowed:
                return f"the token of {owner} is {gap:.3f} below the likeliest for {side}, allowed are {allowed:.3f}"
    return ""


def assert_close_calls(
    divergences: Sequence[Divergence],
    our_logits: Callable[[Divergence], Tensor],
    their_logits: Callable[[Divergence], Tensor],
    dtype: torch.dtype,
    *,
    limit: int,
    total: int,
) -> None:
    """Requires that every divergence is a close call, and that at most ``limit`` of ``total`` sequences diverge."""
    why = {d: objection(d, our_logits(d), their_logits(d), dtype) for d in divergences}
    rejected = [f"{divergence}: {reason}" for divergence, reason in why.items() if reason]
    summary = f"{len(divergences)} of {total} sequences diverged, {limit} may; {len(rejected)} were no close call"
    assert not rejected and len(divergences) <= limit, "\n".join([summary, *rejected[:10]])


def max_divergences(exact: Sequence[Sequence[int]], rounded: Sequence[Sequence[int]]) -> int:
    """How many sequences may diverge, from one implementation's tokens in fp32 and in 16 bits.

    Two independent roundings differ from each other 1.4 times as much as each differs from the exact result. Twice as
    many divergences are allowed, and two more because small numbers vary.
    """
    return 2 * len(first_divergences(exact, rounded)) + 2


def logits_after(engine: Engine, prefix: Sequence[int]) -> Tensor:
    """The engine's logits for the token after a prefix, ``[V]`` fp32 on the CPU. It reads the cached K and V."""
    seen: list[Tensor] = []
    model = engine.runner.model
    compute = model.logits

    def record(hidden: Tensor) -> Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    model.logits = record
    try:
        list(engine.run([Request(0, tuple(prefix), SamplingParams(max_tokens=1))]))
    finally:
        model.logits = compute
    assert [len(rows) for rows in seen] == [1]
    return seen[0][0].float().cpu()
