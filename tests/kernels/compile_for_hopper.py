"""Compiles the kernels for a Hopper GPU on a machine without one: ``python compile_for_hopper.py``.

Run by ``test_compiles.py`` in a process of its own, where Triton does not interpret. The launchers are called as ever,
on tensors in the CPU's memory, and every launch ends with the compiled kernel.
"""

import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rosebatch_kernels.common import launch
from rosebatch_kernels.feedback import layout

compiled = []


def compile_only() -> None:
    """Make every launch a compilation."""
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    run = JITFunction.run

    def warm_up(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        tensor_cores = "wgmma" if "wgmma" in kernel.asm["ptx"] else "-"
        compiled.append((self.__name__, kernel.metadata.shared, tensor_cores))

    JITFunction.run = warm_up
    hopper = {"PDL": True, "launch_pdl": True}
    launch.launch_options = lambda: hopper


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def attention() -> None:
    from rosebatch_kernels.common.splits import DecodeWorkspace
    from rosebatch_kernels.paged_attention.decode import decode
    from rosebatch_kernels.paged_attention.prefill import prefill
    from rosebatch_kernels.qkv.kernel import prepare

    for heads, kv_heads, size, dtype in [
        (12, 12, 64, torch.float16),
        (16, 8, 128, torch.bfloat16),
        (7, 1, 80, torch.float32),
    ]:
        cache = empty(2, 4, kv_heads, 64, size, dtype=dtype)
        rotary = (empty(8, size, dtype=dtype),) * 2
        qk_norm = (empty(size, dtype=dtype), empty(size, dtype=dtype), 1e-6)
        for batch, append in [(1, True), (300, False)]:
            qkv = empty(batch, (heads + 2 * kv_heads) * size, dtype=dtype)
            table, fields = ints(batch, 4), ints(batch)
            workspace = DecodeWorkspace(batch, heads, kv_heads, size, torch.device("cpu"))
            options = {"num_heads": heads, "scale": 1.0, "append": append}
            if heads != kv_heads:
                options |= {"rotary": rotary, "qk_norm": qk_norm}
            decode(qkv, cache, table, fields, fields, workspace, **options)
        prepare(qkv, cache, table, fields, fields, num_heads=heads, rotary=rotary, qk_norm=qk_norm)
        prefill(qkv, cache, table, ints(3, 4), num_heads=heads, scale=1.0, window=100 if heads == kv_heads else 0)


def gated_attention() -> None:
    from rosebatch_kernels.common.head_norms import HeadUClip
    from rosebatch_kernels.common.splits import DecodeWorkspace
    from rosebatch_kernels.hp1.decode import decode, num_splits
    from rosebatch_kernels.hp1.gate import Gate
    from rosebatch_kernels.hp1.prefill import prefill
    from rosebatch_kernels.qkv.kernel import prepare

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
        workspace = DecodeWorkspace(2, heads, kv_heads, size, torch.device("cpu"), num_splits)
        for sparse in (True, False):
            more = {"scale": 0.1, "append": append, "sparse": sparse}
            decode(qkv, cache, table, fields, fields, workspace, gate, **more, **options)
        prepare(qkv, cache, table, fields, fields, **options)
        prefill(qkv, cache, table, ints(3, 4), gate, num_heads=heads, scale=0.1)


def layers() -> None:
    from rosebatch_kernels.kv_cache import kernel as kv_cache
    from rosebatch_kernels.linear import kernel as linear
    from rosebatch_kernels.mlp import kernel as mlp
    from rosebatch_kernels.norm import kernel as norm
    from rosebatch_kernels.uclip import kernel as uclip

    for rows, size in ((1, 768), (64, 1024)):
        x, weight = empty(rows, size), empty(size)
        norm.rms_norm(x, weight, 1e-6)
        norm.add_layer_norm(empty(4, rows, size, dtype=torch.float32), x, weight, weight, 1e-6, weight)
        uclip.uclip_norm(x.view(rows, -1, 64), empty(64), 0.5)
        uclip.add_uclip_norm(empty(8, rows, size, dtype=torch.float32), x, weight, -1.5, weight, 0.5)
    for name in ("bias_gelu_erf_", "bias_gelu_tanh_", "bias_relu_"):
        getattr(mlp, name)(x, weight)
    mlp.bias_residual_(x, x, weight)
    mlp.silu_mul(x)
    mlp.relu_mul(x)
    each = empty(size, dtype=torch.float32)
    for post_gamma, gamma in ((-1.5, 0.5), (each, 0.5), (each, each)):
        uclip.add_uclip_norm(empty(8192, size), empty(8192, size), weight, post_gamma, weight, gamma)
    # One row of the weight is a size that Triton makes a constant.
    for rows, out in ((1, 2048), (64, 1)):
        linear.linear(empty(rows, size), empty(out, size), empty(out), None)
        linear.parts(empty(rows, size), empty(out, size))
    for activation in ("gelu_tanh", "gelu_erf", "relu", "silu_mul", "relu_mul"):
        linear.linear(x, empty(2048, size), empty(2048), activation)
    cache = empty(1, 2, 4, 2, 64, 64)
    kv_cache.append(cache[0], empty(3, 2, 64), empty(3, 2, 64), torch.zeros(3, 2, dtype=torch.int64))
    kv_cache.copy_blocks(cache, ints(1), ints(1))


def experts() -> None:
    from rosebatch_kernels.experts import kernel, router

    for tokens in (1, 256, 512, 4096):
        for number, k, size, inner, activation in ((128, 8, 256, 64, "silu_mul"), (32, 4, 360, 72, "clamped_swiglu")):
            ids, weights = router.route(empty(tokens, number), k, normalize=number == 32)
            biases = (empty(number, 2 * inner), empty(number, size)) if number == 32 else (None, None)
            matrices = empty(number, 2 * inner, size), empty(number, size, inner)
            kernel.parts(empty(tokens, size), ids, weights, *matrices, *biases, activation)


def tokens() -> None:
    from rosebatch_kernels.feedback.kernel import advance
    from rosebatch_kernels.logits.kernel import adjust, count_, mask_
    from rosebatch_kernels.sampling.kernel import sample_rows

    fields, history, step = ints(layout.NUM_FIELDS, 9), ints(8, 9), ints(1)
    real = fields.view(torch.float32)
    for dtype, vocab in ((torch.float16, 50257), (torch.bfloat16, 151936)):
        sample_rows(
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
            adjust(
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
            count_(marks, ints(9), slots)
        mask_(logits, ints(2, -(-vocab // 32)), ints(2))
    advance(ints(9), fields, None, history, step, ints(2))
    advance(ints(2), fields, ints(2), history, None, ints(0))


if __name__ == "__main__":
    compile_only()
    attention()
    gated_attention()
    layers()
    experts()
    tokens()
    for line in sorted(set(compiled)):
        sys.stdout.write(" ".join(map(str, line)) + "\n")
