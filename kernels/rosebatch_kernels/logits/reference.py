"""PyTorch reference of the changes of logits before a token is chosen.

``adjust`` has the order of other servers; the repetition penalty is that of CTRL (arXiv 1909.05858).
"""

import math

import torch
from torch import Tensor

from rosebatch_kernels.logits.layout import COUNT, ENDS, IN_PROMPT


def adjust(
    logits: Tensor,
    marks: Tensor,
    bias: Tensor | None,
    slots: Tensor | None,
    *,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    positions: Tensor,
    min_positions: Tensor,
) -> Tensor:
    """Add the bias, apply the penalties, then bar end tokens in rows that may not end yet. Each step rounds to fp32.

    A row with presence and frequency 0, repetition 1, min_position 0 and no bias keeps its bits. -inf stays -inf; NaN
    stays NaN, except at a barred end token.

    Args:
        logits: ``[S, V]`` fp16, bf16 or fp32, rows at any stride; not changed.
        marks: ``[N, V]`` int32, see ``layout``; rows at any stride.
        bias: ``[N, V]`` fp32, added to the logits first, rows at any stride; or None.
        slots: ``[S]`` int32 or int64, each row's row of ``marks`` and ``bias``; None: row i is row i.
        presence: ``[S]`` fp32, subtracted from the logit of every generated token.
        frequency: ``[S]`` fp32, subtracted once for each time the token was generated.
        repetition: ``[S]`` fp32, > 0: divides the positive logits of tokens generated or in the prompt, and multiplies
            their other logits; before the other two penalties.
        positions: ``[S]`` int32, position of the token to be chosen.
        min_positions: ``[S]`` int32, first position where an end token is allowed.

    Returns:
        ``[S, V]`` fp32, new; there may be gaps between its rows.
    """
    rows = _rows(logits, slots)
    x, mark = logits.float(), marks[rows]
    if bias is not None:
        x = x + bias[rows]
    count = mark & COUNT
    generated = count > 0
    seen = generated | (mark & IN_PROMPT > 0)
    penalty = repetition[:, None]
    x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    x = x - frequency[:, None] * count
    x = x - torch.where(generated, presence[:, None], 0.0)
    too_early = (positions < min_positions)[:, None] & (mark & ENDS > 0)
    return x.masked_fill(too_early, -math.inf)


def count_(marks: Tensor, tokens: Tensor, slots: Tensor | None) -> None:
    """Count one generated token of each row in its mark.

    Args:
        marks: ``[N, V]`` int32, see ``layout``; rows at any stride, written in place.
        tokens: ``[S]`` int32 or int64; a token outside of ``[0, V)`` is not counted.
        slots: ``[S]`` int32 or int64, each row's row of ``marks``, none twice; None: row i is row i.
    """
    inside = (tokens >= 0) & (tokens < marks.shape[1])
    marks[_rows(tokens, slots), torch.where(inside, tokens, 0).long()] += inside.int()


def mask_(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Set the logits of the tokens that a mask bars to -inf.

    Args:
        logits: ``[S, V]`` fp16, bf16 or fp32, rows at any stride, written in place.
        masks: ``[R, ceil(V / 32)]`` int32, rows at any stride: bit ``t % 32`` of word ``t // 32``, counted from the
            lowest bit, is 0 if token t is barred. Bits from V on are ignored.
        rows: ``[R]`` int32 or int64, each mask's row of ``logits``, none twice.
    """
    token = torch.arange(logits.shape[1], device=logits.device)
    barred = masks[:, token // 32] >> token % 32 & 1 == 0
    rows = rows.long()
    logits[rows] = logits[rows].masked_fill(barred, -math.inf)


def scale_and_cap_(logits: Tensor, scale: float, cap: float) -> Tensor:
    """``cap · tanh(scale · logits / cap)``, or ``scale · logits`` with a cap of 0; computed in fp32, rounded once.

    Gemma 2 has a cap, Cohere and Granite a scale.

    Args:
        logits: ``[S, V]`` fp16, bf16 or fp32, rows at any stride, written in place and returned.
        scale: finite.
        cap: >= 0.
    """
    wide = logits.float() * scale
    return logits.copy_((wide / cap).tanh() * cap if cap else wide)


def _rows(values: Tensor, slots: Tensor | None) -> Tensor:
    """``[S]`` int64: the slot of each row of ``values``."""
    return torch.arange(len(values), device=values.device) if slots is None else slots.long()
