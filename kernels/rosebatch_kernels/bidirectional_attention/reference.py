"""PyTorch reference of bidirectional attention over packed prompts."""

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """See ``kernel.attend``; a prompt is computed whole, whatever its tiles."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    for number in sorted({chunk for chunk, _ in tiles.tolist() if chunk >= 0}):
        _, first, _, count = chunks[number].tolist()
        rows = slice(first, first + count)
        keys, values = (x[rows].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * scale
        places = torch.arange(count, device=q.device)
        apart = places - places[:, None]
        if bias is not None:
            scores += bias.float()[:, apart + bias.shape[1] // 2]
        if window:
            scores.masked_fill_(apart.abs() >= window, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out.flatten(1)
