"""LoRA adapters by row: products to which the rows of each adapter add its own."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch.ops.ops import GATES, Linear, Scales
from rosebatch_kernels.adapters.layout import Rows as Rows
from rosebatch_kernels.adapters.layout import Stack as Stack
from rosebatch_kernels.common.device import device_of

# A ``[in] -> [r]`` and B ``[r] -> [out]``, which has the scale of both.
LowRankProducts = tuple[Linear, Linear]


# Ranks are filled up to a multiple of this.
_RANKS = 16


class AdapterRows:
    """Which rows of the step under way have which adapter. All linears of a model share one, which the runner sets.

    Attributes:
        of_slots: numbers of adapters, counted from 1, each with the numbers of its rows ``[R]`` int64.
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


class StackedRows:
    """The same for kernels, which a graph holds: the numbers are on the device alone.

    Args:
        count: slots of adapters. Each has one of its own, or they are loaded into slots as plans say.
        switches: of the run.
    """

    def __init__(self, count: int, switches: Switches) -> None:
        from rosebatch_kernels.adapters import kernel
        from rosebatch_kernels.adapters.sizes import SIZES

        device = device_of(torch.device("cuda"))
        sizes = SIZES.of(device).invariant() if switches.batch_invariant else SIZES.of(device)
        self.count = count
        self.add_: Callable[..., Tensor] = partial(kernel.add_, sizes=sizes, device=device)
        self.gated: Callable[..., Tensor] = partial(kernel.gated, sizes=sizes, device=device)
        self.sort: Callable[[Tensor], Rows] = partial(kernel.sort_rows, count=count, sizes=sizes, device=device)
        self._of: dict[int, Rows] = {}
        # A and B of all adapters on the host, pinned, and of those in slots on the device.
        self._shelves: list[tuple[Tensor, Tensor]] = []
        self._slot_of: dict[int, int] = {}

    def resident(self, of_all: Tensor, device: torch.device) -> Tensor:
        """``[N, ...]`` on the host, of all adapters -> what their slots have on the device: zeros at first."""
        there = torch.zeros(self.count, *of_all.shape[1:], dtype=of_all.dtype, device=device)
        self._shelves.append((of_all, there))
        return there

    def load(self, adapter: int, slot: int) -> None:
        """Put an adapter into a slot, behind all that was launched before; both are counted from 1."""
        for of_all, there in self._shelves:
            there[slot - 1].copy_(of_all[adapter - 1], non_blocking=True)
        self._slot_of[adapter] = slot

    def slot_of(self, adapter: int) -> int:
        """Where an adapter is that was loaded, or has a slot of its own; 0 is the model alone."""
        return self._slot_of.get(adapter, adapter)

    def set(self, *slots: Tensor) -> None:
        """Take the next step; without rows, none has an adapter.

        Args:
            slots: ``[T]`` int32, of each row, counted from 1; 0 is the model alone. Then of the rows that are left
                behind the last layer's attention, if these are fewer.
        """
        self._of = {len(each): self.sort(each) for each in slots}

    @property
    def is_empty(self) -> bool:
        """Whether no row has an adapter."""
        return not self._of

    def of(self, x: Tensor) -> Rows:
        """Those of an input ``[T, in]``."""
        return self._of[len(x)]


class Added(Protocol):
    """What adapters add to one product."""

    @property
    def is_empty(self) -> bool:
        """Whether no row of the step has an adapter."""
        ...

    def add_(self, out: Tensor, x: Tensor) -> Tensor:
        """Add to the product ``out [T, out]`` of ``x [T, in]`` in place."""
        ...

    def activates(self, activation: str) -> bool:
        """Whether ``activated`` serves this kernel's name of an activation."""
        ...

    def activated(self, out: Tensor, x: Tensor, activation: str) -> Tensor:
        """``add_``, and the activation."""
        ...


class AddedProducts:
    """By products, one adapter after the other.

    Args:
        slots: of each adapter; None for one that leaves this product as it is.
        rows: of the step.
    """

    def __init__(self, slots: Sequence[LowRankProducts | None], rows: AdapterRows) -> None:
        self.slots = slots
        self.rows = rows

    @property
    def is_empty(self) -> bool:
        """See ``Added``."""
        return not self.rows.of_slots

    def add_(self, out: Tensor, x: Tensor) -> Tensor:
        """See ``Added``."""
        for slot, rows in self.rows.of_slots:
            if (pair := self.slots[slot - 1]) is not None:
                a, b = pair
                out.index_add_(0, rows, b(a(x.index_select(0, rows))))
        return out

    def activates(self, activation: str) -> bool:
        """See ``Added``."""
        return False

    def activated(self, out: Tensor, x: Tensor, activation: str) -> Tensor:
        """See ``Added``."""
        raise NotImplementedError


class AddedStack:
    """By kernels, all adapters at once.

    Args:
        stack: of the adapters.
        rows: of the step.
    """

    def __init__(self, stack: Stack, rows: StackedRows) -> None:
        self.stack = stack
        self.rows = rows

    @property
    def is_empty(self) -> bool:
        """See ``Added``."""
        return self.rows.is_empty

    def add_(self, out: Tensor, x: Tensor) -> Tensor:
        """See ``Added``."""
        return self.rows.add_(out, x, self.stack, self.rows.of(x))

    def activates(self, activation: str) -> bool:
        """See ``Added``."""
        return self.stack.is_gated and activation in GATES.values()

    def activated(self, out: Tensor, x: Tensor, activation: str) -> Tensor:
        """See ``Added``."""
        return self.rows.gated(out, x, self.stack, self.rows.of(x), activation)


def stacked_ranks(ranks: int) -> int:
    """Ranks of a stack in which so many have room."""
    return -(-ranks // _RANKS) * _RANKS


class AdaptedLinear(Linear):
    """A product to which the rows of an adapter add ``B A x``. In steps without such rows, it is the product alone.

    Args:
        base: the model's own product.
        added: what adapters add to it.
    """

    def __init__(self, base: Linear, added: Added) -> None:
        self.base = base
        self.added = added
        self.bias = base.bias

    @property
    def input_group(self) -> int | None:  # type: ignore[override]
        """See ``Linear``. A multiplies in 16 bits."""
        return self.base.input_group if self.added.is_empty else None

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._added(self.base(x), x)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._added(self.base.product(x), x)

    def _added(self, out: Tensor, x: Tensor) -> Tensor:
        return out if self.added.is_empty else self.added.add_(out, x)

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """See ``Linear``."""
        return self.base.split(x, sizes) if self.added.is_empty else super().split(x, sizes)

    def in_one_order(self) -> Linear:
        """See ``Linear``."""
        return AdaptedLinear(self.base.in_one_order(), self.added)

    def divides(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return self.added.is_empty and self.base.divides(x)

    def parts(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self.base.parts(x)

    def has_scales(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return self.added.is_empty and self.base.has_scales(x)

    def unscaled(self, x: Tensor) -> tuple[Tensor, Scales]:
        """See ``Linear``."""
        return self.base.unscaled(x)

    def activates(self, x: Tensor, activation: str) -> bool:
        """See ``Linear``."""
        return self.base.activates(x, activation) if self.added.is_empty else self.added.activates(activation)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """See ``Linear``."""
        if self.added.is_empty:
            return self.base.activated(x, activation)
        return self.added.activated(self.base(x), x, activation)

    def adds_in_place(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return self.base.adds_in_place(x)

    def add_(self, x: Tensor, onto: Tensor) -> Tensor:
        """See ``Linear``. What an adapter adds comes after that: it is rounded once more."""
        return self._added(self.base.add_(x, onto), x)
