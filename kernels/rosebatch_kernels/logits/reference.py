"""PyTorch reference of what changes logits before a token is chosen from them.

The order of ``adjust`` is that of other servers; the repetition penalty is that of CTRL (arXiv 1909.05858).
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
    """Bias and penalties, then the end tokens out of rows that may not end yet; each step rounded to fp32.

    A row with presence and frequency 0, repetition 1, min_position 0 and no bias comes out as it went in, to the bit.
    -inf stays -inf; NaN stays NaN, except at an end token that is taken out.

    Args:
        logits: ``[S, V]`` fp16, bf16 or fp32, rows at any stride; not changed.
        marks: ``[N, V]`` int32, see ``layout``; rows at any stride.
        bias: ``[N, V]`` fp32, added to the logits first, rows at any stride; or None.
        slots: ``[S]`` int32 or int64, each row's row of ``marks`` and ``bias``; None: row i is row i.
        presence: ``[S]`` fp32, taken off the logits of tokens that were generated.
        frequency: ``[S]`` fp32, the same, times how often.
        repetition: ``[S]`` fp32, > 0, by which positive logits of tokens generated or in the prompt are divided, and
            others multiplied; before the other two.
        positions: ``[S]`` int32, that each row's token will have.
        min_positions: ``[S]`` int32, the first at which a token that ends the completion may stand.

    Returns:
        ``[S, V]`` fp32, new; its rows may lie apart.
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
        tokens: ``[S]`` int32 or int64; one outside of ``[0, V)`` is not counted.
        slots: ``[S]`` int32 or int64, each row's row of ``marks``, none twice; None: row i is row i.
    """
    inside = (tokens >= 0) & (tokens < marks.shape[1])
    marks[_rows(tokens, slots), torch.where(inside, tokens, 0).long()] += inside.int()


def mask_(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Make the logits of tokens that a mask bars -inf.

    Args:
        logits: ``[S, V]`` fp16, bf16 or fp32, rows at any stride, written in place.
        masks: ``[R, ceil(V / 32)]`` int32, rows at any stride: bit ``t % 32`` of word ``t // 32``, from the lowest bit
            up, is 0 where token t is barred. Bits from V on mean nothing.
        rows: ``[R]`` int32 or int64, each mask's row of ``logits``, none twice.
    """
    token = torch.arange(logits.shape[1], device=logits.device)
    barred = masks[:, token // 32] >> token % 32 & 1 == 0
    rows = rows.long()
    logits[rows] = logits[rows].masked_fill(barred, -math.inf)


def _rows(values: Tensor, slots: Tensor | None) -> Tensor:
    """``[S]`` int64: the slot of each row of ``values``."""
    return torch.arange(len(values), device=values.device) if slots is None else slots.long()
