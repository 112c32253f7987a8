"""What the interpreter accepts, the compiler may refuse: names that change type, numbers that become constants."""

import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from rosebatch_kernels.common.device import HOPPER, SHARED_MEMORY
from tests.helpers.checkout import python_path

SCRIPT = Path(__file__).with_name("compile_for_arch.py")
# The oldest Triton that pyproject.toml allows, see the Makefile.
FLOOR = Path(sys.prefix) / ".floor-triton"
# Kernels by group; those that take the most shared memory; those that need the shared memory of Hopper.
GROUPS = {
    "attention": {"_decode", "_prefill", "_prepare"},
    "attention_of_more_families": {"_decode", "_prefill", "_prepare", "_whole_norm"},
    "shared_attention": {"_attend_shared", "_decode", "_prefill_shared"},
    "gated_attention": {"_gated_attend_shared", "_gated_decode", "_gated_prefill", "_prepare"},
    "delta_rule": {"_delta_convolve", "_delta_decode", "_delta_solve", "_delta_walk", "_gated_norm"},
    "layers": {
        "_activation", "_activation_mul", "_append", "_bias_residual", "_copy_blocks", "_norm", "_sigmoid_mul",
        "_uclip",
    },
    "fp8": {"_fp8_product", "_quantize"},
    "int4": {"_int4_decode", "_int4_product"},
    "experts": {"_add_chunks", "_count_chunk", "_expert_product", "_place_chunk", "_route"},
    "tokens": {"_adjust", "_advance", "_choose", "_count", "_mask", "_scale_and_cap", "_summarise"},
}  # fmt: skip
LARGE = ("shared_attention", "int4", "experts")
# Architectures whose matrix instruction takes e4m3.
FP8 = (89, 90, 100, 103, 120)
# The instructions and sizes of another architecture, with as much shared memory at least: 86, 86 and 100.
ALIKE = (80, 89, 103)
# The sizes of 86. Triton has passes of its own for it, and kernels may wait for their predecessor.
SAME_SIZES = 120
STREAMED = {"_gated_product", "_logits", "_product"}
# Products of many rows on Hopper's own instruction, which Triton leaves for others without a word.
WGMMA = {
    "_attend_shared", "_delta_solve", "_delta_walk", "_fp8_product", "_gated_attend_shared", "_gated_prefill",
    "_gated_product", "_int4_product", "_logits", "_prefill", "_prefill_shared", "_product",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled():
    """Name, shared memory and matrix instruction of each kernel, from a process where Triton does not interpret.

    The oldest Triton that is allowed compiles for Hopper, if it is there; the installed one for all others.
    """
    with ExitStack() as stack:

        @cache
        def compiler(triton):
            own = {"TRITON_INTERPRET": "0", "PYTHONPATH": python_path(*triton)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            return stack.enter_context(subprocess.Popen([sys.executable, str(SCRIPT)], env=os.environ | own, **pipes))

        def run(arch, group, folder):
            process = compiler((FLOOR,) if arch == HOPPER and FLOOR.exists() else ())
            like = arch in ALIKE and group != "fp8"
            forms = "none" if like else "one" if arch == SAME_SIZES else "all"
            process.stdin.write(f"{arch} {group} {forms} {folder}\n")
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
        if (arch in FP8 if group == "fp8" else arch not in ALIKE or group in LARGE)
    ],
)
def test_kernels_compile_and_fit(compiled, arch, group, tmp_path):
    """On a card with less shared memory a launch failed; below Hopper there is no start before the predecessor ends.

    Where another architecture has the same sizes and instructions, a compilation ends once the shared memory is known:
    what follows would get what it got for that one. Where it has the same sizes alone, one form of each kernel and its
    dtypes goes on. Of the delta rule in fp32, the small form alone does. A failure behind that point which another form
    of the kernel alone would bring out is not seen.
    """
    pytest.importorskip("triton")
    lines = compiled(arch, group, tmp_path)
    names = GROUPS[group] | (STREAMED if group == "layers" and SHARED_MEMORY[arch] >= SHARED_MEMORY[HOPPER] else set())
    assert {name for name, *_ in lines} == names
    assert max(int(shared) for _, shared, _ in lines) <= SHARED_MEMORY[arch]
    if arch == HOPPER:
        assert {name for name, _, cores in lines if cores == "wgmma"} >= WGMMA & names
