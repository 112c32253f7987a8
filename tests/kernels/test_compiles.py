"""What the interpreter accepts, the compiler may refuse: names that change type, numbers that become constants."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rosebatch_kernels.common.device import HOPPER, SHARED_MEMORY

SCRIPT = Path(__file__).with_name("compile_for_arch.py")
ROOT = SCRIPT.parents[2]
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
    "experts": {"_add_chunks", "_count_chunk", "_expert_product", "_place_chunk", "_route"},
    "tokens": {"_adjust", "_advance", "_choose", "_count", "_mask", "_scale_and_cap", "_summarise"},
}  # fmt: skip
LARGE = ("shared_attention", "experts")
# The instructions and sizes of another architecture, with as much shared memory at least: 86, 86 and 100.
ALIKE = (80, 89, 103)
# The sizes of 86. Triton has passes of its own for it, and kernels may wait for their predecessor.
SAME_SIZES = 120
STREAMED = {"_gated_product", "_logits", "_product"}
# Products of many rows on Hopper's own instruction, which Triton leaves for others without a word.
WGMMA = {
    "_attend_shared", "_delta_solve", "_delta_walk", "_gated_attend_shared", "_gated_prefill", "_gated_product",
    "_logits", "_prefill", "_prefill_shared", "_product",
}  # fmt: skip


def compiled(arch: int, group: str, folder: Path) -> list[list[str]]:
    """Name, shared memory and matrix instruction of each kernel, from a process where Triton does not interpret.

    The oldest Triton that is allowed compiles for Hopper, if it is there; the installed one for all others.
    """
    path = [FLOOR] if arch == HOPPER and FLOOR.exists() else []
    path += [ROOT, ROOT / "kernels"]
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    forms = "none" if arch in ALIKE else "one" if arch == SAME_SIZES else "all"
    command = [sys.executable, str(SCRIPT), str(arch), group, forms]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [line.split() for line in ran.stdout.splitlines()]


@pytest.mark.whole
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arch", "group"), [(arch, group) for arch in SHARED_MEMORY for group in (LARGE if arch in ALIKE else GROUPS)]
)
def test_kernels_compile_and_fit(arch, group, tmp_path):
    """On a card with less shared memory a launch failed; below Hopper there is no start before the predecessor ends.

    Where another architecture has the same sizes and instructions, LLVM and ptxas are left out: they would get what
    they got for that one, and they ask for no shared memory. Where it has the same sizes alone, they get one form of
    each kernel and its dtypes. A failure in them that another form of that kernel alone would bring out is not seen.
    """
    pytest.importorskip("triton")
    lines = compiled(arch, group, tmp_path)
    names = GROUPS[group] | (STREAMED if group == "layers" and SHARED_MEMORY[arch] >= SHARED_MEMORY[HOPPER] else set())
    assert {name for name, *_ in lines} == names
    assert max(int(shared) for _, shared, _ in lines) <= SHARED_MEMORY[arch]
    if arch == HOPPER:
        assert {name for name, _, cores in lines if cores == "wgmma"} >= WGMMA & names
