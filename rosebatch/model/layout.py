"""How the numbers of a quantized matrix share their scales."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of few bits, in blocks with a scale each.

    Attributes:
        bits: of a number.
        floats: whether numbers are floats, e4m3 or e2m1; else integers.
        block: rows and columns that share a scale, 0 for all.
        zeros: whether a block has a zero beside its scale.
        of_experts: whether routed experts alone are quantized.
    """

    bits: int
    floats: bool
    block: tuple[int, int]
    zeros: bool = False
    of_experts: bool = False

    def __str__(self) -> str:
        rows, columns = self.block
        numbers = f"{'fp' if self.floats else 'int'}{self.bits}"
        if not columns:
            return f"{numbers}, a scale a {'row' if rows else 'matrix'}"
        return f"{numbers}, groups of {columns}" if rows == 1 else f"{numbers}, blocks of {rows} x {columns}"
