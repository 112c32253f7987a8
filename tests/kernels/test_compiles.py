"""What the interpreter accepts, the compiler may refuse: names that change type, numbers that become constants."""

import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import rosebatch_kernels
from rosebatch_kernels.common.device import HOPPER, SHARED_MEMORY, Device
from tests.helpers.checkout import python_path

SCRIPT = Path(__file__).with_name("compile_for_arch.py")
# The oldest Triton that pyproject.toml allows, see the Makefile.
FLOOR = Path(sys.prefix) / ".floor-triton"
# Kernels by group; those that need the shared memory of Hopper.
GROUPS = {
    "attention": {"_decode", "_prefill", "_prepare"},
    "invariant": {"_decode", "_prefill", "_product"},
    "attention_of_more_families": {"_decode", "_prefill", "_prepare", "_whole_norm"},
    "prompts_on_hopper": {"_prefill_hopper"},
    "shared_attention": {"_attend_shared", "_decode", "_prefill_shared"},
    "attention_of_e4m3": {"_append", "_attend_shared", "_decode", "_prefill", "_prefill_shared", "_prepare"},
    "gated_attention": {"_gated_attend_shared", "_gated_decode", "_gated_prefill", "_prepare"},
    "whole_prompts": {"_full_attend"},
    "delta_rule": {"_delta_convolve", "_delta_decode", "_delta_solve", "_delta_walk", "_gated_norm"},
    "layers": {
        "_activation", "_activation_mul", "_append", "_bias_residual", "_copy_blocks", "_norm", "_sigmoid_mul",
        "_uclip",
    },
    "fp8": {"_fp8_product", "_norm", "_quantize"},
    "int4": {"_int4_decode", "_int4_product", "_sum_parts"},
    "experts": {"_add_chunks", "_count_chunk", "_expert_product", "_place_chunk", "_route"},
    "experts_of_fp8": {"_add_chunks", "_count_chunk", "_expert_product", "_place_chunk", "_quantize"},
    "tokens": {
        "_adjust", "_advance", "_choose", "_count", "_mask", "_report", "_scale_and_cap", "_sum_segments", "_summarise",
    },
}  # fmt: skip
# Groups that not all architectures have. 103 has each instruction of "fp8".
ARCHITECTURES = {
    "prompts_on_hopper": (HOPPER,),
    "fp8": (89, 90, 100, 103, 120),
    "attention_of_e4m3": (89, 90, 100, 120),
    # Experts are decoded at load for the generation of 100.
    "experts_of_fp8": (89, 90, 120),
}
# Nothing is compiled for these: another of the generation, with no more shared memory, has the same sizes and launches.
ALIKE = {80: 86, 89: 86, 103: 100}
# Sizes, memory and shapes of products in tensor cores are those of 86 here too, and so were the bytes of shared memory
# of each form. Triton runs the passes that it has for 100, and kernels may wait for their predecessor.
CONSUMER_BLACKWELL = 120
# See ``compile_for_arch.py``.
FORMS = {86: "converted", HOPPER: "converted", CONSUMER_BLACKWELL: "firsts"}
STREAMED = {"_gated_product", "_logits", "_product"}
# Products of many rows on Hopper's own instruction, which Triton leaves for others without a word.
WGMMA = {
    "_attend_shared", "_delta_solve", "_delta_walk", "_expert_product", "_fp8_product", "_full_attend",
    "_gated_attend_shared", "_gated_prefill", "_gated_product", "_int4_product", "_logits", "_prefill",
    "_prefill_hopper", "_prefill_shared", "_product",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled():
    """Name, shared memory and matrix instruction of each kernel, from a process where Triton does not interpret.

    The oldest Triton that is allowed compiles for Hopper, if it is there; the installed one for all others.
    """
    with ExitStack() as stack:

        @cache
        def compiler(triton):
            # A tenth of the time is for the numbers of lines.
            own = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1", "PYTHONPATH": python_path(*triton)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            return stack.enter_context(subprocess.Popen([sys.executable, str(SCRIPT)], env=os.environ | own, **pipes))

        def run(arch, group, folder, *, oldest=True):
            process = compiler((FLOOR,) if oldest and arch == HOPPER and FLOOR.exists() else ())
            process.stdin.write(f"{arch} {group} {FORMS.get(arch, 'lowered')} {folder}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "0\n", (folder / "errors").read_text()[-3000:]
            return [line.split() for line in (folder / "kernels").read_text().splitlines()]

        yield run


@pytest.mark.whole
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arch", "group"),
    [
        (arch, group)
        for arch in SHARED_MEMORY
        for group in GROUPS
        if (arch in ARCHITECTURES[group] if group in ARCHITECTURES else arch not in ALIKE)
    ],
)
def test_kernels_compile_and_fit(compiled, arch, group, tmp_path):
    """On a card with less shared memory a launch failed; below Hopper there is no start before the predecessor ends.

    A form of each kernel in bf16 is compiled to the end, and for Hopper one of each dtype, but systems of the delta
    rule in fp32. The rest goes through Triton's own passes, in 16 bits for Hopper and for 86, or until the shared
    memory is known. A failure behind these points which another form of the kernel alone would bring out is not seen.
    For 120, a form is taken for each set of dtypes: see ``FORMS``.
    """
    pytest.importorskip("triton")
    lines = compiled(arch, group, tmp_path)
    names = GROUPS[group] | (STREAMED if group == "layers" and SHARED_MEMORY[arch] >= SHARED_MEMORY[HOPPER] else set())
    assert {name for name, *_ in lines} == names
    assert max(int(shared) for _, shared, _ in lines) <= SHARED_MEMORY[arch]
    if arch == HOPPER:
        assert {name for name, _, cores in lines if cores == "wgmma"} >= WGMMA & names
        if group == "experts_of_fp8":
            assert all(cores == "wgmma" for name, _, cores in lines if name == "_expert_product")


@pytest.mark.thorough
def test_gluon_of_the_installed_triton(compiled, tmp_path):
    """Names and arguments of Gluon, which is experimental, change from version to version."""
    pytest.importorskip("triton")
    lines = compiled(HOPPER, "prompts_on_hopper", tmp_path, oldest=False)
    assert {(name, cores) for name, _, cores in lines} == {("_prefill_hopper", "wgmma")}
    assert max(int(shared) for _, shared, _ in lines) <= SHARED_MEMORY[HOPPER]


@pytest.mark.whole
@pytest.mark.parametrize(("arch", "other"), [*ALIKE.items(), (CONSUMER_BLACKWELL, 86)])
def test_architectures_that_are_alike(arch, other):
    """Sizes or launches of its own were compiled for nobody. Triton's passes go by the generation.

    For 120, the launches are compiled once for each set of dtypes.
    """
    pytest.importorskip("triton")
    one, two = (Device.of_arch(each, 100) for each in (arch, other))
    # FlashInfer's module needs its package, and has no sizes.
    for name in (each.name for each in walk_packages(rosebatch_kernels.__path__, "rosebatch_kernels.")):
        table = None if name.endswith(".flashinfer") else getattr(import_module(name), "SIZES", None)
        assert table is None or table.of(one) == table.of(two), name
    assert one.shared_memory >= two.shared_memory
    if arch != CONSUMER_BLACKWELL:
        assert arch // 10 == other // 10
        assert (one.pdl, one.tma) == (two.pdl, two.tma)
