"""What mixers get of the steps of the Triton runner: one class for packed chunks, one for decode steps."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.state_pool import StatePool
from rosebatch.engine.triton_runner.packing import PackedInputs
from rosebatch.engine.triton_runner.state import DeviceState
from rosebatch.model.mixers.mixer import MixerSpec, TritonMixer, TritonSetup
from rosebatch.model.rope import Rotary
from rosebatch.ops.ops import Ops
from rosebatch_kernels.common.shared_keys import Pieces, SharedKeys
from rosebatch_kernels.feedback import layout
from rosebatch_kernels.kv_cache.layout import cache_rows


def triton_mixers(specs: Sequence[MixerSpec], setup: TritonSetup) -> dict[type[MixerSpec], TritonMixer[Any]]:
    """The kinds of a model's layers, by the type of the spec."""
    kinds: dict[type[MixerSpec], None] = dict.fromkeys(map(type, specs))
    return {kind: kind.triton_mixer([spec for spec in specs if type(spec) is kind], setup) for kind in kinds}


class Turns(NamedTuple):
    """Rotary positions of a step's tokens, see ``Rotary.of_rows``."""

    rows: Tensor
    sections: Tensor


class KeyEnds(NamedTuple):
    """Ends of keys of a step's tokens, see ``rosebatch.model.mixers.mixer.PackedContext``.

    Attributes:
        everywhere: whether they are those of layers without a window too.
    """

    ends: Tensor
    everywhere: bool


@dataclass(frozen=True, slots=True)
class RunMixers:
    """The mixers of a run, and what they read and write in all of its steps.

    Attributes:
        mixers: see ``triton_mixers``.
        states: of the layers with states; None for a model without them.
    """

    cache: KVCache
    state: DeviceState
    ops: Ops
    mixers: Mapping[type[MixerSpec], TritonMixer[Any]]
    states: StatePool | None = None

    @property
    def pieces(self) -> Pieces | None:
        """See ``TritonMixer``: of the kind that has any."""
        return next((mixer.pieces for mixer in self.mixers.values() if mixer.pieces is not None), None)

    def undivided_keys(self, batch: int) -> int:
        """See ``TritonMixer``: of all kinds."""
        return min(mixer.undivided_keys(batch) for mixer in self.mixers.values())

    def decode_form(self, batch: int, *, divided: bool) -> Hashable:
        """See ``TritonMixer``: of all kinds."""
        return tuple(mixer.decode_form(batch, divided=divided) for mixer in self.mixers.values())


