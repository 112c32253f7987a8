"""Device functions that load heads of q and k, normalise them and rotate them.

ROTARY is how many of a head's D channels are rotated, the first ones; 0 for none. "Halves" are a pair ``[R, WIDTH]``:
the channels of each head, and the same with the first and second half of those exchanged. Rotation combines the two; it
multiplies what stands for a partner from ROTARY on by 0.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from rosebatch_kernels.common.clip import clip


@triton.jit
def halves(place, mask, D: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr):
    """The halves at the pointers ``place [R, 1]``; the second is the first without ROTARY.

    The exchanged form is read again, from the L1 cache: that is faster than an exchange between threads.
    """
    d = tl.arange(0, WIDTH)[None, :]
    mask = mask & (d < D)
    x = tl.load(place + d, mask=mask, other=0.0)
    swapped = x
    if ROTARY:
        swapped = tl.load(place + tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2), mask=mask, other=0.0)
    return x, swapped


@triton.jit
def turn(cos, sin, position, WIDTH: tl.constexpr, ROTARY: tl.constexpr):
    """The pair cos and sin, ``[1, WIDTH]`` each, of a position: 1 and 0 from ROTARY on; unused values without it."""
    d = tl.arange(0, WIDTH)[None, :]
    if ROTARY:
        place = position.to(tl.int64) * ROTARY + d
        c = tl.load(cos + place, mask=d < ROTARY, other=1.0)
        s = tl.load(sin + place, mask=d < ROTARY, other=0.0)
    else:
        c = d
        s = d
    return c, s


@triton.jit
def weight_halves(
    weight, number, heads, real, D: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr
):
    """The halves of a norm's weight and of its number; unused values without NORM.

    The weight is ``[D]``, with "layer" that of each of ``heads [R, 1]`` that is ``real``. The number is eps of an
    RMSNorm or LayerNorm, or gamma of a UClip, with "uclip_each" a pointer to ``[D]``.
    """
    one = tl.zeros([1, 1], tl.int32)
    if NORM == "layer":
        own, swapped = halves(weight + heads * D, real, D, WIDTH, ROTARY)
    elif NORM is not None:
        own, swapped = halves(weight + one, one == 0, D, WIDTH, ROTARY)
    else:
        own = one
        swapped = one
    numbers = halves(number + one, one == 0, D, WIDTH, ROTARY) if NORM == "uclip_each" else (number, number)
    return own, swapped, numbers


@triton.jit
def normed_and_rotated(x, weight, turned, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr):
    """Heads ``[R, WIDTH]`` after norm and rotation, rounded where PyTorch rounds.

    Args:
        x: halves. The caller loads them, weight, cos and sin, so that all loads are in flight together.
        weight: from ``weight_halves``.
        turned: from ``turn``.
    """
    own, other = x
    cos, sin = turned
    dtype = own.dtype
    if NORM == "uclip" or NORM == "uclip_each":
        own = clip(own.to(tl.float32) * weight[0].to(tl.float32), weight[2][0]).to(dtype)
        if ROTARY:
            other = clip(other.to(tl.float32) * weight[1].to(tl.float32), weight[2][1]).to(dtype)
    elif NORM == "rms":
        wide = own.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / D + weight[2][0])[:, None]
        own = ((wide * factor).to(dtype).to(tl.float32) * weight[0].to(tl.float32)).to(dtype)
        if ROTARY:
            other = ((other.to(tl.float32) * factor).to(dtype).to(tl.float32) * weight[1].to(tl.float32)).to(dtype)
    elif NORM == "layer":
        wide = own.to(tl.float32)
        mean = (tl.sum(wide, 1) / D)[:, None]
        centred = tl.where(tl.arange(0, own.shape[1])[None, :] < D, wide - mean, 0.0)
        factor = tl.rsqrt(tl.sum(centred * centred, 1) / D + weight[2][0])[:, None]
        own = (centred * factor * weight[0].to(tl.float32)).to(dtype)
        if ROTARY:
            other = ((other.to(tl.float32) - mean) * factor * weight[1].to(tl.float32)).to(dtype)
    if ROTARY:
        turned = (own.to(tl.float32) * cos.to(tl.float32)).to(dtype).to(tl.float32)
        own = (turned + other.to(tl.float32) * sin.to(tl.float32)).to(dtype)
    return own
