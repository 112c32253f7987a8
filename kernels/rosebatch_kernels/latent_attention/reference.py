"""PyTorch reference of latent attention, in the form that reads latents as they are (MLA, arXiv 2405.04434).

A token leaves a row of W numbers for all heads: its latent ``c [rank]``, normalised, then a key ``r`` that is rotated.
A head's key is ``(U · c, r)`` and its value ``V · c``, with matrices of its own. So its score is
``(Uᵀ · q) · c + q_r · r``, and its result ``V · Σ w · c``. These kernels have the part between: q is ``(Uᵀ · q, q_r)``,
which is W wide, and the result is the weighted sum of latents. All heads read one "head" of keys, whose first numbers
are the values.
"""

import math

import torch
from torch import Tensor

from rosebatch_kernels.common.chunks import PackedChunks
from rosebatch_kernels.norm.reference import rms_norm
from rosebatch_kernels.paged_attention.reference import softmax
from rosebatch_kernels.qkv.torch_heads import rope


def prepare(
    q: Tensor,
    latents: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    norm: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor] | None,
    rotary_rows: Tensor | None = None,
    appended: Tensor | None = None,
) -> None:
    """Rotate the last channels of q, normalise latents, rotate their keys, and append both.

    Args:
        q: ``[T, heads, at least R]``, overwritten; any of its strides but the last.
        latents: ``[T, W]`` as projected, rows at any stride.
        cache: ``[1, blocks, 1, block_size, W]``, written in place.
        block_table: ``[S, M]`` int32 block ids, rows at any stride.
        rows: ``[T]`` int32, each token's row of the table; -1 for tokens that nobody reads, which change nothing but
            perhaps their q.
        positions: ``[T]`` int32 at any stride.
        norm: ``[rank]``, the weight of an RMSNorm.
        eps: of the norm.
        rotary: ``(cos, sin)``, see ``rosebatch_kernels.paged_attention.decode``; ``rank + R`` is W. None: q
            and keys stay as they are (Kimi Linear).
        rotary_rows: ``[T]`` int32, each token's row of these tables; None if it is the position.
        appended: ``[T, W]``, what was appended is written here too; None if nobody reads it.
    """
    rank, block_size = len(norm), cache.shape[3]
    key = latents[:, rank:]
    if rotary is not None:
        where = (positions if rotary_rows is None else rotary_rows).long()
        cos, sin = (table[where][:, None] for table in rotary)
        turned = q[..., -cos.shape[2] :]
        turned.copy_(rope(turned, cos, sin))
        key = rope(key[:, None], cos, sin)[:, 0]
    new = torch.cat((rms_norm(latents[:, :rank], norm, eps), key), 1)
    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        if row >= 0:
            cache[0, int(block_table[row, position // block_size]), 0, position % block_size] = new[token]
            if appended is not None:
                appended[token] = new[token]


def decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    *,
    rank: int,
    scale: float,
    queries: int = 1,
) -> Tensor:
    """Attention of one new token for each sequence, which is in the cache already.

    Args:
        q: ``[B, heads, W]``.
        cache: ``[1, blocks, 1, block_size, W]``.
        block_table: ``[B / queries, M]`` int32 block ids, rows at any stride.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32 at the same stride; a row with ``position >= limit`` is skipped, its output undefined.
        rank: the first channels of a row, which are summed up.
        scale: factor on q·k.
        queries: successive rows of a sequence, which have one block table.

    Returns:
        ``[B, heads, rank]``.
    """
    out = q.new_empty(*q.shape[:2], rank)
    for row, (position, limit) in enumerate(zip(positions.tolist(), limits.tolist(), strict=True)):
        if position < limit:
            out[row] = _attend(q[row : row + 1], cache, block_table[row // queries], position, rank, scale)
    return out


def prefill(q: Tensor, cache: Tensor, block_table: Tensor, tiles: Tensor, *, rank: int, scale: float) -> Tensor:
    """Attention of chunks of tokens, packed one after the other, which are in the cache already.

    Args:
        q: ``[T, heads, W]``.
        cache, rank, scale: as for ``decode``.
        block_table: ``[S, M]`` int32 block ids, rows at any stride.
        tiles: ``[N, 4]`` int32, see ``rosebatch_kernels.paged_attention.prefill``.

    Returns:
        ``[T, heads, rank]``; undefined in rows that no tile covers.
    """
    out = q.new_empty(*q.shape[:2], rank)
    for sequence, first, position, count in tiles.tolist():
        if count:
            rows = slice(first, first + count)
            out[rows] = _attend(q[rows], cache, block_table[sequence], position, rank, scale)
    return out


def attend_fresh(
    q: Tensor, k: Tensor, v: Tensor, rotated: Tensor, chunks: PackedChunks, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens of chunks among themselves, by expanded keys and values.

    Args:
        q: ``[T, heads, nope + R]``, rotated; any of its strides but the last.
        k: ``[T, heads, nope]``, ``U · c`` of each head; any of its strides but the last.
        v: ``[T, heads, values]``, ``V · c``; the same.
        rotated: ``[T, R]``, keys of all heads, rows at any stride.
        chunks: of the tokens.
        scale: factor on q·k.

    Returns:
        ``[T, heads, values]``; and ``[T, heads]`` fp32, the logarithm to base 2 of the sum of exponentials of scores.
        Both are undefined in rows that no tile covers.
    """
    out, norms = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)
    for _, first, _, count in chunks.chunks.tolist():
        rows = slice(first, first + count)
        keys = torch.cat((k[rows], rotated[rows, None].expand(-1, k.shape[1], -1)), 2).float()
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * scale
        seen = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows].float()).to(q.dtype)
        norms[rows] = scores.logsumexp(-1).t() / math.log(2)
    return out, norms


def attend_prefix_(
    out: Tensor,
    norms: Tensor,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    chunks: PackedChunks,
    *,
    of_keys: Tensor,
    of_values: Tensor,
    scale: float,
) -> None:
    """Add what was in the cache before the chunks' tokens to the results of ``attend_fresh``.

    Args:
        out, norms: these, the first one overwritten.
        q, chunks, scale: the same.
        cache, block_table: as for ``decode``.
        rows: ``[T]`` int32, each token's row of the table.
        of_keys: ``[heads, rank, nope]``, Uᵀ of each head.
        of_values: ``[heads, values, rank]``, V.
    """
    rank, nope = of_keys.shape[1:]
    for _, first, prefix, count in chunks.chunks.tolist():
        if count and prefix:
            own = slice(first, first + count)
            blocks = block_table[int(rows[first]), : -(-prefix // cache.shape[3])].long()
            latents = cache[0, blocks, 0].flatten(0, 1)[:prefix].float()
            absorbed = torch.einsum("qhn,hrn->qhr", q[own, :, :nope].float(), of_keys.float()).to(q.dtype)
            wide = torch.cat((absorbed, q[own, :, nope:]), 2).float()
            scores = torch.einsum("qhw,kw->hqk", wide, latents) * scale
            sums = torch.einsum("hqk,kr->qhr", scores.softmax(-1), latents[:, :rank]).to(q.dtype)
            values = torch.einsum("qhr,hvr->qhv", sums.float(), of_values.float())
            share = (scores.logsumexp(-1).t() - norms[own] * math.log(2)).sigmoid()[..., None]
            out[own] = torch.lerp(out[own].float(), values, share).to(q.dtype)


def _attend(q: Tensor, cache: Tensor, table: Tensor, position: int, rank: int, scale: float) -> Tensor:
    """Successive tokens ``[R, heads, W]`` of one sequence, the first at ``position``."""
    end, block_size = position + len(q), cache.shape[3]
    blocks = table[: -(-end // block_size)].long()
    keys = cache[0, blocks, 0].flatten(0, 1)[:end]
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("rhw,kw->rhk", q.to(wide), keys.to(wide)) * scale
    seen = torch.arange(end, device=q.device) <= position + torch.arange(len(q), device=q.device)[:, None]
    weights = softmax(scores.masked_fill(~seen[:, None], float("-inf")), None)
    return (weights @ keys[:, :rank].to(wide)).to(q.dtype)
