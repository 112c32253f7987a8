"""Which sequence has which row of the device's state, and what the device has yet to be told. No torch."""

import heapq
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from rosebatch.engine.plan import Chunk, StepPlan
from rosebatch.request import Sequence, Status
from rosebatch_kernels.feedback import layout

# No plan will have these again; those launched so far keep what they need of a slot.
_GONE = (Status.ENDING, Status.FINISHED)
_REALS, _INTEGERS = struct.Struct("<3f"), struct.Struct("<3i")


def batch_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes that decode steps are padded to: fine, because padding costs time and a graph only memory."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, *range(128, most, 32)]
    return (*(size for size in sizes if size < most), most)


@dataclass(slots=True)
class StateWrite:
    """Changes of the device's state, moves first.

    Attributes:
        moves: (from, to) rows; a row moved from is not read again.
        cells: flat index -> int32 value, see ``Slots``.
    """

    moves: list[tuple[int, int]] = field(default_factory=list)
    cells: dict[int, int] = field(default_factory=dict)


class Slots:
    """Rows of the state matrix ``[NUM_FIELDS, num_slots]``, behind which stands the block table ``[num_slots, width]``.

    A cell's flat index counts through both: field by field, then row by row of the table.

    Args:
        num_slots: most sequences at a time.
        width: most blocks of a sequence.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        self.num_slots = num_slots
        self.width = width
        self.buckets = batch_buckets(num_slots)
        self.slot_of: dict[Sequence, int] = {}
        self._free = list(range(num_slots))
        # The blocks that the device knows of each slot.
        self._known: list[list[int]] = [[] for _ in range(num_slots)]

    def update(self, plan: StepPlan) -> StateWrite:
        """Give the plan's sequences slots, take those of others back, and say what that changes on the device."""
        write = StateWrite()
        for sequence in plan.preempted:
            if sequence in self.slot_of:
                self._take_back(sequence, write)
        for sequence in [s for s in self.slot_of if s.status in _GONE]:
            self._take_back(sequence, write)
        for chunk in plan.chunks:
            if chunk.sequence not in self.slot_of:
                self.slot_of[chunk.sequence] = heapq.heappop(self._free)
        if plan.decode_steps:
            self._compact(plan.chunks, write)
        for chunk in plan.chunks:
            slot = self.slot_of[chunk.sequence]
            self._tell_blocks(slot, chunk.sequence.block_ids, write)
            if chunk.samples and not plan.decode_steps:
                self._tell_fields(slot, chunk, write)
        return write

    def bucket(self, chunks: Seq[Chunk]) -> int:
        """The batch size that holds all these sequences' slots."""
        return self._bucket(1 + max(self.slot_of[chunk.sequence] for chunk in chunks))

    def _bucket(self, rows: int) -> int:
        return next(size for size in self.buckets if size >= rows)

    def _take_back(self, sequence: Sequence, write: StateWrite) -> None:
        slot = self.slot_of.pop(sequence)
        heapq.heappush(self._free, slot)
        write.cells[self._cell(layout.LIMIT, slot)] = 0

    def _compact(self, chunks: Seq[Chunk], write: StateWrite) -> None:
        """Move the last rows into gaps, where the steps then fit a smaller bucket."""
        wanted = self._bucket(len(chunks))
        outside = [chunk.sequence for chunk in chunks if self.slot_of[chunk.sequence] >= wanted]
        if len(outside) > sum(slot < wanted for slot in self._free):
            # Sequences that are neither decoded nor gone stand in the way: their slots come free soon.
            return
        for sequence in outside:
            source, target = self.slot_of[sequence], heapq.heappop(self._free)
            self.slot_of[sequence] = target
            self._known[target] = self._known[source]
            write.moves.append((source, target))
            write.cells.pop(self._cell(layout.LIMIT, target), None)
            write.cells[self._cell(layout.LIMIT, source)] = 0
            heapq.heappush(self._free, source)

    def _tell_blocks(self, slot: int, blocks: list[int], write: StateWrite) -> None:
        known = self._known[slot]
        if known == blocks:
            return
        start = layout.NUM_FIELDS * self.num_slots + slot * self.width
        for index, block in enumerate(blocks):
            if index >= len(known) or known[index] != block:
                write.cells[start + index] = block
        self._known[slot] = list(blocks)

    def _tell_fields(self, slot: int, chunk: Chunk, write: StateWrite) -> None:
        sequence, last = chunk.sequence, chunk.start + chunk.length - 1
        sampling = sequence.request.sampling
        real = _bits(sampling.temperature, sampling.top_p, sampling.min_p)
        penalties = _bits(sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        values = {
            layout.POSITION: last,
            layout.NEXT: last + 1,
            layout.LIMIT: sequence.max_len - 1,
            layout.STOPS: int(not sampling.ignore_eos),
            layout.TEMPERATURE: real[0],
            layout.TOP_K: min(sampling.top_k, 2**31 - 1),
            layout.TOP_P: real[1],
            layout.MIN_P: real[2],
            layout.SEED_LOW: _signed(sampling.seed & 0xFFFFFFFF),
            layout.SEED_HIGH: _signed(sampling.seed >> 32),
            layout.PRESENCE: penalties[0],
            layout.FREQUENCY: penalties[1],
            layout.REPETITION: penalties[2],
            layout.MIN_POSITION: sequence.num_prompt_tokens + sampling.min_tokens,
        }
        for name, value in values.items():
            write.cells[name * self.num_slots + slot] = value

    def _cell(self, name: int, slot: int) -> int:
        return name * self.num_slots + slot


def _bits(*values: float) -> tuple[int, ...]:
    """The bits of three numbers as fp32, as signed integers."""
    return _INTEGERS.unpack(_REALS.pack(*values))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
