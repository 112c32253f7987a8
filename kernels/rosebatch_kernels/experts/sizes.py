"""Sizes of the expert products' programs."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.experts.packed import CHUNK, Packed


class Tile(NamedTuple):
    """A program's tile: rows of x, rows of the weight, products at a time, warps, pipeline stages, TMA for weights.

    With ``fp8``, the weight's fp8 numbers are multiplied with rows that are rounded to fp8.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    tma: bool = False
    fp8: bool = False


class Step(NamedTuple):
    """Tiles of both products, from so many tokens an expert on.

    ``packed`` is that of quantized weights, ``CHUNK`` deep, and the same for both products. ``scaled`` is that of the
    first product where its columns have several scales: it keeps four sums, and has registers for half a tile.
    ``fp8`` and ``fp8_blocks`` have those of fp8 weights where rows are rounded to fp8 too, with a scale for a row, or
    for ``CHUNK`` columns of it. None where reading the weights takes longest.
    """

    minimum: int
    up: Tile
    down: Tile
    packed: Tile
    fp8: tuple[Tile, Tile] | None = None
    fp8_blocks: tuple[Tile, Tile] | None = None
    scaled: Tile | None = None

    def tiles(self, up: Tensor | Packed, down: Tensor | Packed, device: Device) -> tuple[Tile, Tile]:
        """Tiles of both products, by their weights."""
        unit = _unit_of_fp8(up)
        # All products of a chunk have the same scale.
        own = self.fp8 if unit == 0 else self.fp8_blocks if unit == CHUNK else None
        if own and unit == _unit_of_fp8(down) and device.has_e4m3:
            return own
        has_parts = isinstance(up, Packed) and up.unit > 0 and up.form != "e2m1"
        first = (self.scaled if has_parts else None) or self.packed
        return (
            first if isinstance(up, Packed) else self.up,
            self.packed if isinstance(down, Packed) else self.down,
        )


def _unit_of_fp8(weight: Tensor | Packed) -> int | None:
    return weight.unit if isinstance(weight, Packed) and weight.form == "e4m3" else None


def _packed(rows: int, columns: int, warps: int, stages: int) -> Tile:
    return Tile(rows, columns, CHUNK, warps, stages)


def _fp8(*tiles: tuple[int, int, int, int]) -> tuple[Tile, Tile]:
    """Tiles of both products, each of so many rows, columns, warps and stages."""
    up, down = (Tile(rows, columns, CHUNK, warps, stages, fp8=True) for rows, columns, warps, stages in tiles)
    return up, down


_STEPS = (
    Step(
        96,
        Tile(128, 128, 64, 8, 4, True),
        Tile(128, 256, 64, 8, 4, True),
        _packed(128, 128, 8, 3),
        _fp8((128, 64, 8, 3), (128, 64, 8, 4)),
        _fp8((64, 64, 4, 3), (64, 128, 4, 3)),
        _packed(128, 64, 8, 3),
    ),
    Step(
        24,
        Tile(64, 64, 64, 4, 4, True),
        Tile(64, 128, 64, 4, 4, True),
        _packed(64, 64, 4, 4),
        _fp8((64, 64, 4, 3), (64, 128, 8, 4)),
        _fp8((64, 64, 4, 3), (64, 128, 8, 3)),
    ),
    Step(8, Tile(32, 32, 128, 4, 4), Tile(32, 64, 128, 4, 4), _packed(32, 64, 4, 4)),
    Step(0, Tile(16, 32, 128, 4, 4), Tile(16, 32, 128, 4, 5), _packed(16, 64, 4, 5)),
)
# What fits 99 KB of shared memory.
_SMALL_STEPS = (
    Step(
        24,
        Tile(64, 64, 64, 4, 3),
        Tile(64, 128, 64, 4, 3),
        _packed(64, 64, 4, 3),
        *(2 * (_fp8((64, 64, 4, 3), (64, 64, 4, 3)),)),
    ),
    Step(8, Tile(32, 32, 128, 4, 3), Tile(32, 64, 128, 4, 3), _packed(32, 64, 4, 3)),
    Step(0, Tile(16, 32, 128, 4, 3), Tile(16, 32, 128, 4, 4), _packed(16, 64, 4, 4)),
)
_WIDE = Step(0, Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2), _packed(16, 32, 4, 2))


@dataclass(frozen=True)
class Sizes:
    """Fastest of the candidates of ``benchmarks/kernels/experts.py``.

    Attributes:
        steps: tiles by T · k / E, largest least first, for 16-bit types.
        wide: tiles for fp32, which the tensor cores do not multiply exactly.
        chunk: pairs that one program of the sort places.
        max_exact: tokens up to which the parts are fp32; above, reading them would take longer than it is worth.
    """

    steps: tuple[Step, ...] = _STEPS
    wide: Step = _WIDE
    chunk: int = 128
    max_exact: int = 256

    def invariant(self) -> "Sizes":
        """The parts have one dtype, and rows are never rounded to fp8, for all numbers of tokens."""
        return replace(self, steps=tuple(step._replace(fp8=None, fp8_blocks=None) for step in self.steps), max_exact=0)

    def at(self, rows_per_expert: int, itemsize: int) -> Step:
        """The tiles for a call."""
        if itemsize == 4:
            return self.wide
        return next(step for step in self.steps if rows_per_expert >= step.minimum)


SIZES = table(Sizes(), sm_86=Sizes(steps=_SMALL_STEPS))
