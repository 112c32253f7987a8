"""What the interpreter accepts, the compiler may refuse: names that change type, numbers that become constants."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
# Shared memory that a block can have on a Hopper GPU, in bytes.
MAX_SHARED = 227 * 1024
KERNELS = {
    "_activation", "_activation_mul", "_add_chunks", "_adjust", "_advance", "_append", "_attend_shared",
    "_bias_residual", "_choose", "_copy_blocks", "_count", "_count_chunk", "_decode", "_delta_convolve",
    "_delta_decode", "_delta_solve", "_delta_walk", "_expert_product", "_gated_attend_shared", "_gated_decode",
    "_gated_norm", "_gated_prefill", "_gated_product", "_logits", "_mask", "_norm", "_place_chunk", "_prefill",
    "_prefill_shared", "_prepare", "_product", "_route", "_scale_and_cap", "_sigmoid_mul", "_summarise", "_uclip",
    "_whole_norm",
}  # fmt: skip


@pytest.mark.thorough
def test_all_kernels_compile_for_a_hopper_gpu(tmp_path):
    """Every launcher, in a process where Triton does not interpret; no GPU is needed."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert {name for name, *_ in lines} == KERNELS
    assert max(int(shared) for _, shared, _ in lines) <= MAX_SHARED
    # Products of many rows on Hopper's own instruction, which Triton leaves for others without a word.
    assert {name for name, _, cores in lines if cores == "wgmma"} >= {
        "_attend_shared", "_delta_solve", "_delta_walk", "_gated_attend_shared", "_gated_prefill", "_gated_product",
        "_logits", "_prefill", "_prefill_shared", "_product",
    }  # fmt: skip
