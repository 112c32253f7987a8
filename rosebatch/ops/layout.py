"""How the numbers of a quantized matrix share their scales."""

from dataclasses import dataclass

from rosebatch_kernels.int4.layout import GROUPS

# Most columns that share a scale in the products of 4-bit integers.
_GROUP = max(GROUPS)


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

    @property
    def is_fp8(self) -> bool:
        """Whether numbers are e4m3."""
        return self.floats and self.bits == 8

    @property
    def bytes(self) -> float:
        """Bytes of a number where a device keeps it, with its share of scale and zero; a row's scale does not count."""
        rows, columns = self.block
        if self.is_fp8:
            return 1 + (4 / (rows * columns) if rows and columns else 0)
        # The kernel has 4 bits for fewer, scales of 16 bits, and its own groups.
        return max(self.bits, 4) / 8 + (6 if self.zeros else 2) / min(columns or _GROUP, _GROUP)


# The layout of matrices that a run rounds itself.
FP8_ROWS = Layout(8, True, (1, 0))


@dataclass(frozen=True, slots=True)
class MatrixBytes:
    """Bytes of a weight in a layer's matrices, as a device keeps them.

    Attributes:
        layers: of matrices that all tokens are multiplied with.
        experts: of routed experts.
        fp8: whether inputs and weights of the former are multiplied in fp8.
    """

    layers: float
    experts: float
    fp8: bool = False
