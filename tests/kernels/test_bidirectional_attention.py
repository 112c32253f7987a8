"""Attention over whole prompts equals a formula in float64: packed, of one length, with windows and biases."""

import math

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.bidirectional_attention import reference, torch_attention
from rosebatch_kernels.common.chunks import pack_chunks

IMPLEMENTATIONS = {"reference": reference, "kernel": Launchers("bidirectional_attention.kernel")}
# Of prompts: one token, a tile less one, a tile, tiles and a rest; the order of rows is not that of lengths.
LENGTHS = (65, 1, 63, 130, 64, 7)


def exact(q, k, v, lengths, scale, window, bias):
    """Row by row, in float64."""
    group, out, first = q.shape[1] // k.shape[1], torch.zeros(q.shape, dtype=torch.float64), 0
    for length in lengths:
        for i in range(length):
            low, high = (max(0, i - window + 1), min(length, i + window)) if window else (0, length)
            for head in range(q.shape[1]):
                keys, values = (x[first + low : first + high, head // group].double() for x in (k, v))
                scores = keys @ q[first + i, head].double() * scale
                if bias is not None:
                    middle = bias.shape[1] // 2 - i
                    scores += bias[head, middle + low : middle + high].double()
                out[first + i, head] = scores.softmax(0) @ values
        first += length
    return out


def case(randn, dtype, heads, kv_heads, size, lengths=LENGTHS, distances=0):
    total = sum(lengths)
    # q, k and v of one product: rows are further apart than they are long.
    qkv = randn(total, (heads + 2 * kv_heads) * size, dtype=dtype).view(total, -1, size)
    bias = randn(heads, 2 * distances - 1, dtype=dtype) if distances else None
    return *qkv.split((heads, kv_heads, kv_heads), 1), bias


def chunks_of(lengths, **options):
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    return pack_chunks([(0, first, 0, n) for first, n in zip(firsts, lengths, strict=True)], **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "distances"),
    [
        (2, 2, 32, 0, 0),
        (2, 1, 64, 0, 150),
        (1, 1, 96, 20, 0),
        (2, 2, 128, 70, 130),
        (1, 1, 256, 1, 0),
        (3, 1, 24, 65, 0),
    ],
)
def test_packed(
    heads, kv_heads, size, window, distances, dtype, device, implementation, randn, assert_close, poisoned_outputs
):
    """Keys of the next prompt, of another tile, or beyond a window on either side would be seen."""
    q, k, v, bias = case(randn, dtype, heads, kv_heads, size, distances=distances)
    packed = chunks_of(LENGTHS, tiles=12)
    options = {"scale": size**-0.5, "window": window, "bias": None if bias is None else bias.to(device)}
    found = implementation.attend(*(x.to(device) for x in (q, k, v, *packed)), **options)
    right = exact(q, k, v, LENGTHS, size**-0.5, window, bias)
    assert_close(found.view(right.shape), right)


@pytest.mark.parametrize(("window", "distances"), [(0, 0), (5, 0), (0, 70), (9, 40), (64, 0)])
def test_prompts_of_one_length(window, distances, dtype, randn, assert_close):
    """The CPU's: the mask of a bias is read from its middle, whatever the length."""
    lengths = (33,) * 3
    q, k, v, bias = case(randn, dtype, 4, 2, 24, lengths, distances)
    each = (x.unflatten(0, (3, 33)) for x in (q, k, v))
    found = torch_attention.attend(*each, 0.3, window, bias)
    assert_close(found.flatten(0, 1), exact(q, k, v, lengths, 0.3, window, bias))


def test_rows_far_apart(device, randn, assert_close, far_apart):
    """Offsets of large steps exceed 32 bits."""
    q, k, v, _ = case(randn, torch.float32, 1, 1, 16, (3,))
    moved = (far_apart(x.contiguous().to(device)) for x in (q, k, v))
    packed = (each.to(device) for each in chunks_of((3,)))
    found = IMPLEMENTATIONS["kernel"].attend(*moved, *packed, scale=0.25)
    assert_close(found.view(3, 1, 16), exact(q, k, v, (3,), 0.25, 0, None))


def test_large_scores(device, implementation, randn, assert_close):
    """The softmax is taken relative to the largest: else exponents overflow.

    Products are integers, so that equal scores are equal in fp32, and others far apart.
    """
    q, k, v, _ = case(randn, torch.float32, 1, 1, 16, (70,))
    q, k = q.round(), k.round()
    packed = (each.to(device) for each in chunks_of((70,)))
    found = implementation.attend(*(x.to(device) for x in (q, k, v)), *packed, scale=math.pi * 40)
    assert_close(found.view(70, 1, 16), exact(q, k, v, (70,), math.pi * 40, 0, None))
