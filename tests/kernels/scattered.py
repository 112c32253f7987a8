"""What the tests of paged kernels share: sequences scattered over a poisoned cache, and the formulas in float64."""

import math

import torch
from torch import nan

from rosebatch_kernels.common.head_norms import HeadLayerNorm, HeadRMSNorm, HeadUClip, ValueRMSNorm
from rosebatch_kernels.kv_cache.layout import cache_rows
from rosebatch_kernels.kv_cache.reference import append

EPS = 1e-6


class Scattered:
    """Sequences of random K and V in blocks in no order; all else in the cache is NaN, their last blocks' ends too.

    ``table`` has room for one token more than ``lengths`` and a column besides; entries that no token needs name a
    block of NaN, and its rows lie apart. ``shared`` lists rows and how many first keys they share, whole blocks.
    """

    def __init__(self, lengths, kv_heads, size, block_size, dtype, device, randn, shared=()):
        self.kv_heads, self.block_size = kv_heads, block_size
        self.k = [randn(n, kv_heads, size, dtype=dtype) for n in lengths]
        self.v = [randn(n, kv_heads, size, dtype=dtype) for n in lengths]
        counts = [n // block_size + 1 for n in lengths]
        blocks = sum(counts) + 3
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(sum(lengths))).int()
        wide = torch.full((len(lengths), max(counts) + 6), int(order[-1]), dtype=torch.int32)
        taken = 0
        for row, count in enumerate(counts):
            wide[row, 5 : 5 + count] = order[taken : taken + count]
            taken += count
        table = wide[:, 5:]
        for (leader, *rest), keys in shared:
            for row in rest:
                self.k[row][:keys], self.v[row][:keys] = self.k[leader][:keys], self.v[leader][:keys]
                table[row, : keys // block_size] = table[leader, : keys // block_size]
        cache = torch.full((2, blocks, kv_heads, block_size, size), nan, dtype=dtype)
        for row, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            where = torch.arange(len(k))
            append(cache, k, v, cache_rows(table, torch.full_like(where, row), where, kv_heads, block_size))
        self.cache, self.table = cache.to(device), wide.to(device)[:, 5:]

    def slot(self, row, position):
        """Index of a token's ``[2, kv_heads, D]`` in the cache."""
        block = int(self.table[row, position // self.block_size])
        return slice(None), block, slice(None), position % self.block_size

    def free_before(self, row, first):
        """Give the blocks away whose tokens all come before ``first``: NaN, and numbers that no block has."""
        for column in range(first // self.block_size):
            self.cache[:, int(self.table[row, column])] = nan
            self.table[row, column] = (-1, 2**30)[column % 2]


def attention(q, k, v, scale, window=0, soft_cap=0.0, sinks=None):
    """float64: one token's ``q [heads, D]`` over ``k`` and ``v [keys, kv_heads, D]``, its own the last of them."""
    first = max(0, len(k) - window) if window else 0
    group = len(q) // k.shape[1]
    k, v = (x[first:].double().repeat_interleave(group, 1) for x in (k, v))
    scores = (q.double() * k).sum(-1) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    # A sink is a score of a key whose value is zero.
    rest = torch.zeros(len(q)) if sinks is None else (sinks.cpu().double() - scores.max(0).values).exp()
    weights = (scores - scores.max(0).values).exp()
    return ((weights / (weights.sum(0) + rest))[..., None] * v).sum(0).flatten()


def normed_and_rotated(x, position, norm=None, rotary=None):
    """float64: heads ``x [heads, D]`` of a token at ``position``, by the formulas of a norm and of rotation.

    The tables' channels are rotated, the first ones.
    """
    x = x.double()
    if norm is not None:
        x = norm(x)
    if rotary is not None:
        cos, sin = (table[position].double() for table in rotary)
        half = len(cos) // 2
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        x = torch.cat((low * cos[:half] - high * sin[half:], high * cos[half:] + low * sin[half:], rest), -1)
    return x


def rotary_tables(length, size, dtype):
    """cos and sin of each position, as the models make them."""
    angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(size // 2) / (size // 2))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rms_norm(size, dtype, device, randn, heads=None):
    """A norm of q and k as kernels take it, weights around 1 as in trained models; and both formulas in float64."""
    weights = [(1 + 0.1 * randn(size)).to(dtype) for _ in range(2)]

    def formula(weight):
        return lambda x: x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight.double()

    return HeadRMSNorm(*(weight.to(device) for weight in weights), EPS), [formula(weight) for weight in weights]


def rms_norm_of_values(size, dtype, device, randn, heads=None):
    """The same of a norm that v has as well, see ``normed_values``."""
    norm, formulas = rms_norm(size, dtype, device, randn)
    return ValueRMSNorm(*norm), formulas


def normed_values(v, norm):
    """float64: ``v [heads, D]`` after a norm of q, k and v, or as it is."""
    v = v.double()
    return v / (v.square().mean(-1, keepdim=True) + EPS).sqrt() if isinstance(norm, ValueRMSNorm) else v


def assert_values(written, v, norm, assert_close):
    """K's neighbour in the cache: v by the formula, or its own bits."""
    if isinstance(norm, ValueRMSNorm):
        assert_close(written, normed_values(v, norm))
    else:
        assert torch.equal(written.cpu(), v)


def layer_norm(size, dtype, device, randn, heads=None):
    """The same of a LayerNorm, each of the ``heads`` of q, and of k, with weights of its own."""
    weights = [(1 + 0.1 * randn(count, size)).to(dtype) for count in heads]

    def formula(weight):
        def norm(x):
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()

        return norm

    return HeadLayerNorm(*(weight.to(device) for weight in weights), EPS), [formula(weight) for weight in weights]


def uclip(size, dtype, device, randn, heads=None):
    """The same of a clip, which takes hold of about a third of normal channels; the gammas are fp32's."""
    alphas, gammas = _alphas(size, dtype, randn), [1.25, -0.875]
    return HeadUClip(*(alpha.to(device) for alpha in alphas), *gammas), list(map(_clip, alphas, gammas))


def uclip_each(size, dtype, device, randn, heads=None):
    """The same with a gamma of either sign for each channel."""
    alphas, gammas = _alphas(size, dtype, randn), [1.25 * randn(size), -0.875 * randn(size)]
    norm = HeadUClip(*(numbers.to(device) for numbers in (*alphas, *gammas)))
    return norm, list(map(_clip, alphas, (gamma.double() for gamma in gammas)))


def _alphas(size, dtype, randn):
    return [(1 + 0.1 * randn(size)).to(dtype) for _ in range(2)]


def _clip(alpha, gamma):
    return lambda x: (x * alpha.double()).clamp(-1, 1) * gamma


NORMS = {
    "rms": rms_norm,
    "rms_values": rms_norm_of_values,
    "layer": layer_norm,
    "uclip": uclip,
    "uclip_each": uclip_each,
}


def untouched(*shape, dtype, device):
    """Elements that take no memory on a CPU until they are written."""
    storage = torch.UntypedStorage(math.prod(shape) * dtype.itemsize, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape)


def assert_same(actual, expected):
    """Exact, with NaN equal to NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
