"""The record of compiled kernels can hide no failure: whatever changes what comes of a kernel has it compiled."""

import re
from dataclasses import replace

import pytest
from packaging.version import Version

from rosebatch_kernels.common.device import HOPPER
from tests.helpers.checkout import ROOT
from tests.kernels import compile_record
from tests.kernels.compile_record import Compiler
from tests.kernels.compile_tasks import TASKS

pytest.importorskip("triton")

KERNEL = """
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tests.kernels.compiling import lowered_only

_FACTOR = tl.constexpr(2)


class Pair(NamedTuple):
    first: tl.tensor
    second: tl.tensor


@triton.jit
def _double(x):
    return x * _FACTOR


@triton.jit
def _kernel(out, x, N: tl.constexpr):
    offsets = tl.arange(0, N)
    pair = Pair(_double(tl.load(x + offsets)), 3.0)
    tl.store(out + offsets, pair.first)


def group():
    x = torch.empty(64)
    _kernel[(1,)](x, x, N=64, num_warps=1)
"""
CHANGES = {
    "kernel": ("x + offsets", "x + 1 + offsets"),
    "function that it calls": ("x * _FACTOR", "x + _FACTOR"),
    "constant of the module": ("constexpr(2)", "constexpr(3)"),
    "type of that constant": ("constexpr(2)", "constexpr(2.0)"),
    "order of a named tuple": (
        "    first: tl.tensor\n    second: tl.tensor",
        "    second: tl.tensor\n    first: tl.tensor",
    ),
    "argument": ("N=64", "N=32"),
    "dtype": ("torch.empty(64)", "torch.empty(64, dtype=torch.bfloat16)"),
    "alignment": ("torch.empty(64)", "torch.empty(65)[1:]"),
    "option": ("num_warps=1", "num_warps=2"),
    "form more": ("num_warps=1)", "num_warps=1)\n    _kernel[(1,)](x, x, N=16)"),
    "how far it is compiled": ("    _kernel[", "    with lowered_only():\n     _kernel["),
    "how it is compiled": ("x = ", "from tests.kernels import compiling\n    compiling.__file__ = __file__\n    x = "),
    "Triton": ("x = ", "triton.__version__ = '3.5.0'\n    x = "),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def compiler(folder):
    with Compiler(folder) as compiler:
        yield compiler


@pytest.fixture(scope="module")
def found(folder, compiler):
    """The kernel of a text: whether the record below has it, where the bytes are none that a compiler finds."""

    def find(name, text, arch=86, recorded=()):
        (folder / f"{name}.py").write_text(text)
        (kernel,) = compiler.kernels(arch, "group", recorded, module=name)
        return kernel

    return find


@pytest.fixture(scope="module")
def recorded(found):
    return replace(found("before", KERNEL), shared=-1)


@pytest.mark.thorough
@pytest.mark.whole
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_compiled(found, recorded, change):
    """With the old line, a kernel that fails now would be taken for one that was compiled."""
    before, after = CHANGES[change]
    assert before in KERNEL
    kernel = found(f"change_{[*CHANGES].index(change)}", KERNEL.replace(before, after), recorded=[recorded])
    assert kernel.digest != recorded.digest and kernel.shared >= 0


@pytest.mark.thorough
def test_another_architecture_is_compiled(found, recorded):
    kernel = found("of_another", KERNEL, 120, [replace(recorded, arch=120)])
    assert kernel.digest != recorded.digest and kernel.shared >= 0


@pytest.mark.thorough
def test_a_kernel_of_the_record_is_not_compiled(found, recorded):
    """Nor where it has moved: a line of text above all kernels of a file would have them compiled again."""
    assert found("moved", f"# Another line.\n{KERNEL}", recorded=[recorded]) == recorded
    # A kernel that fails does so whatever is recorded of others.
    with pytest.raises(AssertionError, match="no_such_name"):
        found("failing", KERNEL.replace("x * _FACTOR", "x * no_such_name"), recorded=[recorded])


def test_the_record_is_of_all_tasks():
    """With those of CI's versions: a task or version that is left has no line, and one that is new has all."""
    newest = re.search(r"^triton==(.*)$", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE)[1]
    oldest = re.search(r'"triton>=([^;"]*)', (ROOT / "pyproject.toml").read_text())[1]
    expected = {(Version(oldest if arch == HOPPER else newest), arch, group) for arch, group in TASKS}
    expected.add((Version(newest), HOPPER, "prompts_on_hopper"))
    kernels = compile_record.read()
    assert {(Version(each.triton), each.arch, each.group) for each in kernels} == expected
    assert len({(each.triton, each.arch, each.group, each.name) for each in kernels}) == len(kernels)