class _Step:
    """What packed and decode steps have in common, see ``rosebatch.model.mixers.mixer.TritonContext``.

    Args:
        shared: by all steps of the run.
        positions: of the tokens.
        tables: ``[groups, S, M]`` int32 block ids.
    """

    def __init__(self, shared: RunMixers, positions: Tensor, tables: Tensor) -> None:
        self.ops = shared.ops
        self.positions = positions
        self.rotary_rows: Tensor | None = None
        self._turns: Turns | None = None
        self._tables_of: dict[Rotary, tuple[Tensor, Tensor]] = {}
        self._cache = shared.cache
        self._states = shared.states
        self._mixers = shared.mixers
        # A view of each group's, made once for all layers.
        self._tables = tables.unbind()
        self._append_rows: dict[tuple[int, int], Tensor] = {}

    def rotary_tables(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """See ``TritonContext``; of a step with turns, once for all layers."""
        if self._turns is None:
            return rotary.cos, rotary.sin
        if rotary not in self._tables_of:
            self._tables_of[rotary] = rotary.of_rows(*self._turns)
        return self._tables_of[rotary]

    def planes(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """See ``Step``."""
        return self._cache.layer(spec.layer)

    def states(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """See ``Step``."""
        assert self._states is not None, "the model has states"
        return self._states.layer(spec.layer)

    def table(self, spec: MixerSpec) -> Tensor:
        """See ``TritonContext``."""
        return self._tables[self._cache.group_of[spec.layer]]

    def rows(self) -> Tensor:
        """See ``TritonContext``."""
        raise NotImplementedError

    def append_rows(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """See ``TritonContext``; once for all planes of a group with the same number of heads."""
        return tuple(self._rows_of(self._cache.group_of[spec.layer], plane) for plane in self.planes(spec))

    def _rows_of(self, group: int, plane: Tensor) -> Tensor:
        kind = group, plane.shape[2]
        if kind not in self._append_rows:
            self._append_rows[kind] = _append_rows(plane, self._tables[group], self.rows(), self.positions)
        return self._append_rows[kind]


class PackedAttention(_Step):
    """A step over packed chunks; callable by the model, see ``rosebatch.model.contract.Attention``.

    Args:
        shared: by all steps of the run.
        inputs: of the step.
        turns: of a step with images, if these have rotary positions of their own; else None.
        seeing: which keys images' tokens see; None if that is none but those before them.
    """

    def __init__(
        self, shared: RunMixers, inputs: PackedInputs, turns: Turns | None = None, seeing: KeyEnds | None = None
    ) -> None:
        super().__init__(shared, inputs.positions, shared.state.block_tables)
        self.rotary_rows = inputs.rotary_rows
        if turns is not None:
            # Each token has a row of its own, in tables that are made for the step.
            count, device = len(inputs.positions), inputs.positions.device
            self._turns, self.rotary_rows = turns, torch.arange(count, dtype=torch.int32, device=device)
        self.tiles = inputs.tiles
        self.last_tiles = inputs.last_tiles
        self.pieces = inputs.pieces
        self.chunks = inputs.chunks
        self._seeing = seeing
        self._rows = inputs.rows

    def __call__(self, spec: MixerSpec, *inputs: Tensor, wanted: Tensor | None = None) -> Tensor:
        """See ``rosebatch.model.contract.Attention``; ``wanted`` are the last rows."""
        return self._mixers[type(spec)].packed(spec, self, inputs, wanted)

    def rows(self) -> Tensor:
        """See ``TritonContext``."""
        return self._rows

    def key_ends(self, spec: MixerSpec) -> Tensor | None:
        """See ``PackedContext``."""
        seeing = self._seeing
        return seeing.ends if seeing is not None and (spec.window or seeing.everywhere) else None


class DecodeAttention(_Step):
    """A decode step of the first ``size`` sequences of the state; nothing in it depends on the host.

    Args:
        shared: by all steps of the run.
        size: sequences, those that are not live included.
        fields: of the rows, see ``DeviceState``. There are as many of each sequence, one after the other.
        keys: that rows share; None if there are none.
        slots: of each of the ``size``, where these are rows of known tokens; None for the first slots.
        divided: see ``rosebatch.model.mixers.mixer.DecodeContext``.
        shifted: whether any row has images with rotary positions of their own.
    """

    def __init__(
        self,
        shared: RunMixers,
        size: int,
        fields: Tensor,
        keys: SharedKeys | None = None,
        *,
        slots: Tensor | None = None,
        divided: bool = True,
        shifted: bool = False,
    ) -> None:
        state = shared.state
        tables = state.block_tables[:, :size] if slots is None else state.block_tables.index_select(1, slots)
        super().__init__(shared, fields[layout.POSITION], tables)
        self.queries = fields.shape[1] // size
        if shifted:
            shifts = state.rotary_shifts[:size] if slots is None else state.rotary_shifts.index_select(0, slots)
            self.rotary_rows = self.positions + shifts.repeat_interleave(self.queries)
        elif self.queries > 1 or slots is not None:
            # K and V of all rows are appended before any is read.
            self.rotary_rows = self.positions
        # Else they are the positions, see ``RestartPolicy.rotary_rows``.
        self.keys = keys
        self.divided = divided
        self.limits = fields[layout.LIMIT]
        self.state_slots = fields[layout.STATE]
        self._rows: Tensor | None = None

    def __call__(self, spec: MixerSpec, *inputs: Tensor, wanted: Tensor | None = None) -> Tensor:
        """See ``rosebatch.model.contract.Attention``; each row is a sequence's last token, or a draft behind it."""
        out = self._mixers[type(spec)].decode(spec, self, inputs)
        return out if wanted is None else out[wanted]

    def rows(self) -> Tensor:
        """``[rows]`` int32: the number of each row's sequence, -1 if it is not live."""
        if self._rows is None:
            numbers = torch.arange(len(self.positions), dtype=torch.int32, device=self.positions.device)
            numbers //= self.queries
            self._rows = torch.where(self.positions < self.limits, numbers, -1)
        return self._rows


def _append_rows(plane: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """See ``cache_rows``; tokens of row -1 are written to the cache's last block, which no sequence has."""
    _, blocks, heads, block_size, _ = plane.shape
    there = cache_rows(table, rows.clamp_min(0), positions, heads, block_size)
    numbers = torch.arange(heads, device=there.device)
    unused = ((blocks - 1) * heads + numbers) * block_size
    return torch.where(rows[:, None] >= 0, there, unused)
