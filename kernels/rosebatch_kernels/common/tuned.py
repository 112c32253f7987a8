"""Forms that the tables of tuned sizes share."""

from typing import NamedTuple, TypeVar

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
