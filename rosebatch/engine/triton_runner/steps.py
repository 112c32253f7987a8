"""The forward passes of steps, which CUDA graphs can hold: all that they read is in tensors that stay in place."""

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from rosebatch.engine.plan import PackedStep, RestartPolicy
from rosebatch.engine.sampling.features import Features
from rosebatch.engine.triton_runner.attention import DecodeAttention, KeyEnds, PackedAttention, RunMixers, Turns
from rosebatch.engine.triton_runner.packing import MAX_PADDED_TOKENS, Layout, PackedInputs
from rosebatch.engine.triton_runner.prefix_groups import PrefixGroupState
from rosebatch.engine.triton_runner.prefix_tiles import PrefixTiles
from rosebatch.engine.triton_runner.token_sampler import TokenSampler
from rosebatch.model.contract import ImageRows, Model, SeeingModel
from rosebatch.ops.adapters import StackedRows
from rosebatch_kernels.feedback import layout


class DecodeKind(NamedTuple):
    """What decides which kernels a decode step launches.

    Attributes:
        size: sequences, or rows of known tokens.
        features: what it does in addition to sampling; None if its rows are sampled outside.
        shares: whether rows share keys.
        divided: whether any row may have enough keys to divide them among programs.
        shifted: whether any row has images with rotary positions of their own.
        queries: of each sequence: its last token, and drafts that the step finds and verifies. 0: it looks for none.
        knows: whether its rows are known tokens, which the host has set.
        adapted: whether any row has an adapter.
    """

    size: int
    features: Features | None
    shares: bool
    divided: bool
    shifted: bool = False
    queries: int = 0
    knows: bool = False
    adapted: bool = False


class PackedKind(NamedTuple):
    """What decides which kernels a packed step launches.

    Attributes:
        size: tokens with padding.
        shares: whether chunks share tiles.
        whole: whether hidden states of all tokens are read.
        adapted: whether any token has an adapter.
    """

    size: int
    shares: bool
    whole: bool = False
    adapted: bool = False


class Seen(NamedTuple):
    """What a packed step has of images, none of which a graph can hold.

    Attributes:
        images: the rows of images; None if there are none.
        turns, seeing: see ``PackedAttention``.
    """

    images: ImageRows | None = None
    turns: Turns | None = None
    seeing: KeyEnds | None = None


NOTHING = Seen()


