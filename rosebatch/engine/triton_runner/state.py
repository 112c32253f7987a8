"""The state of all running sequences on the device. A decode step reads and advances it; the host changes few cells."""

from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosebatch.engine.plan import POOL_TOKENS
from rosebatch.engine.sampling.features import Features
from rosebatch.engine.sampling.logits import SampledRow, bias_cells, count_cells
from rosebatch.engine.sampling.logprobs import ROW
from rosebatch.engine.staging import Staging
from rosebatch.engine.triton_runner.slots import StateWrite
from rosebatch_kernels.feedback import layout

# Of a sequence in which drafts are found: a longer one has none.
MOST_TOKENS = 1 << 14
# Of a row of known tokens: its slot comes behind the fields that decode steps change.
_SLOT = layout.LIMIT + 1
_ROW_FIELDS = _SLOT + 1


class KnownTokens(NamedTuple):
    """Known tokens of a sequence that one step computes.

    Attributes:
        slot: the sequence's.
        start: position of the first one.
        token_ids: 32 bits each.
        limit: position at which its decode steps end.
    """

    slot: int
    start: int
    token_ids: "array[int]"
    limit: int


def draft_bytes(num_slots: int, most_len: int) -> int:
    """Of the tokens in which drafts are found.

    Args:
        num_slots: maximum number of sequences.
        most_len: tokens of a sequence.
    """
    return 4 * num_slots * min(most_len, MOST_TOKENS)


