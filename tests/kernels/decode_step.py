"""A decode step over scattered blocks, and what to hold its result, and what it wrote, against."""

from types import SimpleNamespace

import torch
from torch import nan

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.shared_keys import MAX_PARTS, MEMBERS, SharedKeys
from rosebatch_kernels.common.splits import DecodeWorkspace
from tests.kernels.scattered import (
    NORMS,
    Scattered,
    assert_same,
    assert_values,
    attention,
    normed_and_rotated,
    normed_values,
    rotary_tables,
    untouched,
)

_NUM_SPLITS = Launchers("paged_attention.sizes").num_splits
# Nobody's default.
SCALE = 0.17


def make_step(
    positions,
    kv_heads,
    group,
    size,
    block_size,
    dtype,
    device,
    randn,
    *,
    scale=SCALE,
    window=0,
    soft_cap=0.0,
    sinks=None,
    attend=None,
    rotary=0,
    qk_norm=None,
    append=True,
    idle=(),
    num_splits=_NUM_SPLITS,
    shared=(),
):
    """Arguments of a decode step, and what to hold its result against; rows in ``idle`` are not live.

    ``attend`` is the formula, of softmax by default; ``rotary`` is how many channels are rotated, True for all;
    ``qk_norm`` is one of ``NORMS``; ``shared`` is that of ``Scattered``.
    """
    attend = attend or (lambda q, k, v: attention(q, k, v, scale, window, soft_cap, sinks))
    heads, batch = kv_heads * group, len(positions)
    qkv = randn(batch, heads + 2 * kv_heads, size, dtype=dtype)
    tables = rotary_tables(max(positions) + 1, size if rotary is True else rotary, dtype) if rotary else None
    norm, exact_norms = (None, (None, None))
    if qk_norm:
        norm, exact_norms = NORMS[qk_norm](size, dtype, device, randn, (heads, kv_heads))
    lengths = [n if append else n + 1 for n in positions]
    paged = Scattered(lengths, kv_heads, size, block_size, dtype, device, randn, shared)
    exact, new_keys = [], []
    for row, position in enumerate(positions):
        q, k, v = qkv[row].split((heads, kv_heads, kv_heads))
        if append:
            q = normed_and_rotated(q, position, exact_norms[0], tables)
            new_keys.append(normed_and_rotated(k, position, exact_norms[1], tables))
            k = torch.cat((paged.k[row].double(), new_keys[-1][None]))
            v = torch.cat((paged.v[row].double(), normed_values(v, norm)[None]))
        else:
            k, v = paged.k[row], paged.v[row]
        exact.append(attend(q, k, v))
    # The first is at its limit, others are far past it: no table reaches as far.
    where = [2**20 if row in idle[1:] else position for row, position in enumerate(positions)]
    state = torch.tensor([(n, n if row in idle else n + 1 + row) for row, n in enumerate(where)], dtype=torch.int32)
    where, limits = state.t().contiguous().to(device)
    options = {"num_heads": heads, "scale": scale, "window": window, "append": append}
    if soft_cap:
        options["soft_cap"] = soft_cap
    if sinks is not None:
        options["sinks"] = sinks.to(device)
    if rotary:
        options["rotary"] = tuple(table.to(device) for table in tables)
    if norm is not None:
        options["qk_norm"] = norm
    workspace = DecodeWorkspace(batch, heads, kv_heads, size, torch.device(device), num_splits, shares=bool(shared))
    return SimpleNamespace(
        paged=paged,
        live=[row for row in range(batch) if row not in idle],
        exact=torch.stack(exact),
        new_keys=new_keys,
        new_values=qkv[:, heads + kv_heads :],
        workspace=workspace,
        arguments=[qkv.flatten(1).to(device), paged.cache, paged.table, where, limits, workspace],
        options=options,
    )


def check(implementation, step, assert_close):
    """Run the step, compare its result, and see that of the cache it wrote the new slots alone; the result."""
    paged, qkv = step.paged, step.arguments[0]
    before, same = paged.cache.clone(), qkv.clone()
    out = implementation(*step.arguments, **step.options)
    assert out.dtype == qkv.dtype
    assert_close(out[step.live], step.exact[step.live])
    if step.options["append"]:
        for row in step.live:
            slot = paged.slot(row, int(step.arguments[3][row]))
            written = paged.cache[slot]
            assert_close(written[0], step.new_keys[row])
            assert_values(written[1], step.new_values[row], step.options.get("qk_norm"), assert_close)
            before[slot] = written
    assert_same(paged.cache, before)
    assert torch.equal(qkv, same)
    assert not step.workspace.arrived.any()
    return out


def lay_apart(step):
    """The projection's columns in a wider tensor at an odd place; positions and limits as columns of one matrix."""
    qkv, _, table, positions, limits, *_ = step.arguments
    wide = qkv.new_full((len(qkv), qkv.shape[1] + 30), nan)
    step.arguments[0] = wide[:, 13 : 13 + qkv.shape[1]].copy_(qkv)
    # Rows of the table lie apart in the other tests.
    step.arguments[2] = table.contiguous()
    step.arguments[3:5] = torch.stack((positions, limits, limits), 1)[:, :2].unbind(1)
    assert [x.is_contiguous() for x in step.arguments[:5]] == [False, True, True, False, False]


def require_the_same_alone(implementation, step):
    """The bits of a row do not depend on the others."""
    limits = step.arguments[4]
    whole = implementation(*step.arguments, **step.options)
    for row in range(len(limits)):
        step.arguments[4] = torch.zeros_like(limits)
        step.arguments[4][row] = limits[row]
        assert torch.equal(implementation(*step.arguments, **step.options)[row], whole[row])


def check_far_apart(decode, step, far_apart, assert_close):
    """Three rows past int32 in the projection, in the blocks of K, and from K's half to V's, in blocks of 64 by 64."""
    blocks, near, table = 2**19 + 3, step.paged.cache, step.paged.table
    # 2^12 elements a block: from 2^19 on, blocks lie past 2^31.
    cache = untouched(2, blocks, 1, 64, 64, dtype=near.dtype, device=near.device)
    far = [blocks - 1, 0, blocks - 2]
    for row, block in enumerate(far):
        cache[:, block] = near[:, int(table[row, 0])]
    far_table = torch.tensor(far, dtype=torch.int32, device=near.device)[:, None]
    out = decode(far_apart(step.arguments[0]), cache, far_table, *step.arguments[3:], **step.options)
    assert_close(out, step.exact)
    return cache[:, far]


def with_shared_keys(decode, items):
    """The decode, whose rows share keys as these items say."""

    def implementation(qkv, *arguments, **options):
        return decode(qkv, *arguments, keys=shared_keys(len(qkv), items, qkv.device), **options)

    return implementation


def shared_keys(batch, items, device):
    """Items as (rows, first key, end, part)."""
    members, lines = [], []
    begins, counts = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    for rows, first, end, part in items:
        assert len(rows) <= MEMBERS and part < MAX_PARTS
        lines.append((len(members), len(rows), first, end, part))
        members += rows
        begins[rows] = begins[rows].clamp_min(end)
        counts[rows] += 1
    # As padded for a graph.
    lines += [(0, 0, 0, 0, 0)] * 2
    tables = (torch.tensor(lines, dtype=torch.int32), torch.tensor(members, dtype=torch.int32))
    return SharedKeys(*(each.to(device) for each in (*tables, begins, counts)))
