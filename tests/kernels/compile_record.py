"""The kernels that were compiled for all architectures. ``make compiled`` compiles what is not in the record.

A line of ``compiled.txt`` is a kernel as a group of launches has it for an architecture. Its digest is of all that
decides what comes of it (see ``compiling.py``), so a kernel of that digest is not compiled again: a change of any of
it is another digest. Lines are written for kernels that were compiled without an error, with what came of them.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path

from rosebatch_kernels.common.device import HOPPER
from tests.helpers.checkout import python_path
from tests.kernels.compile_tasks import TASKS, others_of

RECORD = Path(__file__).with_name("compiled.txt")
# The oldest Triton that pyproject.toml allows, see the Makefile.
FLOOR = Path(sys.prefix) / ".floor-triton"


@dataclass(frozen=True, order=True)
class Kernel:
    """A line of the record.

    Args:
        triton: the version that compiled it.
        arch, group: of the task.
        name: of the kernel.
        digest: see ``compiling.digest``.
        forms: how many were compiled.
        shared: bytes of shared memory that the largest form takes.
        wgmma: how many forms have Hopper's own instruction for products.
    """

    triton: str
    arch: int
    group: str
    name: str
    digest: str
    forms: int
    shared: int
    wgmma: int

    @classmethod
    def of(cls, line: str) -> "Kernel":
        return cls(*(field.type(each) for field, each in zip(fields(cls), line.split(), strict=True)))

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))


def read() -> list[Kernel]:
    """The lines of the record."""
    return [Kernel.of(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


class Compiler:
    """A process where Triton does not interpret, which compiles in forks. It ends at the end of ``with``.

    Args:
        folders: before all others of its path, such as another Triton's.
    """

    def __init__(self, *folders: Path) -> None:
        # A tenth of the time is for the numbers of lines.
        own = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1", "PYTHONPATH": python_path(*folders)}
        command = [sys.executable, "-m", "tests.kernels.compile_for_arch"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=os.environ | own, **pipes)

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def kernels(
        self, arch: int, group: str, recorded: Iterable[Kernel], module: str = "tests.kernels.kernel_forms"
    ) -> list[Kernel]:
        """All that a function of a module launches: kernels of the record as they are there, others compiled."""
        own = [str(kernel) for kernel in recorded if (kernel.arch, kernel.group) == (arch, group)]
        task = {"arch": arch, "others": others_of(arch, group), "module": module, "group": group, "recorded": own}
        with tempfile.TemporaryDirectory() as folder:
            self._process.stdin.write(json.dumps(task | {"folder": folder}) + "\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline() == "0\n", (Path(folder) / "errors").read_text()[-3000:]
            return [Kernel.of(line) for line in (Path(folder) / "kernels").read_text().splitlines()]


@contextmanager
def compilers() -> Iterator[Callable[[int | None], Compiler]]:
    """By architecture: the oldest Triton compiles for Hopper, if it is there, and the installed one for all others."""
    with ExitStack() as stack:
        compiler = cache(lambda *folders: stack.enter_context(Compiler(*folders)))
        yield lambda arch: compiler(FLOOR) if arch == HOPPER and FLOOR.exists() else compiler()


if __name__ == "__main__":
    before = read()
    with compilers() as compiler_for:
        found = [kernel for arch, group in TASKS for kernel in compiler_for(arch).kernels(arch, group, before)]
        # Names and arguments of Gluon, which is experimental, change from version to version.
        found += compiler_for(None).kernels(HOPPER, "prompts_on_hopper", before)
    RECORD.write_text("".join(f"{kernel}\n" for kernel in sorted(found)))
    sys.stdout.write(f"compiled {len(set(found) - set(before))} kernels of {len(found)}\n")
