"""Warms models up for a Hopper GPU on a machine without one: ``python warm_up_for_hopper.py MODEL[+adapters]...``.

Run by ``test_warm_up.py`` in a process of its own, where Triton does not interpret. Prints for each model how
many kernels warm-up compiled, how many it launched, how many its steps then found in Triton's cache, and how many
they did not; then the same of a kernel in Gluon, and how many threads at most had Triton's Python part at a time.

A compilation ends with Python's part: the compiler's own takes minutes, and tells no launch from another.
"""

import sys
from itertools import product
from threading import Thread
from types import SimpleNamespace

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rosebatch.engine.drafts.window_drafter import QUERIES
from rosebatch.engine.plan import PackedStep
from rosebatch.engine.sampling.features import Features
from rosebatch.engine.triton_runner import packing
from rosebatch.engine.triton_runner.prefix_groups import MIN_ROWS
from rosebatch.engine.triton_runner.prefix_tiles import NO_TILES
from rosebatch.engine.triton_runner.steps import DecodeKind, PackedKind
from rosebatch.engine.triton_runner.warm_up import compile_for
from rosebatch_kernels.common import device as devices
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.sizes import sized
from rosebatch_kernels.mlp import kernel as mlp
from rosebatch_kernels.paged_attention import prefill
from rosebatch_kernels.paged_attention.sizes import SIZES
from tests.engine import small_models
from tests.engine.small_models import device_engine

# Enough for rows that share a prefix.
SLOTS = small_models.SLOTS = 20
HOPPER = Device.of_arch(90, 132)
found = []
launched = []
together = []


def compile_only() -> None:
    """Make every launch a compilation, as in ``tests/kernels/compiling.py``."""
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    hopper = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    torch.cuda.get_device_properties = lambda device: hopper
    # The engine's own device is a CPU here.
    devices.INTERPRETER = HOPPER
    run = JITFunction.run

    def compile_it(self: JITFunction, *args: object, warmup: bool, **options: object) -> object:
        launched.extend([] if warmup else [self])
        return run(self, *args, warmup=True, **options)

    JITFunction.run = compile_it
    # There is no GPU to load a kernel into.
    CompiledKernel._init_handles = lambda self: None
    make_ir, inside = ASTSource.make_ir, []

    def make_it(self: ASTSource, *args: object, **options: object) -> object:
        inside.append(self)
        together.append(len(inside))
        try:
            return make_ir(self, *args, **options)
        finally:
            inside.remove(self)

    ASTSource.make_ir = make_it
    CUDABackend.add_stages = leave_out
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)


def leave_out(self: CUDABackend, stages: dict[str, object], options: object, language: object) -> None:
    """The stages of the compiler, of which the last one's file is what a launch looks for."""
    # Triton's kernels begin with the first of these, those in Gluon with one of the others.
    for each in ("ttir", "ttgir", "glir"):
        stages[each] = lambda module, metadata: module
    stages["cubin"] = lambda module, metadata: metadata.update(name="kernel", shared=0) or b""


@torch.inference_mode()
def all_steps(of) -> None:
    """Steps of all batch sizes, and packed ones of sizes that are not warmed up."""
    kinds = [(rows, adapted) for rows in of.slots.buckets for adapted in {False, of.adapters is not None}]
    for rows, adapted in kinds:
        for shares, divided in product({False, of.prefix_groups is not None and rows >= MIN_ROWS}, (False, True)):
            of.steps.decode(DecodeKind(rows, Features(), shares, divided, adapted=adapted))
            if of.verifies:
                known = DecodeKind(rows, None, shares, divided, knows=True, adapted=adapted)
                of.model.logits(of.steps.decode(known))
        for count, divided in product(QUERIES if of.verifies else (), (False, True)):
            if rows * count <= SLOTS and not rows & (rows - 1):
                kind = DecodeKind(rows, Features(), shares=False, divided=divided, queries=count, adapted=adapted)
                of.steps.decode(kind)
    steps = product(((16, 1), (96, 2), (640, SLOTS)), {False, of._shares_tiles}, {False, of.adapters is not None})
    for (tokens, samples), shares, adapted in steps:
        kind, shared = PackedKind(tokens, shares, adapted=adapted), NO_TILES if shares else None
        packed = packing.pack(PackedStep(()), of.slots, of.steps.layout(kind), of.kernels.tile_rows, shared)
        cells = torch.from_numpy(packed)
        of.steps.packed_cells[: len(cells)].copy_(cells)
        logits = of.model.logits(of.steps.packed(kind)[:samples])
        columns = torch.arange(SLOTS, dtype=torch.int32)[:samples]
        of.sampler.next_tokens(logits, Features(), columns, decodes=False)