class DeviceState:
    """``fields [NUM_FIELDS, num_slots]`` int32 (see ``rosebatch_kernels.feedback.layout``) and the block tables.

    Args:
        num_slots: maximum number of sequences.
        width: maximum number of blocks of a sequence.
        window: steps whose tokens are kept until they are fetched.
        vocab_size: width of the logits.
        num_groups: groups of layers, each with its own block tables.
        most_len: tokens of a sequence.

    Attributes:
        block_tables: ``[groups, num_slots, width]`` int32.
        token_counts, bias: ``[num_slots, V]`` int32 and fp32, see ``rosebatch_kernels.logits``; empty until a sequence
            needs them.
        rotary_shifts: ``[num_slots]`` int32, what rotary positions are beyond the places of tokens.
        adapters: ``[num_slots]`` int32, the slot of each sequence's adapter, counted from 1; 0 for the model alone.
        tokens: ``[num_slots, W]`` int32, the tokens of each sequence, in which drafts are found; empty until needed.
        firsts, distances: ``[num_slots]`` int32, see ``rosebatch_kernels.drafts``.
        answers: ``[1 + POOL_TOKENS]`` int32, see ``rosebatch_kernels.drafts``.
        drafted: ``[NUM_FIELDS, num_slots]`` int32, the fields of the rows of a step with several of a sequence.
        row_slots: ``[num_slots]`` int32, the slots of the rows of a step of known tokens.
        logprobs: ``[window + 1, num_slots, ROW]`` int32, see ``rosebatch.engine.sampling.logprobs``: decode steps in
            the places of ``history``, a packed step in the last one; empty until needed.
    """

    def __init__(
        self,
        num_slots: int,
        width: int,
        window: int,
        device: torch.device,
        vocab_size: int = 0,
        num_groups: int = 1,
        most_len: int = 0,
    ) -> None:
        cells = (layout.NUM_FIELDS + num_groups * width) * num_slots
        self._cells = torch.zeros(cells, dtype=torch.int32, device=device)
        self.fields = self._cells[: layout.NUM_FIELDS * num_slots].view(layout.NUM_FIELDS, num_slots)
        self.fields[layout.STATE] = torch.arange(num_slots)
        self.block_tables = self._cells[layout.NUM_FIELDS * num_slots :].view(num_groups, num_slots, width)
        self.history = torch.full((window, num_slots), -1, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.rotary_shifts = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.adapters = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.vocab_size = vocab_size
        self.token_counts = torch.empty(0, dtype=torch.int32, device=device)
        self.bias = torch.empty(0, dtype=torch.float32, device=device)
        self.logprobs = torch.empty(0, dtype=torch.int32, device=device)
        self.tokens = torch.empty(0, dtype=torch.int32, device=device)
        self.answers = torch.zeros(1 + POOL_TOKENS, dtype=torch.int32, device=device)
        self.firsts = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.distances = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.drafted = torch.zeros_like(self.fields)
        self.row_slots = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._most_tokens = min(most_len, MOST_TOKENS)

    def allocate(self, features: Features) -> None:
        """Allocate what these features read and write; most runs need none of it."""
        slots, device = self.fields.shape[1], self.fields.device
        if features.adjusts and not len(self.token_counts):
            self.token_counts = torch.zeros(slots, self.vocab_size, dtype=torch.int32, device=device)
        if features.biased and not len(self.bias):
            self.bias = torch.zeros(slots, self.vocab_size, dtype=torch.float32, device=device)
        if features.logprobs is not None and not len(self.logprobs):
            window = len(self.history)
            self.logprobs = torch.zeros(window + 1, slots, ROW, dtype=torch.int32, device=device)

    def allocate_tokens(self) -> None:
        """Allocate the tokens in which drafts are found; most runs need none."""
        if not len(self.tokens):
            slots, device = self.fields.shape[1], self.fields.device
            self.tokens = torch.zeros(slots, self._most_tokens, dtype=torch.int32, device=device)

    def begins(self, features: Features) -> bool:
        """Whether ``set_tokens`` has anything to set for sequences that begin to be sampled with these features."""
        return features.adjusts or len(self.bias) > 0

    @contextmanager
    def tables_of(self, slots: int) -> Iterator[None]:
        """Meanwhile, the first slots have tables of all features, and no others."""
        before = self.token_counts, self.bias, self.logprobs
        self.token_counts, self.bias = (like.new_zeros(slots, self.vocab_size) for like in before[:2])
        self.allocate(Features(logprobs=0))
        try:
            yield
        finally:
            self.token_counts, self.bias, self.logprobs = before

    def apply(self, write: StateWrite, staging: Staging) -> None:
        """Carry out the host's changes after the work launched before: all cells in one write."""
        self._move(write, staging)
        self._write(write.cells | write.rollovers, staging, write.many)

    def apply_rollovers_one_by_one(self, write: StateWrite, staging: Staging) -> None:
        """The same with one write for each rollover, to measure against one write for all (source: article S1)."""
        self._move(write, staging)
        self._write(write.cells, staging, write.many)
        for index, block in write.rollovers.items():
            self._write({index: block}, staging)

    def _move(self, write: StateWrite, staging: Staging) -> None:
        if write.moves:
            sources, targets = staging.send(*np.array(write.moves, np.int32).T)
            self.fields.index_copy_(1, targets.long(), self.fields.index_select(1, sources))
            others = self.token_counts, self.bias, self.tokens, self.firsts, self.distances
            for table in (*self.block_tables, self.rotary_shifts, self.adapters, *others):
                if len(table):
                    table.index_copy_(0, targets.long(), table.index_select(0, sources))

    def _write(self, cells: Mapping[int, int], staging: Staging, many: Seq[tuple[np.ndarray, np.ndarray]] = ()) -> None:
        if cells or many:
            indices = np.fromiter(cells.keys(), np.int64, len(cells))
            values = np.fromiter(cells.values(), np.int32, len(cells))
            pairs = zip((indices, values), *many, strict=True)
            where, what = staging.send(*map(np.concatenate, pairs))
            self._cells.index_copy_(0, where, what)

    def set_rotary_shifts(self, shifts: Mapping[int, int], staging: Staging) -> None:
        """Set those of slots."""
        _set_slots(self.rotary_shifts, shifts, staging)

    def set_adapters(self, adapters: Mapping[int, int], staging: Staging) -> None:
        """Set those of slots."""
        _set_slots(self.adapters, adapters, staging)

    def adapters_of(self, slots: Tensor) -> Tensor:
        """Those of rows ``[T]`` whose slots are these; 0 for a row that has none, -1."""
        return torch.where(slots >= 0, self.adapters.index_select(0, slots.clamp_min(0)), 0)

    def set_known(self, known: Seq[tuple[int, int, int, Seq[int]]], staging: Staging) -> None:
        """Set tokens of sequences, in which drafts are found.

        Args:
            known: of each the slot, the place of its first token, the place of the first one of these, and the ids.
        """
        self.allocate_tokens()
        width = self._most_tokens
        slots, firsts = staging.send(*np.array([each[:2] for each in known], np.int32).T)
        self.firsts.index_copy_(0, slots.long(), firsts)
        fits = [(slot * width + place, ids) for slot, _, place, ids in known if len(ids) and place + len(ids) <= width]
        if fits:
            places = np.concatenate([np.arange(first, first + len(ids), dtype=np.int32) for first, ids in fits])
            values = np.concatenate([np.array(ids, np.int32) for _, ids in fits])
            where, what = staging.send(places, values)
            self.tokens.view(-1).index_copy_(0, where.long(), what)

    def set_answers(self, answers: "array[int]", staging: Staging) -> None:
        """Set the tokens of finished answers, in which drafts are found."""
        count = np.array([len(answers)], np.uint32)
        (sent,) = staging.send(np.concatenate([count, np.frombuffer(answers, np.uint32)]).view(np.int32))
        self.answers[: len(sent)] = sent

    def set_rows(self, known: Seq[KnownTokens], bucket: int, staging: Staging) -> tuple[np.ndarray, np.ndarray]:
        """Set the rows of a step of known tokens, one for each, and the last token of each sequence.

        Args:
            known: of each sequence.
            bucket: rows of the step.

        Returns:
            the slot and the position of each row.
        """
        slots = np.array([each.slot for each in known], np.int32)
        starts, limits = (np.array(each, np.int32) for each in zip(*((k.start, k.limit) for k in known), strict=True))
        counts = np.array([len(each.token_ids) for each in known], np.int32)
        ends, lasts = starts + counts, counts.cumsum(dtype=np.int32) - 1
        number = np.arange(counts.sum(), dtype=np.int32) - np.repeat(lasts + 1 - counts, counts)
        rows = np.zeros((_ROW_FIELDS, bucket), np.int32)
        own = rows[:, : len(number)]
        own[layout.TOKEN] = np.concatenate([np.frombuffer(each.token_ids, np.uint32) for each in known]).view(np.int32)
        own[layout.POSITION] = np.repeat(starts, counts) + number
        own[layout.LIMIT] = np.repeat(ends, counts)
        own[_SLOT] = np.repeat(slots, counts)
        last = np.stack([own[layout.TOKEN][lasts], ends - 1, ends, limits])
        sent, fields, columns = staging.send(rows.reshape(-1), last.reshape(-1), slots)
        sent = sent.view(rows.shape)
        self.drafted[: layout.LIMIT + 1, :bucket] = sent[:_SLOT]
        self.row_slots[:bucket] = sent[_SLOT]
        self.fields[: layout.LIMIT + 1].index_copy_(1, columns.long(), fields.view(last.shape))
        return own[_SLOT], own[layout.POSITION]

    def set_tokens(self, begun: Seq[tuple[int, SampledRow]], staging: Staging) -> None:
        """Set token counts and bias of slots whose sequences begin to be sampled, from all their tokens so far."""
        counted = [(slot, row) for slot, row in begun if row.spec.sampling.adjusts]
        if counted:
            cells = [(slot, *count_cells(row.spec, row.output, self.vocab_size)) for slot, row in counted]
            self._set(self.token_counts, cells, staging)
        if len(self.bias):
            # Also without a bias: the slot's last sequence may have left one.
            self._set(self.bias, [(slot, *bias_cells(row.spec)) for slot, row in begun], staging)

    def _set(self, table: Tensor, cells: Seq[tuple[int, np.ndarray, np.ndarray]], staging: Staging) -> None:
        """Set rows of a table: for each slot, values at token ids, and 0 elsewhere."""
        owners = np.concatenate([np.full(len(ids), slot, np.int32) for slot, ids, _ in cells])
        ids, values = (np.concatenate([cell[part] for cell in cells]) for part in (1, 2))
        slots = np.array([slot for slot, _, _ in cells], np.int32)
        to_clear, rows, columns, bits = staging.send(slots, owners, ids, values.view(np.int32))
        table.index_fill_(0, to_clear.long(), 0)
        flat = rows.long() * table.shape[1] + columns.long()
        table.view(-1).scatter_add_(0, flat, bits.view(table.dtype))

    def keep_logprobs(self, rows: Tensor, columns: Tensor | slice, step: Tensor | None) -> None:
        """Keep rows ``[S, ROW]``: a decode step's at its place in the window, others (no step) in the last place."""
        if step is None:
            self.logprobs[-1, : len(rows)] = rows
            return
        window, slots, width = len(self.history), self.fields.shape[1], rows.shape[1]
        if isinstance(columns, slice):
            columns = torch.arange(len(rows), device=rows.device)
        place = (step % window).long() * slots + columns.long()
        self.logprobs.view(-1, width).index_copy_(0, place, rows)

    def sampling(self, columns: Tensor | slice) -> dict[str, Tensor]:
        """The parameters of ``rosebatch_kernels.sampling`` for these columns."""
        return sampling_of(self.fields[:, columns])

    def adjusts(self, columns: Tensor | slice) -> Tensor:
        """Whether the parameters of these columns change logits ``[S]``."""
        return self.fields[layout.ADJUSTS, columns] > 0

    def penalties(self, columns: Tensor | slice) -> dict[str, Tensor]:
        """The parameters of ``rosebatch_kernels.logits.kernel.adjust`` for these columns."""
        fields = self.fields[:, columns]
        real = fields.view(torch.float32)
        return {
            "presence": real[layout.PRESENCE],
            "frequency": real[layout.FREQUENCY],
            "repetition": real[layout.REPETITION],
            "positions": fields[layout.NEXT],
            "min_positions": fields[layout.MIN_POSITION],
        }


def _set_slots(table: Tensor, values: Mapping[int, int], staging: Staging) -> None:
    """Set ``[num_slots]`` int32 at some slots."""
    slots, numbers = (np.fromiter(each, np.int32, len(values)) for each in (values.keys(), values.values()))
    where, what = staging.send(slots, numbers)
    table.index_copy_(0, where.long(), what)


def sampling_of(fields: Tensor) -> dict[str, Tensor]:
    """The parameters of ``rosebatch_kernels.sampling``, from fields ``[NUM_FIELDS, S]``."""
    real = fields.view(torch.float32)
    return {
        "temperature": real[layout.TEMPERATURE],
        "top_k": fields[layout.TOP_K],
        "top_p": real[layout.TOP_P],
        "min_p": real[layout.MIN_P],
        "seeds": fields[layout.SEED_LOW : layout.SEED_HIGH + 1].t(),
        "positions": fields[layout.NEXT],
    }
