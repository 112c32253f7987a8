"""LoRA adapters by row: products to which the rows of each adapter add its own."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rosebatch.ops.ops import Linear, Scales

# A ``[in] -> [r]`` and B ``[r] -> [out]``, which has the scale of both.
LowRankProducts = tuple[Linear, Linear]


class AdapterRows:
    """Which rows of the step under way have which adapter. All linears of a model share one, which the runner sets.

    Attributes:
        of_slots: slots of adapters, counted from 1, each with the numbers of its rows ``[R]`` int64.
    """

    def __init__(self) -> None:
        self.of_slots: Sequence[tuple[int, Tensor]] = ()

    def set(self, chunks: Iterable[tuple[int, int]], device: torch.device) -> bool:
        """Take the next step: slot and rows of each of its chunks, one after the other. Slot 0 is the model alone.

        Returns:
            whether any row has an adapter.
        """
        rows: dict[int, list[int]] = {}
        start = 0
        for slot, count in chunks:
            if slot:
                rows.setdefault(slot, []).extend(range(start, start + count))
            start += count
        self.of_slots = [(slot, torch.tensor(own, device=device)) for slot, own in sorted(rows.items())]
        return bool(rows)


class AdaptedLinear(Linear):
    """A product to which the rows of an adapter add ``B A x``. In steps without such rows, it is the product alone.

    Args:
        base: the model's own product.
        slots: of each adapter; None for one that leaves this product as it is.
        rows: of the step.
    """

    def __init__(self, base: Linear, slots: Sequence[LowRankProducts | None], rows: AdapterRows) -> None:
        self.base = base
        self.slots = slots
        self.rows = rows
        self.bias = base.bias

    @property
    def input_group(self) -> int | None:  # type: ignore[override]
        """See ``Linear``. A multiplies in 16 bits."""
        return None if self.rows.of_slots else self.base.input_group

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._added(self.base(x), x)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._added(self.base.product(x), x)

    def _added(self, out: Tensor, x: Tensor) -> Tensor:
        for slot, rows in self.rows.of_slots:
            if (pair := self.slots[slot - 1]) is not None:
                a, b = pair
                out.index_add_(0, rows, b(a(x.index_select(0, rows))))
        return out

    def in_one_order(self) -> Linear:
        """See ``Linear``."""
        return AdaptedLinear(self.base.in_one_order(), self.slots, self.rows)

    def divides(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return not self.rows.of_slots and self.base.divides(x)

    def parts(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self.base.parts(x)

    def has_scales(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return not self.rows.of_slots and self.base.has_scales(x)

    def unscaled(self, x: Tensor) -> tuple[Tensor, Scales]:
        """See ``Linear``."""
        return self.base.unscaled(x)

    def activates(self, x: Tensor, activation: str) -> bool:
        """See ``Linear``."""
        return not self.rows.of_slots and self.base.activates(x, activation)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """See ``Linear``."""
        return self.base.activated(x, activation)

    def adds_in_place(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return not self.rows.of_slots and self.base.adds_in_place(x)

    def add_(self, x: Tensor, onto: Tensor) -> Tensor:
        """See ``Linear``."""
        return self.base.add_(x, onto)
