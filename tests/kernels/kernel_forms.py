"""The launches that are compiled for all architectures, by group: each kernel in each of its forms.

The launchers are called as ever, on tensors in the CPU's memory, with the sizes that ``rosebatch.ops`` takes for the
architecture. What becomes of a launch is in ``compiling.py``.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from benchmarks.kernels import launchers
from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.chunks import PackedChunks
from rosebatch_kernels.common.shared_keys import Pieces
from rosebatch_kernels.experts.packed import can_decode
from rosebatch_kernels.feedback import layout
from rosebatch_kernels.linear.interface import Scales
from rosebatch_kernels.paged_attention.sizes import SIZES
from tests.helpers.packed_experts import empty_packed
from tests.kernels.compiling import lowered_only

QKV = Launchers("qkv.kernel")


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def paged_attention():
    """Decode, prefill as all GPUs have it, prefill of shared tiles, and the number of splits."""
    sizes = SIZES.of(launchers.device_of(torch.device("cuda")))
    everywhere = replace(sizes, prefill=replace(sizes.prefill, hopper=()))
    return (
        Launchers("paged_attention.decode").decode,
        partial(Launchers("paged_attention.prefill").prefill, sizes=everywhere),
        Launchers("paged_attention.prefill_shared").prefill_shared,
        Launchers("paged_attention.sizes").num_splits,
    )


def attention() -> None:
    from rosebatch_kernels.common.head_norms import HeadRMSNorm
    from rosebatch_kernels.common.splits import DecodeWorkspace

    decode, prefill, _, num_splits = paged_attention()

    for heads, kv_heads, size, dtype in [
        (16, 8, 128, torch.bfloat16),
        (12, 12, 64, torch.float16),
        (7, 1, 80, torch.float32),
    ]:
        cache = empty(2, 4, kv_heads, 64, size, dtype=dtype)
        rotary = (empty(8, size, dtype=dtype),) * 2
        qk_norm = HeadRMSNorm(empty(size, dtype=dtype), empty(size, dtype=dtype), 1e-6)
        for batch, append in [(1, True), (300, False)]:
            qkv = empty(batch, (heads + 2 * kv_heads) * size, dtype=dtype)
            table, fields = ints(batch, 4), ints(batch)
            workspace = DecodeWorkspace(batch, heads, kv_heads, size, torch.device("cpu"), num_splits)
            options = {"num_heads": heads, "scale": 1.0, "append": append}
            if heads != kv_heads:
                options |= {"rotary": rotary, "qk_norm": qk_norm}
            decode(qkv, cache, table, fields, fields, workspace, **options)
        decode(qkv, cache, ints(75, 4), fields, fields, workspace, num_heads=heads, scale=1.0, append=False, queries=4)
        QKV.prepare(qkv, cache, table, fields, fields, num_heads=heads, rotary=rotary, qk_norm=qk_norm)
        angles = empty(batch, size, dtype=torch.float32)
        QKV.rotate_(qkv, angles, angles, heads=heads + kv_heads)
        window = 100 if heads == kv_heads else 0
        for key_ends in (None, ints(batch)):
            prefill(qkv, cache, table, ints(3, 4), num_heads=heads, scale=1.0, window=window, key_ends=key_ends)


def invariant() -> None:
    """Decode attention over pieces of keys, undivided and divided, and products of fixed tiles."""
    from rosebatch_kernels.common.splits import DecodeWorkspace
    from rosebatch_kernels.linear.invariant import FixedLinear

    device = launchers.device_of(torch.device("cuda"))
    decode, _, _, num_splits = paged_attention()
    sizes = SIZES.of(device).invariant()
    everywhere = replace(sizes, prefill=replace(sizes.prefill, hopper=()))
    for heads, kv_heads, size, dtype in [
        (16, 8, 128, torch.bfloat16),
        (16, 8, 128, torch.float16),
        (12, 12, 64, torch.bfloat16),
        (16, 2, 512, torch.bfloat16),
        (7, 1, 80, torch.float32),
    ]:
        cache = empty(2, 4, kv_heads, 64, size, dtype=dtype)
        for batch, append in [(1, True), (300, True), (300, False)]:
            qkv = empty(batch, (heads + 2 * kv_heads) * size, dtype=dtype)
            workspace = DecodeWorkspace(batch, heads, kv_heads, size, torch.device("cpu"), num_splits, pieces=16)
            each = qkv, cache, ints(batch, 4), ints(batch), ints(batch), workspace
            window = 100 if heads == kv_heads else 0
            decode(*each, num_heads=heads, scale=1.0, append=append, window=window, sizes=sizes)
        each = qkv, cache, ints(75, 4), ints(batch), ints(batch), workspace
        decode(*each, num_heads=heads, scale=1.0, append=False, queries=4, window=window, sizes=sizes)
        prompts = qkv, cache, ints(300, 4), ints(3, 4)
        Launchers("paged_attention.prefill").prefill(*prompts, num_heads=heads, scale=1.0, sizes=everywhere)
        layer = FixedLinear(empty(64, 96, dtype=dtype), None, device)
        layer.add_(empty(300, 96, dtype=dtype), layer(empty(300, 96, dtype=dtype)))


def attention_of_more_families() -> None:
    """Heads of odd sizes, rotated in part; sinks and caps; groups of 5, 7 and 8 heads; windows of prefills."""
    from rosebatch_kernels.common.head_norms import HeadLayerNorm, HeadRMSNorm, ValueRMSNorm
    from rosebatch_kernels.common.splits import DecodeWorkspace

    decode, prefill, _, num_splits = paged_attention()

    # Each two of dtype, norm and given rows of the rotary tables meet with each two of their values.
    for heads, kv_heads, size, rotated, dtype, cap, with_sinks, window, with_rows in [
        (64, 8, 64, 64, torch.bfloat16, 0.0, True, 100, False),
        (8, 4, 256, 256, torch.bfloat16, 50.0, False, 100, True),
        (32, 2, 256, 64, torch.bfloat16, 0.0, False, 0, True),
        (8, 4, 256, 64, torch.float32, 50.0, True, 100, True),
        (5, 1, 80, 20, torch.bfloat16, 0.0, False, 100, False),
        (24, 8, 96, 72, torch.float16, 30.0, True, 100, False),
        (7, 1, 12, 4, torch.bfloat16, 0.0, True, 0, True),
        (2, 2, 20, 10, torch.float16, 5.0, True, 0, True),
        (32, 4, 512, 128, torch.bfloat16, 0.0, False, 0, False),
        (8, 1, 512, 128, torch.float16, 0.0, False, 100, True),
    ]:
        cache = empty(2, 4, kv_heads, 16, size, dtype=dtype)
        qkv = empty(2, (heads + 2 * kv_heads) * size, dtype=dtype)
        if cap:
            norm = HeadLayerNorm(empty(heads, size, dtype=dtype), empty(kv_heads, size, dtype=dtype), 1e-5)
        else:
            norm = HeadRMSNorm(empty(size, dtype=dtype), empty(size, dtype=dtype), 1e-6)
        if size == 512:
            norm = ValueRMSNorm(*empty(2, size, dtype=torch.float32), 1e-6)
        heads_before = {"num_heads": heads, "rotary": (empty(8, rotated, dtype=dtype),) * 2, "qk_norm": norm}
        scores = {"scale": 0.1, "soft_cap": cap, "sinks": empty(heads, dtype=dtype) if with_sinks else None}
        table, fields = ints(2, 4), ints(2)
        workspace = DecodeWorkspace(2, heads, kv_heads, size, torch.device("cpu"), num_splits)
        decode(qkv, cache, table, fields, fields, workspace, window=100, **scores, **heads_before)
        QKV.prepare(qkv, cache, table, fields, fields, **heads_before, rotary_rows=fields if with_rows else None)
        if size == 512:
            # Of a layer that shares K and V.
            QKV.prepare(qkv[:, : heads * size], cache, table, fields, fields, **heads_before, append=False)
        QKV.whole_rms_norm_(qkv, empty(heads * size, dtype=dtype), empty(kv_heads * size, dtype=dtype), 1e-6)
        prefill(qkv, cache, table, ints(3, 4), num_heads=heads, window=window, **scores)


def prompts_on_hopper() -> None:
    """Its own kernel: each size of head, with all that a layer may have; keys in blocks of any size; few and many."""
    prefill = Launchers("paged_attention.prefill").prefill
    for heads, kv_heads, size, block_size, dtype, cap, with_sinks, window, tokens in [
        (16, 8, 128, 64, torch.bfloat16, 0.0, False, 0, 9000),
        (7, 1, 128, 16, torch.float16, 0.0, False, 0, 100),
        (64, 8, 80, 64, torch.bfloat16, 0.0, True, 128, 100),
        (8, 4, 256, 24, torch.bfloat16, 50.0, False, 100, 100),
        (32, 8, 96, 48, torch.float16, 30.0, True, 0, 100),
        (5, 1, 72, 8, torch.bfloat16, 0.0, False, 100, 100),
        (12, 6, 64, 32, torch.bfloat16, 0.0, True, 0, 100),
    ]:
        cache, sinks = empty(2, 4, kv_heads, block_size, size, dtype=dtype), empty(heads, dtype=dtype)
        scores = {"scale": 0.1, "soft_cap": cap, "sinks": sinks if with_sinks else None}
        q = empty(tokens, heads * size, dtype=dtype)
        prefill(q, cache, ints(2, 4), ints(3, 4), num_heads=heads, window=window, **scores)


def shared_attention() -> None:
    from rosebatch_kernels.common.head_norms import HeadRMSNorm
    from rosebatch_kernels.common.shared_keys import MEMBERS, SharedKeys
    from rosebatch_kernels.common.splits import DecodeWorkspace

    decode, _, prefill_shared, num_splits = paged_attention()

    sizes = SIZES.of(launchers.device_of(torch.device("cuda"))).invariant()
    for heads, kv_heads, size, block_size, dtype, cap in [
        (16, 8, 128, 64, torch.bfloat16, 0.0),
        (12, 12, 64, 64, torch.float16, 0.0),
        (32, 8, 128, 16, torch.bfloat16, 0.0),
        (8, 4, 256, 64, torch.bfloat16, 50.0),
        (32, 4, 512, 64, torch.bfloat16, 0.0),
        (7, 1, 80, 64, torch.float32, 0.0),
    ]:
        cache = empty(2, 4, kv_heads, block_size, size, dtype=dtype)
        qkv = empty(256, (heads + 2 * kv_heads) * size, dtype=dtype)
        norm = HeadRMSNorm(empty(size, dtype=dtype), empty(size, dtype=dtype), 1e-6)
        options = {"num_heads": heads, "scale": 1.0, "soft_cap": cap}
        options |= {"rotary": (empty(8, size, dtype=dtype),) * 2, "qk_norm": norm}
        table, fields = ints(256, 4), ints(256)
        keys = SharedKeys(ints(4, 5), ints(MEMBERS), fields, fields)
        workspace = DecodeWorkspace(256, heads, kv_heads, size, fields.device, num_splits, shares=True)
        decode(qkv, cache, table, fields, fields, workspace, keys=keys, **options)
        if dtype.itemsize == 2:
            workspace = DecodeWorkspace(256, heads, kv_heads, size, fields.device, num_splits, shares=True, pieces=16)
            decode(qkv, cache, table, fields, fields, workspace, keys=keys, sizes=sizes, **options)
        prefill_shared(qkv, cache, table, ints(3, 5), ints(9, 4), num_heads=heads, scale=1.0, soft_cap=cap)


def attention_of_e4m3() -> None:
    """K and V as bytes with scales: every kernel that writes or reads them."""
    from rosebatch_kernels.common.head_norms import HeadRMSNorm
    from rosebatch_kernels.common.shared_keys import MEMBERS, SharedKeys
    from rosebatch_kernels.common.splits import DecodeWorkspace

    decode, prefill, prefill_shared, num_splits = paged_attention()
    append = Launchers("kv_cache.kernel").append
    # Each two of the batch of a step, append and keys in common meet with each two of their values.
    for heads, kv_heads, size, block_size, dtype, cap, window, batch in [
        (32, 8, 128, 64, torch.bfloat16, 0.0, 0, 256),
        (12, 12, 64, 64, torch.float16, 0.0, 0, 1),
        (16, 8, 128, 16, torch.bfloat16, 0.0, 1000, 1),
        (8, 4, 256, 64, torch.bfloat16, 50.0, 0, 256),
        (5, 1, 80, 16, torch.bfloat16, 0.0, 0, 1),
        (16, 2, 512, 64, torch.bfloat16, 0.0, 0, 256),
        (2, 1, 96, 64, torch.float32, 0.0, 0, 256),
    ]:
        cache, scales = ints(2, 4, kv_heads, block_size, size).byte(), empty(2, 4, kv_heads, block_size, 1).float()
        qkv = empty(256, (heads + 2 * kv_heads) * size, dtype=dtype)
        norm = HeadRMSNorm(empty(size, dtype=dtype), empty(size, dtype=dtype), 1e-6)
        before = {"num_heads": heads, "rotary": (empty(8, size, dtype=dtype),) * 2, "qk_norm": norm, "scales": scales}
        scores = {"scale": 0.1, "soft_cap": cap, "sinks": empty(heads, dtype=dtype) if window else None}
        table, fields = ints(256, 4), ints(256)
        keys = SharedKeys(ints(4, 5), ints(MEMBERS), fields, fields)
        workspace = DecodeWorkspace(256, heads, kv_heads, size, fields.device, num_splits, shares=True)
        for count, appends, shares in (batch, True, batch == 256), (256, False, batch == 1):
            rows = qkv[:count], cache, table[:count], fields[:count], fields[:count], workspace
            shared = keys if shares and not window else None
            decode(*rows, keys=shared, append=appends, window=window, **scores, **before)
        QKV.prepare(qkv, cache, table, fields, fields, **before)
        rest = {"num_heads": heads, "scales": scales, **scores}
        prefill(qkv, cache, table, ints(3, 4), window=window, **rest)
        prefill_shared(qkv, cache, table, ints(3, 5), ints(9, 4), **rest)
        new = empty(3, kv_heads, size, dtype=dtype)
        append(cache, new, new, torch.zeros(3, kv_heads, dtype=torch.int64), scales)
        # Pieces of keys, and one arithmetic.
        sizes = SIZES.of(launchers.device_of(torch.device("cuda"))).invariant()
        pieces = DecodeWorkspace(256, heads, kv_heads, size, fields.device, num_splits, pieces=sizes.decode.pieces)
        decode(*rows[:-1], pieces, append=True, window=window, sizes=sizes, **scores, **before)
        prefill(qkv, cache, table, ints(3, 4), window=window, sizes=sizes, **rest)


def gated_attention() -> None:
    from rosebatch_kernels.common.head_norms import HeadUClip
    from rosebatch_kernels.common.shared_keys import MEMBERS, SharedKeys
    from rosebatch_kernels.common.splits import DecodeWorkspace
    from rosebatch_kernels.hp1.gate import Gate

    decode, prefill = Launchers("hp1.decode").decode, Launchers("hp1.prefill").prefill
    num_splits = Launchers("hp1.sizes").num_splits
    for heads, kv_heads, size, dtype, append, taps in [
        (8, 4, 128, torch.bfloat16, True, 3),
        (3, 3, 80, torch.float16, False, 8),
        (2, 1, 64, torch.bfloat16, True, 1),
    ]:
        cache = empty(2, 4, kv_heads, 64, size, dtype=dtype)
        gate = Gate(empty(heads, taps, dtype=torch.float32), empty(heads, dtype=torch.float32), relu_pre=append)
        gammas = (1.0, 0.5) if taps == 3 else (empty(size, dtype=torch.float32),) * 2
        clip = HeadUClip(empty(size, dtype=dtype), empty(size, dtype=dtype), *gammas)
        options = {"num_heads": heads, "rotary": (empty(8, size, dtype=dtype),) * 2, "qk_norm": clip}
        qkv, table, fields = empty(2, (heads + 2 * kv_heads) * size, dtype=dtype), ints(2, 4), ints(2)
        workspace = DecodeWorkspace(2, heads, kv_heads, size, torch.device("cpu"), num_splits, shares=True)
        keys = SharedKeys(ints(4, 5), ints(MEMBERS), fields, fields)
        # Each two of append, sparse and keys meet with each two of their values.
        for sparse, shared in ((True, None), (False, keys)) if append else ((True, keys), (False, None)):
            more = {"scale": 0.1, "append": append, "sparse": sparse, "keys": shared}
            decode(qkv, cache, table, fields, fields, workspace, gate, **more, **options)
        QKV.prepare(qkv, cache, table, fields, fields, **options)
        prefill(qkv, cache, table, ints(3, 4), gate, num_heads=heads, scale=0.1)


def whole_prompts() -> None:
    """Heads of encoders, with biases, windows on both sides, and groups of heads."""
    from rosebatch_kernels.common.chunks import pack_chunks

    attend = Launchers("bidirectional_attention.kernel").attend
    for heads, kv_heads, size, dtype, window, with_bias in [
        (12, 12, 64, torch.bfloat16, 0, False),
        (12, 12, 32, torch.float16, 0, True),
        (12, 12, 64, torch.bfloat16, 65, False),
        (12, 12, 96, torch.bfloat16, 0, True),
        (8, 4, 128, torch.float16, 100, True),
        (3, 1, 256, torch.bfloat16, 257, False),
        (3, 1, 256, torch.float32, 0, True),
        (12, 12, 64, torch.float32, 65, False),
    ]:
        q, *rest = empty(70, heads + 2 * kv_heads, size, dtype=dtype).split((heads, kv_heads, kv_heads), 1)
        bias = empty(heads, 1023, dtype=dtype) if with_bias else None
        attend(q, *rest, *pack_chunks([(0, 0, 0, 70)]), scale=0.1, window=window, bias=bias)


def delta_rule() -> None:
    from rosebatch_kernels.common.chunks import pack_chunks
    from rosebatch_kernels.gated_delta.layout import DeltaState, DeltaWeights

    names = ("decode", "prefill", "gated_norm")
    decode, prefill, gated_norm = (getattr(Launchers(f"gated_delta.{name}"), name) for name in names)
    fp32 = torch.float32
    for key_heads, heads, key_dim, value_dim, dtype, max_beta in [
        (16, 32, 128, 128, torch.bfloat16, 1.0),
        (2, 2, 64, 80, torch.float16, 1.0),
        (2, 4, 256, 128, torch.bfloat16, 1.0),
        (1, 3, 24, 40, fp32, 1.0),
        (2, 4, 128, 128, fp32, 1.0),
        (2, 4, 256, 128, fp32, 1.0),
        (30, 30, 96, 192, torch.bfloat16, 2.0),
        (2, 2, 96, 192, fp32, 2.0),
    ]:
        channels = 2 * key_heads * key_dim + heads * value_dim
        state = DeltaState(empty(3, 4, channels, dtype=dtype), empty(3, heads, key_dim, value_dim, dtype=fp32))
        bias = empty(channels, dtype=dtype) if dtype == torch.float16 else None
        weights = DeltaWeights(
            empty(channels, 4, dtype=dtype), bias, empty(heads, dtype=fp32), empty(heads, dtype=dtype), max_beta
        )
        qkv, a = empty(70, channels, dtype=dtype), empty(70, heads, dtype=dtype)
        decode(qkv, a, a, state, ints(70), ints(70), ints(70), weights)
        # LLVM takes up to minutes for systems in fp32.
        with lowered_only() if dtype == fp32 else nullcontext():
            prefill(qkv, a, a, state, pack_chunks([(0, 0, 0, 70)]), weights)
        out = empty(70, heads, value_dim, dtype=dtype)
        gated_norm(out, out, empty(value_dim, dtype=dtype), 1e-6)


def channel_delta() -> None:
    """The delta rule with a decay for each channel of a key."""
    from rosebatch_kernels.common.chunks import pack_chunks
    from rosebatch_kernels.gated_delta.layout import DeltaState, DeltaWeights

    names = ("decode", "channel_prefill", "gated_norm")
    decode, prefill, norm = (Launchers(f"gated_delta.{name}") for name in names)
    fp32 = torch.float32
    for key_heads, heads, key_dim, value_dim, dtype in [
        (32, 32, 128, 128, torch.bfloat16),
        (2, 4, 64, 80, torch.float16),
        (2, 2, 256, 256, torch.bfloat16),
        (1, 3, 24, 40, fp32),
        (2, 2, 128, 128, fp32),
    ]:
        channels = 2 * key_heads * key_dim + heads * value_dim
        state = DeltaState(empty(3, 4, channels, dtype=dtype), empty(3, heads, key_dim, value_dim, dtype=fp32))
        rates = empty(heads, dtype=fp32), empty(heads * key_dim, dtype=fp32)
        weights = DeltaWeights(empty(channels, 4, dtype=dtype), None, *rates)
        qkv, a, b = (empty(70, size, dtype=dtype) for size in (channels, heads * key_dim, heads))
        decode.decode(qkv, a, b, state, ints(70), ints(70), ints(70), weights)
        # As those of the rule with a decay for a head.
        with lowered_only() if dtype == fp32 else nullcontext():
            prefill.prefill(qkv, a, b, state, pack_chunks([(0, 0, 0, 70)]), weights)
        out = empty(70, heads, value_dim, dtype=dtype)
        norm.gated_norm(out, out, empty(value_dim, dtype=dtype), 1e-6, "sigmoid")


def mamba2() -> None:
    from rosebatch_kernels.common.chunks import pack_chunks
    from rosebatch_kernels.mamba2.layout import MambaState, MambaWeights

    names = ("decode", "prefill", "gate_norm")
    decode, prefill, gate_norm = (getattr(Launchers(f"mamba2.{name}"), name) for name in names)
    fp32 = torch.float32
    for heads, head_dim, groups, size, dtype in [
        (64, 64, 8, 128, torch.bfloat16),
        (24, 64, 1, 256, torch.bfloat16),
        (3, 40, 1, 24, torch.float16),
        (128, 64, 1, 128, torch.float16),
        (4, 64, 2, 128, fp32),
        (4, 128, 1, 256, fp32),
    ]:
        inner = heads * head_dim
        channels = inner + 2 * groups * size
        state = MambaState(empty(3, 4, channels, dtype=dtype), empty(3, heads, head_dim, size, dtype=fp32))
        bias = None if head_dim == 40 else empty(channels, dtype=dtype)
        conv, of_heads = empty(channels, 4, dtype=dtype), empty(heads, dtype=fp32)
        weights = MambaWeights(conv, bias, of_heads, of_heads, of_heads)
        xbc, dt = empty(70, channels, dtype=dtype), empty(70, heads, dtype=dtype)
        decode(xbc, dt, state, ints(70), ints(70), ints(70), weights)
        with lowered_only() if dtype == fp32 else nullcontext():
            prefill(xbc, dt, state, pack_chunks([(0, 0, 0, 70)]), weights)
        out = empty(70, inner, dtype=dtype)
        gate_norm(out, out, None if head_dim == 40 else empty(inner, dtype=dtype), groups, 1e-6)


def short_convolutions() -> None:
    from rosebatch_kernels.common.chunks import pack_chunks

    kernel = Launchers("short_conv.kernel")
    for channels, taps, dtype in [(2048, 3, torch.bfloat16), (1000, 4, torch.float16), (48, 3, torch.float32)]:
        x, state, weight = (
            empty(*shape, dtype=dtype) for shape in ((70, 3 * channels), (3, taps, channels), (channels, taps))
        )
        kernel.prefill(x, state, pack_chunks([(0, 0, 0, 70)]), weight)
        kernel.decode(x, state, ints(70), ints(70), ints(70), weight)


def layers() -> None:
    from rosebatch_kernels.common.all_reduce import AllReduce
    from rosebatch_kernels.linear.streamed import can_stream

    kv_cache, linear, mlp, norm, uclip = (
        Launchers(f"{name}.kernel") for name in ("kv_cache", "linear", "mlp", "norm", "uclip")
    )
    for rows, size in ((1, 768), (64, 1024)):
        x, weight = empty(rows, size), empty(size)
        norm.rms_norm(x, weight, 1e-6)
        norm.rms_norm(x, weight.float(), 1e-6)
        norm.layer_norm(x, weight, None, 1e-6)
        norm.add(x, x)
        in_parts = empty(4, rows, size, dtype=torch.float32)
        for last in (weight.float(), None):
            norm.add_post_norm(in_parts, x, weight.float(), last, 1e-6, weight)
        norm.add_post_norm(x, x, weight.float(), weight.float(), 1e-6, factor=empty(1).float())
        norm.add_layer_norm(empty(4, rows, size, dtype=torch.float32), x, weight, weight, 1e-6, weight)
        all_reduce = AllReduce((empty(rows * size), empty(rows * size)), (ints(2 * rows), ints(2 * rows)), 1)
        norm.add_rms_norm(in_parts, x, weight, 1e-6, None, all_reduce=all_reduce)
        many = AllReduce(*((each(4 * rows * size),) * 4 for each in (empty, ints)), 1, (empty(rows * size),) * 4)
        norm.add_rms_norm(in_parts, x, weight, 1e-6, None, all_reduce=many)
        uclip.uclip_norm(x.view(rows, -1, 64), empty(64), 0.5)
        uclip.add_uclip_norm(empty(8, rows, size, dtype=torch.float32), x, weight, -1.5, weight, 0.5)
    for name in ("bias_gelu_erf_", "bias_gelu_tanh_", "bias_relu_"):
        getattr(mlp, name)(x, weight)
    mlp.bias_residual_(x, x, weight)
    mlp.sigmoid_mul(x, x)
    for name in ("silu_mul", "relu_mul", "gelu_tanh_mul", "gelu_erf_mul"):
        getattr(mlp, name)(x)
    each = empty(size, dtype=torch.float32)
    for post_gamma, gamma in ((-1.5, 0.5), (each, 0.5), (each, each)):
        uclip.add_uclip_norm(empty(8192, size), empty(8192, size), weight, post_gamma, weight, gamma)
    streams = can_stream(empty(1, 64), launchers.device_of(torch.device("cuda")))
    # One row of the weight is a size that Triton makes a constant.
    for rows, out in ((1, 2048), (64, 1)) if streams else ():
        linear.linear(empty(rows, size), empty(out, size), empty(out), None)
        linear.parts(empty(rows, size), empty(out, size))
    for activation in ("gelu_tanh", "gelu_erf", "relu", "silu_mul", "relu_mul", "gelu_tanh_mul") if streams else ():
        linear.linear(x, empty(2048, size), empty(2048), activation)
    if streams:
        Launchers("linear.gated").gated(empty(3000, size), empty(2048, size), "silu_mul")
    for rows in (1, 32, 64) if streams else ():
        Launchers("linear.head").logits(empty(rows, size), empty(4096, size))
    cache = empty(1, 2, 4, 2, 64, 64)
    kv_cache.append(cache[0], empty(3, 2, 64), empty(3, 2, 64), torch.zeros(3, 2, dtype=torch.int64))
    kv_cache.copy_blocks(cache, ints(1), ints(1))


def short_sums() -> None:
    """Loops that ptxas unrolls, and sums that are rounded to fp16 right behind them: see ``common.rounded``."""
    linear, experts = Launchers("linear.kernel"), Launchers("experts.kernel")
    half = partial(empty, dtype=torch.float16)
    for size in (256, 512, 768, 1024):
        for rows in (8, 64):
            linear.linear(half(rows, size), half(2048, size), None, "silu_mul")
    linear.add_(half(64, 256), half(512, 256), half(64, 512))
    Launchers("linear.gated").gated(half(3000, 768), half(2048, 768), "silu_mul")
    for tokens in (1, 4096):
        matrices = half(8, 128, 256), half(8, 256, 64)
        experts.parts(half(tokens, 256), ints(tokens, 2), half(tokens, 2).float(), *matrices)


def fp8() -> None:
    quantize, product, norm = (Launchers(f"{name}") for name in ("fp8.quantize", "fp8.kernel", "norm.kernel"))
    for group in (0, 128):
        # Groups that end with the row or before, tiles of several rows and of several groups, and rows of one tile.
        for size in (64, 576, 4096, 28672):
            quantize.gated(empty(3, 2 * size), "silu_mul", group)
            quantize.quantize(empty(3, size, dtype=torch.float16), group)
        for size in (64, 4096):
            norm.add_rms_norm(empty(2, 3, size, dtype=torch.float32), empty(3, size), empty(size), 1e-6, group=group)
            norm.layer_norm(empty(3, size, dtype=torch.float16), empty(size), None, 1e-6, group=group)
            scales = Scales(empty(3, dtype=torch.float32), empty(size, dtype=torch.float32))
            norm.add_rms_norm(empty(3, size), empty(3, size), empty(size), 1e-6, group=group, scales=scales)
        for rows, size_in, size_out in ((1, 4096, 6144), (17, 576, 208), (64, 4096, 4096), (300, 4096, 4096)):
            form = quantize.quantize(empty(rows, size_in), group)
            scales = empty(-(-size_out // 128), -(-size_in // 128)) if group else empty(size_out)
            weight = form.numbers.new_empty(size_out, size_in), scales.float()
            product.linear(*form[:2], *weight, empty(size_out) if group else None, torch.bfloat16)
            product.parts(*form[:2], *weight)


def int4() -> None:
    from rosebatch_kernels.common.packing import empty_words
    from rosebatch_kernels.int4.layout import QUARTER, Int4Weight
    from rosebatch_kernels.int4.sizes import SIZES as INT4

    kernel, decode_ = Launchers("int4.kernel"), Launchers("int4.decode").decode_
    sum_parts = Launchers("int4.sum_parts").sum_parts
    fp16, bf16 = torch.float16, torch.bfloat16
    # A bias and parts, at one shape or the other: both take the memory of the plain product at each.
    for rows, size_in, group, zeros, dtype, scale, in_parts in [
        (1, 4096, 128, False, bf16, bf16, True),
        (20, 4096, 64, True, fp16, fp16, False),
        (64, 200, 32, True, bf16, torch.float32, True),
        (200, 4096, 128, True, bf16, fp16, False),
        (128, 200, 32, False, fp16, bf16, False),
        (256, 4096, 128, False, bf16, bf16, False),
        (256, 200, 32, True, fp16, fp16, True),
    ]:
        grid = -(-size_in // group), 6144
        own = ints(*grid) if zeros else None
        words = empty_words((6144, size_in), QUARTER, "cpu")
        weight = Int4Weight(words, empty(*grid, dtype=scale), own, size_in, group)
        x, bias = empty(rows, size_in, dtype=dtype), empty(6144, dtype=dtype)
        kernel.linear(x, weight, None, "silu_mul" if zeros else "relu")
        whole = INT4.of(launchers.device_of(torch.device("cuda"))).invariant()
        kernel.linear(x, weight, bias, sizes=whole)
        if in_parts:
            sum_parts(kernel.parts(x, weight), bias, dtype)
        else:
            kernel.linear(x, weight, bias)
        decode_(x.new_empty(1024, size_in), weight, 1024)


def adapters() -> None:
    """Steps of few rows and of many, with as many parts of sums as those of large models have."""
    from rosebatch_kernels.adapters.layout import Stack
    from rosebatch_kernels.mlp.reference import GATED

    kernel = Launchers("adapters.kernel")
    for dtype, ranks in [(torch.bfloat16, 16), (torch.float16, 64), (torch.float32, 48)]:
        for parts, depth in [
            ([0] * 512 + [1] * 128 + [2] * 128, 4096),
            ([0] * 512, 14336),
            ([0] * 256 + [1] * 256, 1000),
        ]:
            a, b = empty(64, (max(parts) + 1) * ranks, depth, dtype=dtype), empty(64, len(parts), ranks, dtype=dtype)
            stack = Stack.of(a, b, parts)
            for tokens in (256, 2048):
                x, out = empty(tokens, depth, dtype=dtype), empty(tokens, len(parts), dtype=dtype)
                rows = kernel.sort_rows(ints(tokens), 64)
                kernel.add_(out, x, stack, rows)
                for activation in GATED if depth == 1000 else ():
                    kernel.gated(out, x, stack, rows, activation)


def latent_attention() -> None:
    """Models' own widths and numbers of heads, and odd ones; without splits and with."""
    from rosebatch_kernels.linear.fixed_heads import FixedHeads

    kernel = Launchers("latent_attention.kernel")
    device = launchers.device_of(torch.device("cuda"))
    for heads, rank, rotated, dtype in [
        (16, 512, 64, torch.bfloat16),
        (20, 512, 64, torch.float16),
        (128, 512, 64, torch.bfloat16),
        (40, 256, 32, torch.bfloat16),
        (3, 40, 6, torch.float16),
        (16, 512, 64, torch.float32),
    ]:
        width = rank + rotated
        cache, norm = empty(1, 4, 1, 32, width, dtype=dtype), empty(rank, dtype=dtype)
        tables = (empty(8, rotated, dtype=dtype),) * 2
        for batch in (1, 300):
            q, latents = empty(batch, heads, width, dtype=dtype), empty(batch, width, dtype=dtype)
            where = ints(batch, 4), ints(batch), ints(batch)
            rows = ints(batch) if batch == 1 else None
            kernel.prepare(q, latents, cache, *where, norm=norm, eps=1e-6, rotary=tables, rotary_rows=rows)
            if batch == 1:
                kernel.prepare(q, latents, cache, *where, norm=norm, eps=1e-6, rotary=None)
            kernel.decode(q, cache, *where, rank=rank, scale=1.0)
        kernel.prefill(q, cache, where[0], ints(3, 4), rank=rank, scale=1.0)
        FixedHeads(empty(heads, rank, 128, dtype=dtype), device)(empty(70, heads, 192, dtype=dtype)[..., :128])


