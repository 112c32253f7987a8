"""Compiles kernels for GPUs on a machine without one. A line of input is a task: arguments of ``compile_group``.

Run by ``compile_record.py`` in a process of its own, where Triton does not interpret. The answer to a task is an exit
code. ``folder/kernels`` has then a line of ``Kernel`` for each kernel of the group; ``folder/errors`` says why the
code is not 0.
"""

import json
import multiprocessing
import os
import sys
from importlib import import_module
from pathlib import Path

import triton

from rosebatch_kernels.common.device import Device
from tests.kernels.compile_record import Kernel
from tests.kernels.compiling import digest, keep_forms


def compile_group(arch: int, others: str, module: str, group: str, recorded: list[str], folder: str) -> None:
    """A task, in a process of its own: compile kernels that no line of the record is of."""
    with (Path(folder) / "errors").open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    os.environ["TRITON_CACHE_DIR"] = folder
    forms = keep_forms(Device.of_arch(arch, 100), others)
    getattr(import_module(module), group)()
    known = {(kernel.name, kernel.digest): line for line in recorded if (kernel := Kernel.of(line))}
    lines = []
    for name, of_kernel in sorted(forms.items()):
        its_digest = digest(of_kernel)
        if (line := known.get((name, its_digest))) is None:
            shared, cores = zip(*(form.compile() for form in of_kernel), strict=True)
            results = its_digest, len(of_kernel), max(shared), sum(cores)
            line = str(Kernel(triton.__version__, arch, group, name, *results))
        lines.append(line)
    (Path(folder) / "kernels").write_text("\n".join(lines))


if __name__ == "__main__":
    # What is imported once takes longer than many a group.
    import_module("tests.kernels.kernel_forms")
    for task in sys.stdin:
        process = multiprocessing.get_context("fork").Process(target=compile_group, kwargs=json.loads(task))
        process.start()
        process.join()
        sys.stdout.write(f"{process.exitcode}\n")
        sys.stdout.flush()
