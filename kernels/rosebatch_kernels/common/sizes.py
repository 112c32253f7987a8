"""Tables of kernels' sizes: by architecture, and by the size of what a kernel works on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from rosebatch_kernels.common.device import HOPPER, SHARED_MEMORY, Device

Value = TypeVar("Value")

# ``(minimum, value)`` pairs, largest least first: the value for each range of a size.
Steps = tuple[tuple[int, int], ...]


def value_at(steps: tuple[tuple[int, Value], ...], size: int) -> Value:
    """The value of the first pair whose least is at most ``size``."""
    return next(value for minimum, value in steps if size >= minimum)


class Program(NamedTuple):
    """Sizes of an attention kernel's program.

    Attributes:
        keys: of a tile.
        warps: of a program.
        stages: of the software pipeline.
        registers: of a thread at most; None leaves it to the compiler.
    """

    keys: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class Table(Generic[Value]):
    """The sizes of an operator's programs. ``rosebatch.ops`` takes those of a device once, and hands them to launchers.

    Attributes:
        entries: the fastest, by architecture. Those of Hopper were measured on an H100 80GB HBM3; all others only keep
            within the architecture's shared memory. Where the batch decides how sums are added, such sizes have a
            method ``invariant``: the same sizes with one order for all batches.
    """

    entries: Mapping[int, Value]

    @property
    def measured(self) -> Value:
        """The sizes of an H100."""
        return self.entries[HOPPER]

    def of(self, device: Device) -> Value:
        """The sizes for a device: of its architecture, else those that take the most of its shared memory.

        Of several such, the newest architecture's are taken. An operator whose measured sizes fit all has no others.
        """
        archs = sorted(self.entries, key=lambda arch: (SHARED_MEMORY[arch], arch))
        fitting = [arch for arch in archs if SHARED_MEMORY[arch] <= device.shared_memory]
        arch = device.arch if device.arch in archs else (fitting or archs)[-1 if fitting else 0]
        return self.entries[arch]


def table(measured: Value, **others: Value) -> Table[Value]:
    """A table of the fastest sizes: the measured ones, and those of other architectures, such as ``sm_86``."""
    return Table({HOPPER: measured, **{int(name.removeprefix("sm_")): sizes for name, sizes in others.items()}})


def sized(kernel: ModuleType, name: str, device: Device) -> Callable[..., Any]:
    """A launcher of a kernel's module, with the record of a device and the module's sizes for it."""
    return partial(getattr(kernel, name), sizes=kernel.SIZES.of(device), device=device)


def unmeasured(device: Device) -> str | None:
    """What to say of a GPU whose sizes were not measured there; None for one like an H100."""
    if device.arch == HOPPER:
        return None
    like = "an H100's" if device.shared_memory >= SHARED_MEMORY[HOPPER] else "smaller ones that fit its shared memory"
    return f"this GPU is sm_{device.arch}: kernel sizes are {like}; they were measured on an H100 only"
