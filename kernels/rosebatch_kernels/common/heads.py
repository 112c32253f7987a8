"""Device functions that load heads of q and k, normalise them and rotate them.

"Halves" are a pair ``[R, WIDTH]``: the channels of each head, and the same with the first and second half of those
that are rotated exchanged. Rotation combines the two; it multiplies what is in place of a partner from ROTARY on by 0.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.clip import clip
from rosebatch_kernels.common.whole_numbers import next_power_of_2

# Tables ``(cos, sin)``, ``[max_len, R]`` each: both halves of cos are equal, the first half of sin is negated.
Rotary = tuple[Tensor, Tensor]


class Shape(NamedTuple):
    """Heads of a layer and its cache ``[2, blocks, KV_HEADS, BLOCK, D]``: constants of a kernel.

    Triton 3.6 reads a field of it as a plain number: for ``static_range`` and ``zeros``, wrap it in ``tl.constexpr``.

    Attributes:
        HEADS, KV_HEADS: query heads, and K/V heads.
        GROUP: query heads to a K/V head.
        D: channels of a head.
        WIDTH: the same, rounded up to what a tile may have.
        BLOCK: tokens of a block.
        ROTARY: how many of a head's channels are rotated, the first ones; 0 for none.
        NORM: kind of norm before the rotation, see ``norm_arguments``; None for none.
    """

    HEADS: int
    KV_HEADS: int
    GROUP: int
    D: int
    WIDTH: int
    BLOCK: int
    ROTARY: int = 0
    NORM: str | None = None


def shape_of(cache: Tensor, num_heads: int, rotary: Rotary | None = None, norm: str | None = None) -> Shape:
    """The shape of a layer with this cache, whose heads are rotated by ``rotary`` and normalised."""
    _, _, kv_heads, block_size, size = cache.shape
    # A matrix product takes 16 channels at least.
    width = max(16, next_power_of_2(size))
    rotated = 0 if rotary is None else rotary[0].shape[1]
    return Shape(num_heads, kv_heads, num_heads // kv_heads, size, width, block_size, rotated, norm)


@triton.jit
def halves(place, mask, SHAPE: tl.constexpr):
    """The halves at the pointers ``place [R, 1]``; the second is the first without ROTARY.

    The exchanged form is read again, from the L1 cache: that is faster than an exchange between threads.
    """
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    mask = mask & (d < SHAPE.D)
    x = tl.load(place + d, mask=mask, other=0.0)
    swapped = x
    if SHAPE.ROTARY:
        half: tl.constexpr = SHAPE.ROTARY // 2
        swapped = tl.load(place + tl.where(d < half, d + half, d - half), mask=mask, other=0.0)
    return x, swapped


@triton.jit
def turn(rotary, position, SHAPE: tl.constexpr):
    """The pair cos and sin, ``[1, WIDTH]`` each, of a position: 1 and 0 from ROTARY on; unused values without it."""
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    c = d
    s = d
    if SHAPE.ROTARY:
        place = position.to(tl.int64) * SHAPE.ROTARY + d
        c = tl.load(rotary[0] + place, mask=d < SHAPE.ROTARY, other=1.0)
        s = tl.load(rotary[1] + place, mask=d < SHAPE.ROTARY, other=0.0)
    return c, s


@triton.jit
def weight_halves(norm, heads, real, SHAPE: tl.constexpr):
    """The halves of a norm's weight and of its number; unused values without NORM.

    The weight is ``[D]``, with "layer" that of each of ``heads [R, 1]`` that is ``real``. The number is eps of an
    RMSNorm or LayerNorm, or gamma of a UClip, with "uclip_each" a pointer to ``[D]``.
    """
    one = tl.zeros([1, 1], tl.int32)
    own = one
    swapped = one
    numbers = (one, one)
    if SHAPE.NORM is not None:
        if SHAPE.NORM == "layer":
            own, swapped = halves(norm.weight + heads * SHAPE.D, real, SHAPE)
        else:
            own, swapped = halves(norm.weight + one, one == 0, SHAPE)
        if SHAPE.NORM == "uclip_each":
            numbers = halves(norm.number + one, one == 0, SHAPE)
        else:
            numbers = (norm.number, norm.number)
    return own, swapped, numbers


@triton.jit
def normed_and_rotated(x, weight, turned, SHAPE: tl.constexpr):
    """Heads ``[R, WIDTH]`` after norm and rotation, rounded where PyTorch rounds.

    Args:
        x: halves. The caller loads them, weight, cos and sin, so that all loads are in flight together.
        weight: from ``weight_halves``.
        turned: from ``turn``.
    """
    own, other = x
    cos, sin = turned
    dtype = own.dtype
    if SHAPE.NORM == "uclip" or SHAPE.NORM == "uclip_each":
        own = clip(own.to(tl.float32) * weight[0].to(tl.float32), weight[2][0]).to(dtype)
        if SHAPE.ROTARY:
            other = clip(other.to(tl.float32) * weight[1].to(tl.float32), weight[2][1]).to(dtype)
    elif SHAPE.NORM == "rms" or SHAPE.NORM == "rms_values":
        wide = own.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / SHAPE.D + weight[2][0])[:, None]
        own = ((wide * factor).to(dtype).to(tl.float32) * weight[0].to(tl.float32)).to(dtype)
        if SHAPE.ROTARY:
            other = ((other.to(tl.float32) * factor).to(dtype).to(tl.float32) * weight[1].to(tl.float32)).to(dtype)
    elif SHAPE.NORM == "layer":
        wide = own.to(tl.float32)
        mean = (tl.sum(wide, 1) / SHAPE.D)[:, None]
        centred = tl.where(tl.arange(0, own.shape[1])[None, :] < SHAPE.D, wide - mean, 0.0)
        factor = tl.rsqrt(tl.sum(centred * centred, 1) / SHAPE.D + weight[2][0])[:, None]
        own = (centred * factor * weight[0].to(tl.float32)).to(dtype)
        if SHAPE.ROTARY:
            other = ((other.to(tl.float32) - mean) * factor * weight[1].to(tl.float32)).to(dtype)
    if SHAPE.ROTARY:
        turned = (own.to(tl.float32) * cos.to(tl.float32)).to(dtype).to(tl.float32)
        own = (turned + other.to(tl.float32) * sin.to(tl.float32)).to(dtype)
    return own


@triton.jit
def normed_values(v, weight, SHAPE: tl.constexpr):
    """Heads of v ``[R, WIDTH]``, normed where the norm is of v too; ``weight`` is that of k, from ``weight_halves``."""
    if SHAPE.NORM == "rms_values":
        wide = v.to(tl.float32)
        v = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / SHAPE.D + weight[2][0])[:, None]).to(v.dtype)
    return v
