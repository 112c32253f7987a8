"""Which adapters have a slot on the device, where there are fewer slots than adapters. No torch."""

from collections import Counter
from collections.abc import Iterable

from rosebatch.engine.scheduling.sequence import SequenceState


class ResidentAdapters:
    """Gives slots to the adapters of sequences that run.

    A slot is free once no running sequence has its adapter. Steps that are under way may still read it: what takes its
    place is copied behind them, in the order of the plans.

    Args:
        slots: counted from 1; 0 if all adapters are always there.
    """

    def __init__(self, slots: int = 0) -> None:
        self.slots = slots
        # By adapter, in the order in which they were loaded.
        self._slot_of: dict[int, int] = {}
        self._used: set[int] = set()

    def begin(self, running: Iterable[SequenceState]) -> None:
        """Look which adapters are in use, before sequences are admitted."""
        if self.slots:
            self._used = {sequence.spec.adapter for sequence in running} - {0}

    def admits(self, adapter: int) -> bool:
        """Whether a sequence with this adapter may begin to run: it is in use, or a slot is free. 0 is the model."""
        return not (self.slots and adapter) or adapter in self._used or len(self._used) < self.slots

    def take(self, adapter: int, waiting: Iterable[SequenceState]) -> int | None:
        """Let a sequence run that is admitted; returns the slot into which its adapter is to be loaded.

        None if it is there. Of the adapters without use, the one that the fewest waiting sequences have is replaced.
        """
        if not (self.slots and adapter):
            return None
        self._used.add(adapter)
        if adapter in self._slot_of:
            return None
        slot = len(self._slot_of) + 1
        if slot > self.slots:
            wanted = Counter(sequence.spec.adapter for sequence in waiting)
            unused = [each for each in self._slot_of if each not in self._used]
            slot = self._slot_of.pop(min(unused, key=wanted.__getitem__))
        self._slot_of[adapter] = slot
        return slot

    def reset(self) -> None:
        """All were dropped, and perhaps the last was not loaded."""
        self._slot_of.clear()
        self._used.clear()

    def check_integrity(self, running: Iterable[SequenceState]) -> None:
        """Assert that what runs is there, and no slot has two."""
        if self.slots:
            assert {sequence.spec.adapter for sequence in running} - {0} <= self._slot_of.keys()
            assert len({*self._slot_of.values()}) == len(self._slot_of) <= self.slots