class DeviceSteps:
    """Launches steps of a kind; see ``StepGraphs``.

    Args:
        model: the weights.
        attention: what the model's mixers share.
        sampler: samples tokens; it has the state of all sequences.
        prefix_groups: finds keys that rows of decode steps share; None if none do.
        shares_tiles: whether packed steps may have tiles that chunks share.
        trims_last_layer: compute only rows that are read after the last layer's attention.
        restarts: finds the rotary rows of tokens; None if they are the positions.
        adapters: where the model's linears look for each row's; None for a model without adapters.

    Attributes:
        packed_cells: what ``packed`` reads, see ``Layout``.
    """

    def __init__(
        self,
        model: Model,
        attention: RunMixers,
        sampler: TokenSampler,
        prefix_groups: PrefixGroupState | None,
        *,
        shares_tiles: bool,
        trims_last_layer: bool,
        restarts: RestartPolicy | None,
        adapters: StackedRows | None = None,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.state = sampler.state
        self.prefix_groups = prefix_groups
        self.tile_rows = sampler.kernels.tile_rows
        self.attention = attention
        self.restarts = restarts
        self.adapters = adapters
        self.packs_chunks = any(spec.by_chunks for spec in model.mixers)
        self._trims_last_layer = trims_last_layer
        device = attention.cache.device
        cells = self.layout(PackedKind(MAX_PADDED_TOKENS, shares_tiles)).num_cells
        self.packed_cells = torch.zeros(cells, dtype=torch.int32, device=device)
        windows = sorted({spec.window for spec in model.mixers if spec.planes})
        self._windows = torch.tensor(windows, dtype=torch.int32, device=device)
        self._logits = self._hidden = self._last_hidden = torch.empty(0, device=device)

    def decode(self, kind: DecodeKind) -> Tensor:
        """One decode step of the first rows: tokens ``[size]``, or logits ``[size, V]`` to be sampled outside.

        Of rows of known tokens, final hidden states ``[size, H]``: only some of them are sampled.
        """
        size = kind.size
        if kind.knows:
            return self._compute_known(kind)
        if kind.queries:
            return self._decode_and_verify(kind)
        fields = self.state.fields[:, :size]
        keys = self.prefix_groups.keys(size) if self.prefix_groups and kind.shares else None
        attention = DecodeAttention(self.attention, size, fields, keys, divided=kind.divided, shifted=kind.shifted)
        self._set_adapters(kind.adapted, attention)
        logits = self._logits_of(fields, attention)
        if kind.features is not None:
            return self.sampler.next_tokens(logits, kind.features, None, decodes=True)
        if not len(self._logits):
            self._logits = logits.new_empty(self.state.fields.shape[1], logits.shape[1])
        # A graph keeps what it returns, and logits of every size would be a lot to keep.
        return self._logits[:size].copy_(logits)

    def _compute_known(self, kind: DecodeKind) -> Tensor:
        """Final hidden states of rows of known tokens."""
        state, size = self.state, kind.size
        fields, slots = state.drafted[:, :size], state.row_slots[:size]
        keys = self.prefix_groups.keys(size) if self.prefix_groups and kind.shares else None
        attention = DecodeAttention(
            self.attention, size, fields, keys, slots=slots, divided=kind.divided, shifted=kind.shifted
        )
        self._set_adapters(kind.adapted, attention, slots)
        hidden = self._hidden_of(fields, attention)
        if not len(self._last_hidden):
            self._last_hidden = hidden.new_empty(state.fields.shape[1], hidden.shape[1])
        return self._last_hidden[:size].copy_(hidden)

    def _decode_and_verify(self, kind: DecodeKind) -> Tensor:
        """The same of the last tokens and of drafts, in rows ``[size · queries]``: tokens."""
        state, kernels, size = self.state, self.sampler.kernels, kind.size
        own, tokens, firsts = state.fields[:, :size], state.tokens[:size], state.firsts[:size]
        rows = state.drafted[:, : size * kind.queries]
        found = state.answers, state.distances[:size], rows
        kernels.propose(own, tokens, firsts, *found, self._windows, self.attention.pieces)
        attention = DecodeAttention(self.attention, size, rows, divided=kind.divided, shifted=kind.shifted)
        self._set_adapters(kind.adapted, attention)
        return self.sampler.verify(self._logits_of(rows, attention), rows, own, tokens, firsts)

    def _set_adapters(self, adapted: bool, attention: DecodeAttention, slots: Tensor | None = None) -> None:
        """Sort the rows of a decode step by adapter, if any has one; ``slots`` see ``DecodeAttention``."""
        if self.adapters is None:
            return
        if not adapted:
            self.adapters.set()
            return
        rows = attention.rows()
        if slots is not None:
            rows = torch.where(rows >= 0, slots.index_select(0, rows.clamp_min(0)), -1)
        self.adapters.set(self.state.adapters_of(rows))

    def _logits_of(self, rows: Tensor, attention: DecodeAttention) -> Tensor:
        return self.model.logits(self._hidden_of(rows, attention))

    def _hidden_of(self, rows: Tensor, attention: DecodeAttention) -> Tensor:
        positions = attention.positions if attention.rotary_rows is None else attention.rotary_rows
        return self.model.forward(rows[layout.TOKEN], positions, attention)

    def packed(self, kind: PackedKind) -> Tensor:
        """A packed step of ``packed_cells``: final hidden states of all tokens, or see ``last_hidden``."""
        inputs = self.layout(kind).inputs(self.packed_cells)
        if not kind.whole:
            return self.last_hidden(inputs, adapted=kind.adapted)
        hidden = self.forward(inputs, adapted=kind.adapted)
        if not len(self._hidden):
            self._hidden = torch.empty(MAX_PADDED_TOKENS, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        # As of logits: a graph would keep those of its size.
        return self._hidden[: kind.size].copy_(hidden)

    def last_hidden(self, inputs: PackedInputs, seen: Seen = NOTHING, *, adapted: bool) -> Tensor:
        """Final hidden states of the last rows, ``[S, H]``; ``adapted`` see ``PackedKind``."""
        wanted = inputs.last_rows
        # Linears know the wanted rows from all by their number.
        if self._trims_last_layer and not (adapted and len(wanted) == len(inputs.rows)):
            return self.forward(inputs, wanted, seen, adapted=adapted)
        return self.forward(inputs, None, seen, adapted=adapted)[wanted]

    def forward(
        self, inputs: PackedInputs, wanted: Tensor | None = None, seen: Seen = NOTHING, *, adapted: bool
    ) -> Tensor:
        """Final hidden states of the wanted rows; None for all. ``adapted`` see ``PackedKind``."""
        if self.adapters is not None:
            of_tokens = self.state.adapters_of(inputs.rows) if adapted else None
            each = [] if of_tokens is None else [of_tokens] if wanted is None else [of_tokens, of_tokens[wanted]]
            self.adapters.set(*each)
        attention = PackedAttention(self.attention, inputs, seen.turns, seen.seeing)
        forward = self.model.forward
        if seen.images is not None:
            forward = partial(cast(SeeingModel, self.model).forward, images=seen.images)
        positions = inputs.positions if seen.turns is None else seen.turns.rows
        return forward(inputs.input_ids, positions, attention, wanted)

    def exact_layout(self, plan: PackedStep, shared: PrefixTiles | None) -> Layout:
        """Room for a plan, see ``Layout.exact``."""
        return Layout.exact(plan, self.tile_rows, with_chunks=self.packs_chunks, restarts=self.restarts, shared=shared)

    def layout(self, kind: PackedKind) -> Layout:
        """Room for any step of a kind."""
        return Layout.padded(
            kind.size,
            self.tile_rows,
            self.state.fields.shape[1],
            with_chunks=self.packs_chunks,
            restarts=self.restarts,
            shares=kind.shares,
        )
