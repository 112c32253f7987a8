"""The forward pass by kernels: packed prompts, decode steps as graphs; sampled tokens stay on the device.

The host launches and goes on. What a decode step needs lies in ``DeviceState``, which the step advances itself. So
steps follow each other without the host, and tokens come back through pinned memory when somebody asks. Where a grammar
decides what may come next, a step's tokens are sampled after the host has seen those before, while the device computes
the logits.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch.core.request import Logprobs
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.state_pool import StatePool
from rosebatch.engine.engine import Masks
from rosebatch.engine.plan import DecodeWindow, PackedStep, RestartPolicy, SequenceSpec, StepPlan, StepResult
from rosebatch.engine.pooling.pooled_states import PooledStates, read_pooled, reads_all
from rosebatch.engine.sampling.features import Features
from rosebatch.engine.sampling.logits import SampledRow
from rosebatch.engine.sampling.logprobs import logprob_rows, prompt_logprobs, read_all
from rosebatch.engine.sampling.sampler import sample
from rosebatch.engine.staging import Staging
from rosebatch.engine.triton_runner.attention import (
    DecodeAttention,
    PackedAttention,
    SharedAttention,
    can_group_tiles,
    sharing_heads,
)
from rosebatch.engine.triton_runner.graphs import Ran, StepGraphs
from rosebatch.engine.triton_runner.packing import MAX_PADDED_TOKENS, Layout, PackedInputs, pack, padded_size
from rosebatch.engine.triton_runner.prefix_group_state import PrefixGroupState
from rosebatch.engine.triton_runner.prefix_groups import MIN_ROWS
from rosebatch.engine.triton_runner.prefix_tiles import PrefixTile, group_tiles
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.engine.triton_runner.state import DeviceState
from rosebatch.engine.triton_runner.warm_up_sizes import warm_up_decodes, warm_up_tokens
from rosebatch.model.layers import Model
from rosebatch.ops.attention import DeviceOps
from rosebatch.ops.ops import Ops
from rosebatch_kernels.common import host_waits
from rosebatch_kernels.common.tokens import NO_TOKEN
from rosebatch_kernels.feedback import layout

# Of three plans that are launched before the first one is read: tokens, log-probabilities, those of prompts, and pooled
# hidden states.
_MAX_FETCHES = 12

# Wait for what prompts report, by the number of a chunk: log-probabilities, and pooled hidden states.
_PromptLogprobs = Callable[[], dict[int, list[Logprobs]]]
_Pooled = Callable[[], dict[int, np.ndarray]]


class TritonRunner:
    """Carries out step plans in order, without waiting for any.

    Args:
        model: the weights.
        cache: its KV cache, with one block more than the scheduler knows of.
        ops, kernels: the operators of this run.
        toggles: for graphs, batched rollover and sampling, shared prefixes, the last layer; those of kernels are in
            ``ops`` and ``kernels``.
        vocab_size: width of the logits.
        eos_token_ids: the model's end tokens.
        max_num_seqs: most sequences at a time.
        max_len: most tokens of a sequence.
        window: most decode steps in a plan.
        states: those of the model's layers that have one; None for a model without them.
        restarts: finds the rotary rows of tokens; None if they are the positions.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        ops: Ops,
        kernels: DeviceOps,
        switches: Switches,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_num_seqs: int,
        max_len: int,
        window: int,
        states: StatePool | None = None,
        restarts: RestartPolicy | None = None,
    ) -> None:
        device = cache.device
        width = -(-max_len // cache.block_size)
        self.model = model
        self.restarts = restarts
        self.cache = cache
        self.ops = ops
        self.kernels = kernels
        self.states = states
        self.pooling = PooledStates()
        heads = sharing_heads(model.attention) if switches.shared_prefix_attention else None
        self.slots = Slots(max_num_seqs, width, keeps_tables=heads is not None)
        self.prefix_groups = heads and PrefixGroupState(self.slots, cache.block_size, heads, device)
        self._shares_tiles = heads is not None and states is None and can_group_tiles(model.attention)
        self.state = DeviceState(max_num_seqs, width, window, device, vocab_size, len(cache.num_blocks))
        self.attention = SharedAttention.of(cache, self.state, ops, kernels, states)
        self.decodes = StepGraphs(self._decode_step, enabled=switches.cuda_graph)
        self.packed = StepGraphs(self._packed_step, enabled=switches.cuda_graph)
        cells = self._layout(_Packed(MAX_PADDED_TOKENS, self._shares_tiles)).num_cells
        self._packed_cells = torch.zeros(cells, dtype=torch.int32, device=device)
        self.up, self.down = Staging(device, cells + max_num_seqs), self._fetches()
        self.end_tokens = torch.tensor(eos_token_ids, dtype=torch.int32, device=device)
        self._first_tokens = torch.empty(1, max_num_seqs, dtype=torch.int32, device=device)
        self._steps = 0
        self._logits = torch.empty(0, device=device)
        self._apply = self.state.apply if switches.batched_rollover else self.state.apply_rollovers_one_by_one
        self._sample_rows = kernels.sample_rows
        self._batched_sampling = switches.batched_sampling
        self._trims_last_layer = switches.trim_last_layer
        # Sampling that waits for the host: which tokens a grammar allows depends on the token before.
        self._deferred: Callable[[], None] | None = None

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int, *, has_experts: bool = False) -> None:
        """Launch the kernels of plain steps of several sizes, for nobody. No sequence may have a slot.

        The steps have no tokens but padding, at most so many, so nothing of it matters to a plan. Prompts come first:
        their attention takes the compiler long.
        """
        limit, features = self.slots.num_slots, None if self._sample_rows is None else Features()
        sizes = warm_up_tokens(max_num_tokens, has_experts=has_experts)
        self.cache.copy([(group, last - 1, last - 1) for group, last in enumerate(self.cache.num_blocks)], self.up)
        for kind in (_Packed(tokens, shares) for tokens in sizes for shares in {False, self._shares_tiles}):
            shared: list[PrefixTile] | None = [] if kind.shares else None
            packed = pack(PackedStep(()), self.slots, self._layout(kind), self.kernels.tile_rows, shared)
            cells, columns = self.up.send(packed, np.arange(min(limit, kind.size), dtype=np.int32))
            self._packed_cells[: len(cells)].copy_(cells)
            hidden = self._packed_step(kind)
            for count in {1, len(columns)} if self._sample_rows is not None else ():
                logits = self.model.logits(hidden[:count])
                self._next_tokens(logits, Features(), columns[:count], self._first_tokens, None)
        kinds = warm_up_decodes(self.slots.buckets, partial(self.kernels.decode_form, dtype=self.cache.dtype))
        for (rows, divided), shares in product(kinds, {False, self.prefix_groups is not None}):
            if not shares or rows >= MIN_ROWS:
                self._decode_step(_Decode(rows, features, shares, divided))
        self._reset()

    def launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """See ``rosebatch.engine.engine.StepRunner``."""
        before = host_waits.count()
        if plan.reset:
            self._reset()
        self._run_deferred()
        wait = self._launch(plan, masks)
        launching = host_waits.count() - before

        def counted() -> StepResult:
            before = host_waits.count()
            result = wait()
            return replace(result, syncs=launching + host_waits.count() - before)

        return counted

    def release(self) -> None:
        """Wait for what is under way, and free the graphs. Nothing is launched any more."""
        event = torch.cuda.Event()
        event.record()
        host_waits.wait_for(event)
        self.decodes.release()
        self.packed.release()

    def _reset(self) -> None:
        """Start over, whatever an interrupted launch has left."""
        self._deferred = None
        self._steps = 0
        self.state.step.zero_()
        self.down = self._fetches()

    def _fetches(self) -> Staging:
        return Staging(self.cache.device, self.state.history.numel(), _MAX_FETCHES)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        clock = _Clock(self.cache.device)
        write = self.slots.update(plan)
        if self.prefix_groups and (plan.reset or plan.started or write.moves):
            self.prefix_groups.forget()
        self._apply(write, self.up)
        self.cache.wipe(plan.wipes, self.up)
        self.cache.copy(plan.copies, self.up)
        sampled = _Sampled.of(plan, self.slots, masks)
        self.state.make_room(sampled.features)
        if isinstance(plan, DecodeWindow):
            return self._launch_decodes(plan, sampled, clock)
        return self._launch_packed(plan, sampled, clock)

    def _launch_decodes(self, plan: DecodeWindow, sampled: "_Sampled", clock: "_Clock") -> Callable[[], StepResult]:
        inside = self._sample_rows is not None and not sampled.guided
        bucket = self.slots.bucket(plan.sampled_ids)
        shares = self.prefix_groups is not None and self.prefix_groups.update(plan.rows, bucket, self.up)
        own_keys = np.array(sampled.positions)
        if self.prefix_groups is not None and shares:
            own_keys -= self.prefix_groups.own_begins[sampled.slots]
        divided = own_keys.max() > self.kernels.undivided_keys(bucket, self.cache.dtype)
        kind = _Decode(bucket, sampled.features if inside else None, shares, bool(divided))
        ran = self.decodes.run(kind, plan.steps)
        window = len(self.state.history)
        steps = [(self._steps + i) % window for i in range(plan.steps)]
        self._steps += plan.steps
        lengths = [row.length for row in plan.rows]
        fetched: list[Callable[[], np.ndarray]] = []

        def finish() -> None:
            if not inside:
                assert plan.steps == 1, "tokens are sampled outside of the graph"
                (columns,) = self.up.send(sampled.slots)
                self._sample(ran.out[columns], sampled, columns, self.state.history, self.state.step)
            clock.stop()
            fetched.append(self.down.fetch(self.state.history))
            if sampled.features.logprobs is not None:
                fetched.append(self.down.fetch(self.state.logprobs[:-1]))

        def wait() -> StepResult:
            # Its own sampling only: a plan launched since then needs the tokens that are read here.
            if self._deferred is finish:
                self._run_deferred()
            where = np.ix_(np.array(steps), sampled.slots)
            rows = fetched[0]()[where].T.tolist()
            ids = [_until_ended(row[:length]) for row, length in zip(rows, lengths, strict=True)]
            logprobs = [] if len(fetched) == 1 else read_all(fetched[1]()[where].swapaxes(0, 1), sampled.specs, ids)
            return _result(ids, logprobs, clock, ran)

        self._deferred = finish
        if not sampled.guided:
            self._run_deferred()
        return wait

    def _launch_packed(self, plan: PackedStep, sampled: "_Sampled", clock: "_Clock") -> Callable[[], StepResult]:
        count = len(sampled.specs)
        if count:
            chunks = [chunk for chunk in plan.chunks if chunk.sampled]
            rows = [SampledRow(s, c.end, c.output_token_ids) for s, c in zip(sampled.specs, chunks, strict=True)]
            self.state.tell_tokens(list(zip(sampled.slots.tolist(), rows, strict=True)), self.up)
        self.pooling.update(plan)
        ran, columns, of_prompts, pooled = self._run_packed(plan, sampled)
        if not count:
            clock.stop()
            return lambda: _result([], [], clock, ran, of_prompts(), pooled())
        self._sample(self.model.logits(ran.out[:count]), sampled, columns, self._first_tokens, None)
        clock.stop()
        fetch = self.down.fetch(self._first_tokens[0, :count])
        asked = sampled.features.logprobs is not None
        fetch_logprobs = self.down.fetch(self.state.logprobs[-1, :count]) if asked else None

        def wait() -> StepResult:
            ids = [[token] for token in fetch().tolist()]
            rows = None if fetch_logprobs is None else fetch_logprobs()[:, None]
            logprobs = [] if rows is None else read_all(rows, sampled.specs, ids)
            return _result(ids, logprobs, clock, ran, of_prompts(), pooled())

        return wait

    def _run_packed(self, plan: PackedStep, sampled: "_Sampled") -> tuple[Ran, Tensor, _PromptLogprobs, _Pooled]:
        """The last token's final hidden state of each chunk that samples, their slots, and what prompts report."""
        specs = self.slots.specs
        reports = reads_all(plan, specs)
        padded = self.packed.enabled and plan.num_tokens <= MAX_PADDED_TOKENS and not reports
        tile_rows = self.kernels.tile_rows
        shared = group_tiles(plan, self.slots, self.cache.block_size, tile_rows) if self._shares_tiles else None
        if padded:
            kind = _Packed(padded_size(plan.num_tokens), shared is not None)
            layout = self._layout(kind)
        else:
            layout = Layout.exact(
                plan, tile_rows, states=self.states is not None, restarts=self.restarts, shared=shared
            )
        cells, columns = self.up.send(pack(plan, self.slots, layout, tile_rows, shared), sampled.slots)
        if padded:
            self._packed_cells[: len(cells)].copy_(cells)
            ran = self.packed.run(kind)
            return ran, columns, dict, self._pool(plan, ran.out[len(columns) :], None)
        inputs = layout.inputs(cells)
        if not reports:
            ran = Ran(self._last_hidden(inputs))
            return ran, columns, dict, self._pool(plan, ran.out[len(columns) :], None)
        hidden = self._forward(inputs)
        of_prompts = prompt_logprobs(plan.chunks, specs, hidden, self.model.logits, self.up, self.down)
        ran = Ran(hidden[inputs.last_rows])
        return ran, columns, of_prompts, self._pool(plan, ran.out[len(columns) :], hidden)

    def _pool(self, plan: PackedStep, ends: Tensor, hidden: Tensor | None) -> _Pooled:
        """Begin to fetch what ``StepResult.pooled`` holds; ``ends`` are the rows behind those that are sampled."""
        vectors = self.pooling.pool(plan, self.slots.specs, ends[: plan.num_pooled], hidden, self.up)
        if vectors is None:
            return dict
        fetch = self.down.fetch(vectors.view(torch.int32))
        # Later transfers may overwrite what is fetched.
        return lambda: read_pooled(plan, fetch().view(np.float32).copy())

    def _packed_step(self, kind: "_Packed") -> Tensor:
        return self._last_hidden(self._layout(kind).inputs(self._packed_cells))

    def _last_hidden(self, inputs: PackedInputs) -> Tensor:
        """Final hidden states of the last rows."""
        wanted = inputs.last_rows
        return self._forward(inputs, wanted) if self._trims_last_layer else self._forward(inputs)[wanted]

    def _forward(self, inputs: PackedInputs, wanted: Tensor | None = None) -> Tensor:
        attention = PackedAttention(self.attention, inputs)
        return self.model.forward(inputs.input_ids, inputs.positions, attention, wanted)

    def _layout(self, kind: "_Packed") -> Layout:
        return Layout.padded(
            kind.size,
            self.kernels.tile_rows,
            self.slots.num_slots,
            states=self.states is not None,
            restarts=self.restarts,
            shares=kind.shares,
        )

    def _decode_step(self, kind: "_Decode") -> Tensor:
        """One decode step of the first rows: tokens ``[size]``, or logits ``[size, V]`` to be sampled outside."""
        fields, size = self.state.fields, kind.size
        keys = self.prefix_groups.keys(size) if self.prefix_groups and kind.shares else None
        attention = DecodeAttention(self.attention, size, keys, divided=kind.divided)
        hidden = self.model.forward(fields[layout.TOKEN, :size], fields[layout.POSITION, :size], attention)
        logits = self.model.logits(hidden)
        if kind.features is not None:
            return self._next_tokens(logits, kind.features, None, self.state.history, self.state.step)
        if not len(self._logits):
            self._logits = torch.empty(self.slots.num_slots, logits.shape[1], dtype=logits.dtype, device=logits.device)
        # A graph keeps what it returns, and logits of every size would be a lot to keep.
        return self._logits[:size].copy_(logits)

    @torch.inference_mode()
    def _run_deferred(self) -> None:
        """Do what was put off until the results before it were known."""
        if self._deferred is not None:
            finish, self._deferred = self._deferred, None
            finish()

    def _sample(
        self, logits: Tensor, sampled: "_Sampled", columns: Tensor, history: Tensor, step: Tensor | None
    ) -> None:
        """The next tokens of these sequences from their logits ``[S, V]``, outside of any graph."""
        masks = None
        if sampled.guided:
            words = sampled.masks()
            flat, rows = self.up.send(words.reshape(-1), np.array(sampled.guided, np.int32))
            masks = flat.view(words.shape), rows
        self._next_tokens(logits, sampled.features, columns, history, step, masks, sampled)

    def _next_tokens(
        self,
        logits: Tensor,
        features: Features,
        columns: Tensor | None,
        history: Tensor,
        step: Tensor | None,
        masks: tuple[Tensor, Tensor] | None = None,
        sampled: "_Sampled | None" = None,
    ) -> Tensor:
        """Logits ``[S, V]`` to tokens ``[S]``, which are fed back; columns None are the first S."""
        state, places = self.state, slice(len(logits)) if columns is None else columns
        changed = logits
        if features.adjusts:
            bias = state.bias if features.biased else None
            changed = self.kernels.adjust(logits, state.marks, bias, columns, **state.penalties(places))
        if masks is not None:
            changed = changed.clone() if changed is logits else changed
            self.kernels.mask_(changed, *masks)
        if self._sample_rows is None:
            tokens = self._sample_in_groups(changed, sampled)
        else:
            tokens = self._sample_rows(changed, **state.sampling(places))
        if features.logprobs is not None:
            state.keep_logprobs(logprob_rows(logits, tokens, features.logprobs), places, step)
        if features.adjusts:
            self.kernels.count_(state.marks, tokens, columns)
        self.kernels.advance(tokens, state.fields, columns, history, step, self.end_tokens)
        return tokens

    def _sample_in_groups(self, logits: Tensor, sampled: "_Sampled | None") -> Tensor:
        assert sampled is not None, "the host knows who is sampled outside of a graph"
        params = [spec.sampling for spec in sampled.specs]
        return sample(logits, params, sampled.positions, self.ops, self.up, batched=self._batched_sampling)