def launch_gluon() -> None:
    """A kernel that begins elsewhere than Triton's."""
    q, cache = torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(2, 1, 1, 64, 128, dtype=torch.bfloat16)
    table = torch.zeros(4, 4, dtype=torch.int32)
    prefill.prefill(q, cache, table, table, num_heads=2, scale=1.0, sizes=SIZES.measured, device=HOPPER)


@torch.inference_mode()
def all_features(of) -> None:
    """Sampling with features alone and together, of all batch sizes; and the log-probabilities of prompts."""
    adjusts = (False, False), (True, False), (True, True)
    kinds = [Features(*each, logprobs) for each, logprobs in product(adjusts, (None, 0, 20))]
    hidden = torch.empty(SLOTS, of.model.config.hidden_size)
    of.state.allocate(Features(adjusts=True, biased=True, logprobs=0))
    for rows, features, decodes, guided in product(of.slots.buckets, kinds, (False, True), (False, True)):
        logits, columns, masks = of.model.logits(hidden[:rows]), torch.arange(SLOTS, dtype=torch.int32)[:rows], None
        if guided:
            # Their rows come behind them, in one transfer.
            words = torch.empty(rows, -(-logits.shape[1] // 32), dtype=torch.int32)
            masks = words, torch.empty(9, dtype=torch.int32)[1:]
            logits = logits[columns] if decodes else logits
        of.sampler.next_tokens(logits, features, None if decodes and not guided else columns, masks, decodes=decodes)
    of.kernels.logprob_rows(of.model.logits(hidden), torch.empty(SLOTS, dtype=torch.int64), 3, 20)


def launch_beside() -> None:
    """Another thread launches a kernel while this one warms up."""
    sigmoid_mul = sized(mlp, "sigmoid_mul", HOPPER)
    thread = Thread(target=lambda: sigmoid_mul(torch.empty(2, 16), torch.empty(2, 16)))
    thread.start()
    thread.join()


if __name__ == "__main__":
    compile_only()
    for name in sys.argv[1:]:
        base, _, adapters = name.partition("+")
        of = device_engine(base, adapters=2 * bool(adapters)).runner
        options = {"forces": True, "queries": QUERIES} if of.verifies else {}
        compile_for(lambda of=of, options=options: of.warm_up(max_num_tokens=512, **options), name)
        compiled, real = len(found), len(launched)
        found.clear()
        all_steps(of)
        all_features(of)
        sys.stdout.write(f"{name} {compiled} {real} {sum(found)} {len(found) - sum(found)}\n")
        launched.clear()
        found.clear()
        compile_for(lambda: sys.exit("warmed up twice"), name)
    sys.stdout.write(f"together {max(together)}\n")
    found.clear()
    compile_for(launch_gluon, "gluon")
    compiled = len(found)
    launch_gluon()
    sys.stdout.write(f"gluon {compiled} {len(found) - compiled} {sum(found[compiled:])}\n")
    found.clear()
    compile_for(launch_beside, "beside")
    sys.stdout.write(f"beside {len(found)}\n")