def expanded_latents() -> None:
    """Models' own widths, and odd ones."""
    kernel = Launchers("latent_attention.expanded")
    for heads, nope, rotated, values, rank, dtype in (
        (20, 192, 64, 256, 512, torch.bfloat16),
        (16, 128, 64, 128, 512, torch.bfloat16),
        (40, 64, 32, 64, 256, torch.float16),
        (3, 10, 6, 20, 40, torch.bfloat16),
    ):
        q, rows = empty(200, heads, nope + rotated, dtype=dtype), empty(200, rank + rotated, dtype=dtype)
        k, v = (empty(heads, 200, size, dtype=dtype).transpose(0, 1) for size in (nope, values))
        chunks = PackedChunks(ints(3, 4), ints(7, 2))
        out, norms = kernel.attend_fresh(q, k, v, rows[:, rank:], chunks, scale=1.0)
        matrices = {
            "of_keys": empty(heads, rank, nope, dtype=dtype),
            "of_values": empty(heads, values, rank, dtype=dtype),
        }
        where = empty(1, 9, 1, 64, rank + rotated, dtype=dtype), ints(5, 16), ints(200), chunks
        kernel.attend_prefix_(out, norms, q, *where, **matrices, scale=1.0)


def latents_on_hopper() -> None:
    """Models' own widths, without splits and with."""
    kernel = Launchers("latent_attention.kernel")
    for heads, rank, rotated, batch, dtype in (
        (20, 512, 64, 64, torch.bfloat16),
        (16, 512, 64, 300, torch.bfloat16),
        (16, 512, 64, 1, torch.float16),
        (40, 256, 32, 8, torch.bfloat16),
    ):
        cache = empty(1, 4, 1, 64, rank + rotated, dtype=dtype)
        q = empty(batch, heads, rank + rotated, dtype=dtype)
        kernel.decode(q, cache, ints(batch, 4), ints(batch), ints(batch), rank=rank, scale=1.0)


