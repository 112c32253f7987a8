"""Which sequence has which row of the device's state, and which cells of it change with a plan. No torch."""

import heapq
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from rosebatch.core.sampling_params import GREEDY, SamplingParams
from rosebatch.engine.plan import BlockChange, Chunk, DecodeWindow, SequenceSpec, StepPlan
from rosebatch_kernels.feedback import layout

# Sampling parameters as the layout has them: the seed in two fields.
_SAMPLING, _INTEGERS = struct.Struct("<iififfQfff"), struct.Struct("<11i")


def batch_buckets(limit: int) -> tuple[int, ...]:
    """Batch sizes that decode steps are padded to: many, because padding costs time, and a graph only memory."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, *range(128, 256, 32), *range(256, limit, 64)]
    return (*(size for size in sizes if size < limit), limit)


@dataclass(slots=True)
class StateWrite:
    """Changes of the device's state; moves come first.

    Attributes:
        moves: (from, to) rows; a row moved from is not read again.
        cells: flat index -> int32 value, see ``Slots``.
        rollovers: the same, of blocks that follow a full one in decode steps.
        many: flat indices, int64, and their values, int32: of prompts, which have dozens each. None is a cell, too.
    """

    moves: list[tuple[int, int]] = field(default_factory=list)
    cells: dict[int, int] = field(default_factory=dict)
    rollovers: dict[int, int] = field(default_factory=dict)
    many: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


class Slots:
    """Columns of the state ``[NUM_FIELDS, num_slots]``, and rows of the block tables ``[groups, num_slots, width]``.

    A cell's flat index counts through the state field by field, then through the tables row by row.

    Args:
        num_slots: maximum number of sequences.
        width: maximum number of blocks of a sequence.
        keeps_tables: whether the host keeps the block tables of the first group too.

    Attributes:
        specs: the specs of all sequences with a slot, by id.
        slot_of: their slots, by id.
        tables: ``[num_slots, width]`` int32, the block tables of the first group; None if they are not kept.
        state_of: by slot, the number of its sequence's states. It moves with the sequence, the states do not.
    """

    def __init__(self, num_slots: int, width: int, *, keeps_tables: bool = False) -> None:
        self.num_slots = num_slots
        self.width = width
        self.buckets = batch_buckets(num_slots)
        self.specs: dict[int, SequenceSpec] = {}
        self.slot_of: dict[int, int] = {}
        self.tables = np.zeros((num_slots, width), np.int32) if keeps_tables else None
        self.state_of = list(range(num_slots))
        self._free = list(range(num_slots))
        # Mostly, rows have the same parameters.
        self._last: tuple[SamplingParams, tuple[int, ...]] = GREEDY, _fields_of(GREEDY)

    def update(self, plan: StepPlan) -> StateWrite:
        """Take slots back from released sequences, give some to started ones; returns what changes on the device."""
        write = StateWrite()
        if plan.reset:
            self._reset(write)
        for sequence_id in plan.released:
            self._take_back(sequence_id, write)
        for spec in plan.started:
            self.specs[spec.id] = spec
            self.slot_of[spec.id] = heapq.heappop(self._free)
        if isinstance(plan, DecodeWindow):
            if not plan.knows:
                self._compact([row.id for row in plan.rows], write)
            copies = {(group, copy) for group, _, copy in plan.copies}
            self._write_fields([(row.id, row.start + 1) for row in plan.rows if row.resumed], write)
            for row in plan.rows:
                if row.resumed:
                    write.cells[self._cell(layout.TOKEN, self.slot_of[row.id])] = row.resumed[-1]
                for change in row.blocks:
                    group, _, blocks = change
                    cells = write.cells if (group, blocks[0]) in copies else write.rollovers
                    self._write_blocks(row.id, change, cells)
        else:
            self._write_all_blocks(plan.chunks, write)
            sampled = [chunk for chunk in plan.chunks if chunk.sampled]
            assert all([chunk.sampled == 1 for chunk in sampled]), "no runner verifies drafts"  # noqa: C419 (takes less)
            # A property would take as long again.
            self._write_fields([(chunk.id, chunk.start + len(chunk.token_ids)) for chunk in sampled], write)
        return write

    def states_of(self, sequence_id: int) -> int:
        """The number of a sequence's states."""
        return self.state_of[self.slot_of[sequence_id]]

    def bucket(self, ids: Sequence[int]) -> int:
        """The batch size that holds all these sequences' slots."""
        return self._bucket(1 + max([self.slot_of[sequence_id] for sequence_id in ids]))

    def _bucket(self, rows: int) -> int:
        return next(size for size in self.buckets if size >= rows)

    def _reset(self, write: StateWrite) -> None:
        self.specs.clear()
        self.slot_of.clear()
        self._free = list(range(self.num_slots))
        write.cells |= {self._cell(layout.LIMIT, slot): 0 for slot in self._free}

    def _take_back(self, sequence_id: int, write: StateWrite) -> None:
        slot = self.slot_of.pop(sequence_id)
        heapq.heappush(self._free, slot)
        if self.specs.pop(sequence_id).generates:
            # Others never had fields.
            write.cells[self._cell(layout.LIMIT, slot)] = 0

    def _compact(self, ids: Sequence[int], write: StateWrite) -> None:
        """Move the last rows into gaps if the steps then fit a smaller bucket."""
        for wanted in self.buckets[self.buckets.index(self._bucket(len(ids))) :]:
            outside = [sequence_id for sequence_id in ids if self.slot_of[sequence_id] >= wanted]
            # Slots of sequences that are neither decoded nor released may be in the way. They come free soon.
            if not outside or len(outside) <= sum(slot < wanted for slot in self._free):
                break
        for sequence_id in outside:
            source, target = self.slot_of[sequence_id], heapq.heappop(self._free)
            self.slot_of[sequence_id] = target
            write.moves.append((source, target))
            if self.tables is not None:
                self.tables[target] = self.tables[source]
            write.cells.pop(self._cell(layout.LIMIT, target), None)
            write.cells[self._cell(layout.LIMIT, source)] = 0
            self.state_of[source], self.state_of[target] = self.state_of[target], self.state_of[source]
            write.cells[self._cell(layout.STATE, source)] = self.state_of[source]
            heapq.heappush(self._free, source)

    def _write_blocks(self, sequence_id: int, change: BlockChange, cells: dict[int, int]) -> None:
        slot, (group, first, blocks) = self.slot_of[sequence_id], change
        place = (layout.NUM_FIELDS + group * self.width) * self.num_slots + slot * self.width + first
        cells.update(zip(range(place, place + len(blocks)), blocks, strict=True))
        if self.tables is not None and group == 0:
            self.tables[slot, first : first + len(blocks)] = blocks

    def _write_all_blocks(self, chunks: Sequence[Chunk], write: StateWrite) -> None:
        changes = [(self.slot_of[chunk.id], *change) for chunk in chunks for change in chunk.blocks]
        if not changes:
            return
        counts = np.array([len(blocks) for _, _, _, blocks in changes])
        firsts = np.array([(group * self.num_slots + slot) * self.width + first for slot, group, first, _ in changes])
        places = np.repeat(firsts - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
        values = np.fromiter(chain.from_iterable([blocks for _, _, _, blocks in changes]), np.int32, len(places))
        if self.tables is not None:
            own = places < self.tables.size
            self.tables.reshape(-1)[places[own]] = values[own]
        write.many.append((layout.NUM_FIELDS * self.num_slots + places, values))

    def _write_fields(self, rows: Sequence[tuple[int, int]], write: StateWrite) -> None:
        """All fields but the token and the place of states, for sequences whose tokens before an end are known."""
        if not rows:
            return
        slots, specs = [self.slot_of[i] for i, _ in rows], [self.specs[i] for i, _ in rows]
        values = np.empty((layout.STATE - layout.POSITION, len(rows)), np.int32)
        values[layout.NEXT - layout.POSITION] = [end for _, end in rows]
        values[0] = values[layout.NEXT - layout.POSITION] - 1
        values[layout.LIMIT - layout.POSITION] = [(spec.restart_len or spec.max_len) - 1 for spec in specs]
        values[layout.STOPS - layout.POSITION : -1] = np.array([self._fields_of(s.sampling) for s in specs], np.int32).T
        values[-1] = [len(spec.prompt_token_ids) + spec.sampling.min_tokens for spec in specs]
        places = np.arange(layout.POSITION, layout.STATE)[:, None] * self.num_slots + np.array(slots)
        for slot in slots:
            # Perhaps of the slot's last sequence.
            write.cells.pop(self._cell(layout.LIMIT, slot), None)
        write.many.append((places.reshape(-1), values.reshape(-1)))

    def _fields_of(self, sampling: SamplingParams) -> tuple[int, ...]:
        if sampling is not self._last[0]:
            self._last = sampling, _fields_of(sampling)
        return self._last[1]

    def _cell(self, name: int, slot: int) -> int:
        return name * self.num_slots + slot


def _fields_of(sampling: SamplingParams) -> tuple[int, ...]:
    """The fields from ``STOPS`` to ``REPETITION``, in the order of the layout."""
    packed = _SAMPLING.pack(
        not sampling.ignore_eos,
        sampling.adjusts,
        sampling.temperature,
        min(sampling.top_k, 2**31 - 1),
        sampling.top_p,
        sampling.min_p,
        sampling.seed or 0,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    return _INTEGERS.unpack(packed)
