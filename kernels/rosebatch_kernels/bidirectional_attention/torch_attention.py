"""Bidirectional attention on a CPU: PyTorch's scaled dot-product attention of prompts of one length."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, bias: Tensor | None = None) -> Tensor:
    """Attention within each of B prompts of L tokens.

    Args:
        q: ``[B, L, heads, D]``; ``heads`` is a multiple of kv_heads.
        k, v: ``[B, L, kv_heads, D]``.
        scale: factor on q·k.
        window: keys on each side that a token sees, its own included; 0 for all.
        bias: ``[heads, 2 · M - 1]`` with M >= L, added to scores: that of a key n tokens after the query is at
            ``M - 1 + n``. None for none.

    Returns:
        ``[B, L, heads, D]``.
    """
    mask, grouped = _mask(q, window, bias), q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped).transpose(1, 2)


def _mask(q: Tensor, window: int, bias: Tensor | None) -> Tensor | None:
    """What is added to scores, ``[L, L]`` or ``[1, heads, L, L]`` in q's dtype; None for nothing."""
    length, mask = q.shape[1], None
    if bias is not None:
        middle = bias.shape[1] // 2
        mask = bias.unfold(1, length, 1)[None, :, middle + 1 - length : middle + 1].flip(2).to(q.dtype)
    if 0 < window < length:
        places = torch.arange(length, device=q.device)
        outside = (places[:, None] - places).abs() >= window
        mask = q.new_zeros(()) if mask is None else mask
        mask = torch.where(outside, float("-inf"), mask)
    return mask