def experts() -> None:
    kernel, router = Launchers("experts.kernel"), Launchers("experts.router")
    from rosebatch_kernels.experts.reference import Choice

    for number, k, choice in (
        (256, 8, Choice(True, empty(256, dtype=torch.float32), 8, 4, 2.5)),
        (160, 6, Choice(groups=8, kept=3, scale=16.0)),
    ):
        router.route(empty(70, number, dtype=torch.float32), k, normalize=choice.sigmoid, choice=choice)
    router.route(empty(70, 128), 8, normalize=True, choice=Choice(factors=empty(128, dtype=torch.float32)))
    for tokens in (1, 256, 512, 4096):
        for number, k, size, inner, activation in (
            (128, 8, 256, 64, "silu_mul"),
            (32, 4, 360, 72, "clamped_swiglu"),
            (128, 6, 256, 72, "relu2"),
        ):
            ids, weights = router.route(empty(tokens, number), k, normalize=number == 32)
            columns = inner if activation == "relu2" else 2 * inner
            biases = (empty(number, columns), empty(number, size)) if number == 32 else (None, None)
            matrices = empty(number, columns, size), empty(number, size, inner)
            kernel.parts(empty(tokens, size), ids, weights, *matrices, *biases, activation)
    if not can_decode(launchers.device_of(torch.device("cuda"))):
        return
    # Of each form the tiles of few rows and of most, and scales of pieces, which take the most registers.
    few, middle, most = (1, torch.float16), (512, torch.bfloat16), (4096, torch.bfloat16)
    for form, unit, has_zeros, sizes in (
        ("e2m1", 32, False, (few, (1, torch.bfloat16), middle, most)),
        ("e4m3", 0, False, (few,)),
        ("e4m3", 64, False, (middle, most)),
        ("int4", 128, True, (few, middle)),
        ("int4", 32, True, ((1, torch.bfloat16), most)),
    ):
        for tokens, dtype in sizes:
            ids, weights = ints(tokens, 4), empty(tokens, 4, dtype=torch.float32)
            matrices = [empty_packed(form, unit, has_zeros, (32, *shape)) for shape in ((400, 264), (264, 200))]
            kernel.parts(empty(tokens, 264, dtype=dtype), ids, weights, *matrices)


