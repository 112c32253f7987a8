"""What becomes of a launch on a machine without a GPU: its form is kept, and compiled if nobody has yet.

A launch ends where Triton would compile. A form is all that Triton would take then, and how far it is compiled. The
first of each kernel is compiled to the end, which is one in bf16, for Hopper the first of each dtype. A task's
``others`` say what becomes of the rest. ``whole``: as the first. ``converted``: those in 16 bits go through all passes
of Triton's own, without LLVM and ptxas. ``lowered``: their shared memory is known. So it is for fp32. ``firsts``: it is
known of the first of each set of dtypes, and the rest is left out.
"""

import hashlib
import inspect
import re
import subprocess
import tempfile
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars, llvm, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import make_backend
from triton.runtime import cache, driver
from triton.runtime.jit import JITCallable, JITFunction

from benchmarks.kernels import launchers
from rosebatch_kernels.common.device import HOPPER, Device

make_llir, run = CUDABackend.make_llir, JITFunction.run
# A kernel that stands elsewhere in its file is the same, and no line numbers are compiled: see ``compile_record.py``.
JITCallable.starting_line_number = property(lambda _: 0, lambda *_: None)
# Within ``lowered_only``.
lowers_all = False


class StoppedError(Exception):
    """The shared memory of a kernel is known."""


def stop_at_once(*_):
    raise StoppedError


def run_and_stop(module, manager, *_):
    manager.run(module, "make_llir")
    raise StoppedError


def until(owner, step, stop):
    """Meanwhile, a compilation ends where ``make_llir`` takes a step, which ``stop`` is in place of."""

    def make_part(backend, module, metadata, options, capability):
        with patch.object(owner, step, partial(stop, module)), suppress(StoppedError):
            make_llir(backend, module, metadata, options, capability)
        metadata.update(name="-", shared=module.get_int_attr("ttg.shared"))
        return ""

    return patch.multiple(CUDABackend, make_llir=make_part, make_ptx=lambda *_: "", make_cubin=lambda *_: b"")


# How far a form is compiled. ``lowered``: its passes are run until memory is given out. Those after it add barriers and
# fences, which take none.
DEPTHS = {
    "whole": nullcontext,
    "converted": lambda: until(llvm, "to_module", stop_at_once),
    "lowered": lambda: until(nvidia.passes.ttnvgpuir, "add_proxy_fence_insertion", run_and_stop),
}


def make_ttgir(make, module, *options):
    """Without the pass that divides loops among warps, where none asks for it: it took a fifth of the time."""
    skips = "warp_specialize" not in str(module)
    with patch.object(passes.ttgpuir, "add_warp_specialize", lambda *_: None) if skips else nullcontext():
        return make(module, *options)


CUDABackend.make_ttgir = staticmethod(partial(make_ttgir, CUDABackend.make_ttgir))


def fenced(ttgir: str) -> bool:
    """Whether a fence stands between each wait for loads and the products that read them through the other proxy."""
    waits = False
    for line in ttgir.splitlines():
        if "fence.proxy.async" in line or "fence_async_shared" in line:
            waits = False
        elif "ttg.async_wait" in line:
            waits = True
        elif waits and ("warp_group_dot " in line or "tc_gen5_mma " in line):
            return False
    return True


def waits_for_sums(sass: str) -> bool:
    """Whether Hopper's sums are read behind the wait for them alone.

    A warp group commits its products in groups (``gsb0``), and waits until so many groups at most are not done.
    """
    groups: list[set[int]] = []
    registers: set[int] = set()
    for line in sass.splitlines():
        if product := re.search(r"HGMMA\.\d+x(\d+)x\d+\.F32\S* R(\d+),", line):
            first = int(product[2])
            registers |= set(range(first, first + int(product[1]) // 2))
            if "gsb0" in line:
                groups, registers = [*groups, registers], set()
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", line):
            groups = groups[max(0, len(groups) - int(wait[1], 16)) :]
        elif {int(each) for each in re.findall(r"\bR(\d+)\b", line)} & registers.union(*groups):
            return False
    return True


def _sass(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-sass", file.name], text=True)


@dataclass(frozen=True)
class Form:
    """What a launch has Triton compile, and how far (one of ``DEPTHS``)."""

    source: Any
    target: GPUTarget
    options: dict[str, Any]
    depth: str

    def key(self) -> str:
        """All that decides what comes of it.

        Triton's own key has the source of the kernel and of what it calls, the signature, the options and the
        architecture. Constants stand there as they are printed, and named tuples that a kernel makes do not.
        """
        backend = make_backend(self.target)
        options = backend.parse_options(self.options)
        own = cache.get_cache_key(self.source, backend, options, get_cache_invalidating_env_vars())
        values = [value for value, _ in self.source.fn.used_global_vals.values()]
        classes = [inspect.getsource(each) for each in values if not isinstance(each, triton.language.constexpr)]
        return "\n".join((self.depth, own, repr(sorted(self.source.constants.items())), *sorted(classes)))

    def compile(self) -> tuple[int, bool]:
        """Bytes of shared memory, and whether products are Hopper's own instruction, by Triton's name of it."""
        with DEPTHS[self.depth]():
            kernel = triton.compile(self.source, target=self.target, options=self.options)
        assert self.target.arch < HOPPER or fenced(kernel.asm["ttgir"]), "a product reads what may not be there yet"
        if self.target.arch == HOPPER and kernel.asm.get("cubin"):
            assert waits_for_sums(_sass(kernel.asm["cubin"])), "sums are read before they are there"
        return kernel.metadata.shared, "warp_group_dot" in kernel.asm["ttgir"]


def digest(forms: list[Form]) -> str:
    """Of all that decides what comes of a kernel's forms, this file among it."""
    # In Triton's own key it is the digest of all its files, which takes seconds.
    with patch.object(cache, "triton_key", lambda: triton.__version__):
        keys = [form.key() for form in forms]
    return hashlib.sha256("\n".join((Path(__file__).read_text(), *keys)).encode()).hexdigest()[:32]


def keep_forms(device: Device, others: str) -> dict[str, list[Form]]:
    """Make every launch end with its form, in a list by the kernel's name."""
    kept, met, dtypes_met = {}, set(), set()
    target = GPUTarget("cuda", device.arch, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )

    def keep(self, *args, grid, warmup, **options):
        values = (*args, *options.values())
        all_dtypes = {each.dtype for each in values if isinstance(each, torch.Tensor)}
        dtypes = all_dtypes & {torch.float16, torch.bfloat16}
        form = self.__name__, frozenset(dtypes) if device.arch == HOPPER else None
        of_dtypes = self.__name__, frozenset(all_dtypes)
        if others == "firsts" and of_dtypes in dtypes_met:
            return
        dtypes_met.add(of_dtypes)
        depth = "converted" if others == "converted" and dtypes else "lowered"
        if form not in met or others == "whole":
            depth = "whole"
        met.add(form)
        forms = kept.setdefault(self.__name__, [])

        def keep_form(source, target, options):
            forms.append(Form(source, target, options, "lowered" if lowers_all else depth))
            return self

        # Triton sets its own there.
        _ = self.device_caches[0]
        self.compile = keep_form
        run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = keep
    launchers.device_of = lambda _: device
    return kept


@contextmanager
def lowered_only():
    """No form is compiled further."""
    global lowers_all
    lowers_all = True
    yield
    lowers_all = False