class _Decode(NamedTuple):
    """A kind of decode step.

    Attributes:
        size: rows.
        extras: what it does beside sampling them; None if they are sampled outside.
        shares: whether rows share keys.
        divided: whether any row may have so many keys that they are divided.
    """

    size: int
    features: Features | None
    shares: bool
    divided: bool


class _Packed(NamedTuple):
    """A kind of packed step: its tokens with padding, and whether chunks share tiles."""

    size: int
    shares: bool


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The sequences of a plan that get tokens.

    Attributes:
        specs: of each.
        slots: int32, of each.
        positions: that their next tokens will have.
        extras: what they need together.
        guided: the numbers of those that have a grammar.
        masks: of these, see ``StepRunner.launch``.
    """

    specs: list[SequenceSpec]
    slots: np.ndarray
    positions: list[int]
    features: Features
    guided: list[int]
    masks: Masks

    @classmethod
    def of(cls, plan: StepPlan, slots: Slots, masks: Masks) -> "_Sampled":
        if isinstance(plan, DecodeWindow):
            ends = [(row.id, row.start + row.length) for row in plan.rows]
        else:
            ends = [(chunk.id, chunk.end) for chunk in plan.chunks if chunk.sampled]
        specs = [slots.specs[sequence_id] for sequence_id, _ in ends]
        return cls(
            specs,
            np.array([slots.slot_of[sequence_id] for sequence_id, _ in ends], np.int32),
            [end for _, end in ends],
            Features.of(specs),
            [number for number, spec in enumerate(specs) if spec.guided],
            masks,
        )


def _result(
    ids: list[list[int]],
    logprobs: list[list[Logprobs]],
    clock: "_Clock",
    ran: Ran,
    of_prompts: Mapping[int, list[Logprobs]] | None = None,
    pooled: Mapping[int, np.ndarray] | None = None,
) -> StepResult:
    return StepResult(
        ids,
        logprobs,
        of_prompts or {},
        pooled or {},
        seconds=clock.seconds(),
        graph_replays=ran.replays,
        graph_captures=ran.captures,
    )


def _until_ended(tokens: list[int]) -> list[int]:
    """The tokens before the first that says that the sequence was no longer decoded."""
    return tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens


class _Clock:
    """Seconds that the device spends between two points of its work."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._cuda = device.type == "cuda"
        self._started = self._stopped = time.perf_counter()
        self._mark()

    def stop(self) -> None:
        self._mark()
        self._stopped = time.perf_counter()

    def seconds(self) -> float:
        """Waits for the second point, unless a result behind it is there."""
        if not self._cuda:
            return self._stopped - self._started
        start, end = self._events
        if not end.query():
            host_waits.wait_for(end)
        milliseconds: float = start.elapsed_time(end)
        return milliseconds * 1e-3

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