def experts_of_fp8() -> None:
    """Rows that are rounded to fp8, a few and many of an expert."""
    kernel = Launchers("experts.kernel")
    for unit, size, inner, dtype, in_blocks in (
        (0, 264, 200, torch.bfloat16, False),
        (128, 264, 200, torch.float16, False),
        (128, 256, 128, torch.bfloat16, True),
    ):
        for tokens in (24, 96):
            ids, weights = ints(tokens, 4), empty(tokens, 4, dtype=torch.float32)
            shapes = (4, 2 * inner, size), (4, size, inner)
            matrices = [empty_packed("e4m3", unit, False, shape, in_blocks=in_blocks) for shape in shapes]
            kernel.parts(empty(tokens, size, dtype=dtype), ids, weights, *matrices)


def tokens() -> None:
    kernel, advance = Launchers("logits.kernel"), Launchers("feedback.kernel").advance
    fields, history, step = ints(layout.NUM_FIELDS, 9), ints(8, 9), ints(1)
    real = fields.view(torch.float32)
    for dtype, vocab in ((torch.bfloat16, 151936), (torch.float16, 50257)):
        Launchers("sampling.kernel").sample_rows(
            empty(9, vocab, dtype=dtype),
            temperature=real[0],
            top_k=fields[1],
            top_p=real[2],
            min_p=real[3],
            seeds=fields[4:6].t(),
            positions=fields[6],
        )
        # In rows as long as the padded product makes them.
        logits = empty(9, -(-vocab // 64) * 64, dtype=dtype)[:, :vocab]
        marks = ints(9, vocab)
        for bias, slots in ((None, None), (empty(9, vocab, dtype=torch.float32), ints(9))):
            kernel.adjust(
                logits,
                marks,
                bias,
                slots,
                presence=real[0],
                frequency=real[1],
                repetition=real[2],
                positions=fields[3],
                min_positions=fields[4],
            )
            kernel.count_(marks, ints(9), slots)
        Launchers("logprobs.kernel").logprob_rows(logits, ints(9), 5, 20)
        kernel.mask_(logits, ints(2, -(-vocab // 32)), ints(2))
        for cap in (0.0, 30.0):
            kernel.scale_and_cap_(logits, 1.0, cap)
    advance(ints(9), fields, None, history, step, ints(2))
    advance(ints(2), fields, ints(2), history, None, ints(0))


def drafts() -> None:
    kernel, step = Launchers("drafts.kernel"), ints(1)
    fields, tokens, history = ints(layout.NUM_FIELDS, 9), ints(9, 16384), ints(8, 64)
    for queries, pieces in ((2, None), (4, Pieces(256, 16))):
        rows = ints(layout.NUM_FIELDS, 9 * queries)
        kernel.propose(fields, tokens, ints(9), ints(8193), ints(9), rows, ints(2), pieces)
        kernel.verify(ints(9 * queries), rows, fields, tokens, ints(9), history, step, ints(2))
