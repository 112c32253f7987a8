"""The forward pass by kernels: packed prompts, decode steps as graphs; sampled tokens stay on the device.

The host launches and goes on. What a decode step needs lies in ``DeviceState``, which the step advances itself. So
steps follow each other without the host, and tokens come back through pinned memory. With grammars, the host
reads the last tokens while the device computes the next logits. Sampling is launched after that.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, product

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch.core.request import PackedLogprobs
from rosebatch.core.sampling_params import MAX_LOGPROBS
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.state_pool import StatePool
from rosebatch.engine.device_clock import DeviceClock
from rosebatch.engine.images import NOTHING_ENCODED, ImageEncoder, key_ends, rotary_shift, section_positions
from rosebatch.engine.plan import DecodeWindow, PackedStep, RestartPolicy, StepPlan, StepResult
from rosebatch.engine.pooling.pooled_states import PooledStates, reads_all, scores
from rosebatch.engine.sampling.features import Features
from rosebatch.engine.sampling.logits import SampledRow
from rosebatch.engine.sampling.logprobs import prompt_logprobs, read_all
from rosebatch.engine.staging import Staging
from rosebatch.engine.step_runner import Masks
from rosebatch.engine.triton_runner.attention import KeyEnds, RunMixers, Turns, triton_mixers
from rosebatch.engine.triton_runner.graphs import Ran, StepGraphs
from rosebatch.engine.triton_runner.packing import MAX_PADDED_TOKENS, pack, padded_size
from rosebatch.engine.triton_runner.prefix_groups import MIN_ROWS, PrefixGroupState
from rosebatch.engine.triton_runner.prefix_tiles import NO_TILES, group_tiles
from rosebatch.engine.triton_runner.results import to_result, until_ended, verified
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.engine.triton_runner.state import DeviceState, KnownTokens
from rosebatch.engine.triton_runner.steps import NOTHING, DecodeKind, DeviceSteps, PackedKind, Seen
from rosebatch.engine.triton_runner.token_sampler import Sampled, TokenSampler
from rosebatch.engine.triton_runner.warm_up import forms_of, warm_up_decodes, warm_up_tokens
from rosebatch.model.contract import NO_HEADS, Model, PoolingHeads
from rosebatch.model.mixers.mixer import TritonSetup
from rosebatch.ops.adapters import StackedRows
from rosebatch.ops.device import DeviceOps
from rosebatch.ops.ops import Ops
from rosebatch_kernels.common import host_waits

# Three plans are launched before the first is read. Each has tokens, log-probabilities, a prompt's, and pooled states.
_MAX_FETCHES = 12
# Each of these sends eight times: moves, cells, rotary shifts, adapters, tokens, places or ends of keys of images, and
# snapshots twice.
_MAX_SENDS = 24

# At most so many rows have the features that are warmed up: their tables would be large.
_FEATURE_ROWS = 16

# These wait for what prompts report, by the number of a chunk: log-probabilities, and pooled hidden states.
_PromptLogprobs = Callable[[], dict[int, PackedLogprobs]]
_Pooled = Callable[[], dict[int, np.ndarray]]


class TritonRunner:
    """Carries out step plans in order, without waiting for any.

    Args:
        model: the weights.
        cache: its KV cache, with one block more than the scheduler's pools.
        ops, kernels: the operators of this run.
        switches: for graphs, batched rollover and sampling, shared prefixes, the last layer; those of kernels are in
            ``ops`` and ``kernels``.
        vocab_size: width of the logits.
        eos_token_ids: the model's end tokens.
        max_num_seqs: maximum number of sequences.
        max_len: maximum number of tokens of a sequence.
        window: maximum number of decode steps of a plan.
        states: those of the model's layers that have one; None for a model without them.
        restarts: finds the rotary rows of tokens; None if they are the positions.
        images: encodes them; None for a model of text.
        pooling_heads: see ``PooledStates``.
        adapters: where the model's linears look for each row's; None for a model without adapters.
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
        images: ImageEncoder | None = None,
        pooling_heads: PoolingHeads = NO_HEADS,
        adapters: StackedRows | None = None,
    ) -> None:
        device = cache.device
        width = -(-max_len // cache.block_size)
        self.model = model
        self.cache = cache
        self.kernels = kernels
        self.states = states
        self.restarts = restarts
        self.images = images
        self.adapters = adapters
        # A kernel that turns by other rows than places adds up keys in another order: then all rows have that one.
        self._is_invariant = switches.batch_invariant
        self.pooling = PooledStates(pooling_heads)
        mixers = triton_mixers(model.mixers, TritonSetup(max_num_seqs, cache.dtype, device, switches))
        sharing = [spec for spec in model.mixers if spec.prefix_heads]
        kinds = {type(spec): mixers[type(spec)] for spec in sharing}
        heads = sharing[0].prefix_heads if sharing and all(kind.shares_keys for kind in kinds.values()) else None
        self.slots = Slots(max_num_seqs, width, keeps_tables=heads is not None)
        self.prefix_groups = None
        if heads is not None:
            pieces = mixers[type(sharing[0])].pieces
            self.prefix_groups = PrefixGroupState(self.slots, cache.block_size, heads, device, pieces)
        groups_tiles = heads is not None and all(spec.groups_tiles for spec in model.mixers)
        self._shares_tiles = groups_tiles and not switches.batch_invariant
        groups = len(cache.num_blocks)
        self.state = DeviceState(max_num_seqs, width, window, device, vocab_size, groups, max_len)
        self.sampler = TokenSampler(
            self.state,
            ops,
            kernels,
            eos_token_ids,
            batched=switches.batched_sampling,
            invariant=switches.batch_invariant,
        )
        self.steps = DeviceSteps(
            model,
            RunMixers(cache, self.state, ops, mixers, states),
            self.sampler,
            self.prefix_groups,
            shares_tiles=self._shares_tiles,
            trims_last_layer=switches.trim_last_layer,
            restarts=restarts,
            adapters=adapters,
        )
        powers = [2**k for k in range(max_num_seqs.bit_length())]
        self._known_sizes = sorted({min(size, max_num_seqs) for power in powers for size in (power, 3 * power)})
        self.decodes = StepGraphs(self.steps.decode, enabled=switches.cuda_graph)
        self.packed = StepGraphs(self.steps.packed, enabled=switches.cuda_graph)
        self.up, self.down = Staging(device, len(self.steps.packed_cells) + max_num_seqs, _MAX_SENDS), self._fetches()
        # Decode steps launched so far: the places of their tokens in the history follow from it.
        self._num_steps = 0
        self._apply = self.state.apply if switches.batched_rollover else self.state.apply_rollovers_one_by_one
        # Sampling that waits for the host: which tokens a grammar allows depends on the token before.
        self._deferred: Callable[[], None] | None = None

    @property
    def verifies(self) -> bool:
        """Whether decode steps may have drafts."""
        return self.sampler.fits_graphs and all(mixer.verifies for mixer in self.steps.attention.mixers.values())

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int, *, forces: bool = False, queries: Sequence[int] = ()) -> None:
        """Launch the kernels of plain steps of several sizes, and of all features. No sequence may have a slot.

        The steps have nothing but padding, at most so many tokens, so they change nothing that a plan reads. Prompts
        come first: their attention takes the compiler long.

        Args:
            max_num_tokens: of a step.
            forces: whether there may be steps of known tokens.
            queries: of a row in windows with drafts, if there may be any.
        """
        steps, features = self.steps, Features()
        self.cache.copy([(group, last - 1, last - 1) for group, last in enumerate(self.cache.num_blocks)], self.up)
        if self.states is not None:
            self.states.copy([(0, 0)], self.up)
        sizes = warm_up_tokens(max_num_tokens)
        adapts = {False, self.adapters is not None}
        for adapted, tokens, shares in product(adapts, sizes, {False, self._shares_tiles}):
            kind = PackedKind(tokens, shares, adapted=adapted)
            shared = NO_TILES if kind.shares else None
            packed = pack(PackedStep(()), self.slots, steps.layout(kind), steps.tile_rows, shared)
            cells, columns = self.up.send(packed, np.arange(min(self.slots.num_slots, kind.size), dtype=np.int32))
            steps.packed_cells[: len(cells)].copy_(cells)
            hidden = steps.packed(kind)
            for count in {1, len(columns)} if self.sampler.fits_graphs and not adapted else ():
                logits = self.model.logits(hidden[:count])
                self.sampler.next_tokens(logits, features, columns[:count], decodes=False)
                if len(columns) <= _FEATURE_ROWS:
                    self._warm_up_features(logits, columns[:count])
        kinds, form = warm_up_decodes(self.slots.buckets, steps.attention.decode_form), steps.attention.decode_form
        inside = features if self.sampler.fits_graphs else None
        for adapted, (rows, divided), shares in product(adapts, kinds, {False, self.prefix_groups is not None}):
            if not shares or rows >= MIN_ROWS:
                steps.decode(DecodeKind(rows, inside, shares, divided, adapted=adapted))
        if forces:
            for (rows, divided), shares in product(
                warm_up_decodes(self._known_sizes, form), {False, self.prefix_groups is not None}
            ):
                if not shares or rows >= MIN_ROWS:
                    self.model.logits(steps.decode(DecodeKind(rows, None, shares, divided, knows=True)))
        for count in queries:
            self.state.allocate_tokens()
            sizes = [size for size in self._known_sizes if size % count == 0]
            for size, divided in forms_of(sizes, form):
                steps.decode(DecodeKind(size // count, features, shares=False, divided=divided, queries=count))
        self._reset()

    def _warm_up_features(self, logits: Tensor, columns: Tensor) -> None:
        """Launch what features add to the sampling of these rows: no size of a step decides which kernels that are."""
        kinds = Features(), Features(adjusts=True), Features(adjusts=True, biased=True), Features(logprobs=MAX_LOGPROBS)
        words = torch.zeros(len(logits), -(-logits.shape[1] // 32), dtype=torch.int32, device=logits.device)
        # Decode steps with masks sample from copies of the logits.
        steps = [
            (logits, columns, None, False),
            (logits, None, None, True),
            (logits, columns, (words, columns), False),
            (logits[columns], columns, (words, columns), True),
        ]
        with self.state.tables_of(len(logits)):
            for (given, own, masks, decodes), features in product(steps, kinds):
                tokens = self.sampler.next_tokens(given, features, own, masks, decodes=decodes)
        # Those of a prompt.
        self.kernels.logprob_rows(logits, tokens.long(), 0, MAX_LOGPROBS)

    def launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """See ``rosebatch.engine.step_runner.StepRunner``."""
        before = host_waits.count()
        if plan.reset:
            self._reset()
        self._run_deferred()
        wait = self._launch(plan, masks)
        launching = host_waits.count() - before

        def counted() -> StepResult:
            before = host_waits.count()
            result = wait()
            return structs.replace(result, syncs=launching + host_waits.count() - before)

        return counted

    def release(self) -> None:
        """Wait for the device, and free the graphs. No plan may follow."""
        event = torch.cuda.Event()
        event.record()
        host_waits.wait_for(event)
        self.decodes.release()
        self.packed.release()

    def _reset(self) -> None:
        """Forget what an interrupted launch has left."""
        self._deferred = None
        self._num_steps = 0
        self.state.step.zero_()
        self.down = self._fetches()

    def _fetches(self) -> Staging:
        return Staging(self.cache.device, self.state.history.numel(), _MAX_FETCHES)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        clock = DeviceClock(self.cache.device)
        write = self.slots.update(plan)
        if self.prefix_groups and (plan.reset or plan.started or write.moves):
            self.prefix_groups.forget()
        self._apply(write, self.up)
        if self.images is not None and self.images.axes and plan.started:
            axes = self.images.axes
            shifts = {self.slots.slot_of[spec.id]: rotary_shift(spec.images, axes) for spec in plan.started}
            self.state.set_rotary_shifts(shifts, self.up)
        if self.adapters is not None and plan.started:
            for adapter, place in plan.adapter_loads:
                self.adapters.load(adapter, place)
            places = {self.slots.slot_of[spec.id]: self.adapters.slot_of(spec.adapter) for spec in plan.started}
            self.state.set_adapters(places, self.up)
        self.cache.change(plan, self.up)
        if self.states is not None:
            self.states.load(plan, self.slots.states_of, self.up)
        sampled = Sampled.of(plan, self.slots, masks)
        self.state.allocate(sampled.features)
        if isinstance(plan, DecodeWindow):
            return self._launch_decodes(plan, sampled, clock)
        return self._launch_packed(plan, sampled, clock)

    def _launch_decodes(self, plan: DecodeWindow, sampled: Sampled, clock: DeviceClock) -> Callable[[], StepResult]:
        inside = self.sampler.fits_graphs and not sampled.guided and not plan.knows
        drawn = [row for row in plan.rows if row.length]
        pairs = zip(sampled.slots.tolist(), sampled.specs, drawn, strict=True)
        begun = [
            (slot, SampledRow(spec, row.start + (len(row.known) or 1), row.output_token_ids or row.resumed))
            for slot, spec, row in pairs
            if row.output_token_ids or row.resumed
        ]
        if begun:
            self.state.set_tokens(begun, self.up)
        features = sampled.features if inside else None
        kind = self._set_known(plan) if plan.knows else self._set_window(plan, sampled, features)
        ran = self.decodes.run(kind, plan.steps)
        window = len(self.state.history)
        steps = [(self._num_steps + i) % window for i in range(plan.steps)]
        # Nothing is sampled where all rows have more known tokens to come.
        self._num_steps += plan.steps if drawn else 0
        lengths = [row.length for row in drawn]
        fetched: list[Callable[[], np.ndarray]] = []

        def finish() -> None:
            if plan.knows and drawn:
                ends = accumulate(len(row.known) for row in plan.rows)
                lasts = [end - 1 for row, end in zip(plan.rows, ends, strict=True) if row.length]
                rows, columns = self.up.send(np.array(lasts, np.int32), sampled.slots)
                logits = self.model.logits(ran.out[rows])
                self.sampler.sample(logits, sampled, columns, self.up, decodes=True)
            elif not inside and drawn:
                assert plan.steps == 1, "tokens are sampled outside of the graph"
                (columns,) = self.up.send(sampled.slots)
                self.sampler.sample(ran.out[columns], sampled, columns, self.up, decodes=True)
            clock.stop()
            fetched.append(self.down.fetch(self.state.history))
            if sampled.features.logprobs is not None:
                fetched.append(self.down.fetch(self.state.logprobs[:-1]))

        def wait() -> StepResult:
            # Its own sampling only: that of a later plan needs the tokens that are read here.
            if self._deferred is finish:
                self._run_deferred()
            if plan.drafts:
                shape = len(steps), kind.size, kind.queries
                history = fetched[0]()[steps, : kind.size * kind.queries].reshape(shape)
                ids, drafted, accepted = verified(history[:, sampled.slots], lengths)
                return to_result(ids, [], clock, ran, drafted=drafted, accepted=accepted)
            where = np.ix_(np.array(steps), sampled.slots)
            ids = until_ended(fetched[0]()[where].T, lengths)
            logprobs = [] if len(fetched) == 1 else read_all(fetched[1]()[where].swapaxes(0, 1), sampled.specs, ids)
            return to_result(ids, logprobs, clock, ran)

        self._deferred = finish
        if plan.knows or not sampled.guided:
            # All that a grammar has to see is known.
            self._run_deferred()
        return wait

    def _set_known(self, plan: DecodeWindow) -> DecodeKind:
        """Set the rows of a step of known tokens: one for each, in the order of the plan."""
        slot_of, specs = self.slots.slot_of, self.slots.specs
        known = [KnownTokens(slot_of[r.id], r.start, r.known, specs[r.id].decode_len - 1) for r in plan.rows]
        # A graph for each of a few sizes: rows that are not live cost less than captures.
        rows = plan.num_tokens
        bucket = next(size for size in self._known_sizes if size >= rows)
        slots, positions = self.state.set_rows(known, bucket, self.up)
        groups, shares, own_keys = self.prefix_groups, False, positions + 1
        if groups is not None and (shares := groups.update_known(slots, positions, bucket, self.up)):
            own_keys -= groups.own_begins[: len(slots)]
        divided = own_keys.max() > self.steps.attention.undivided_keys(bucket)
        shifted = self._has_sections and (self._is_invariant or any(specs[row.id].images for row in plan.rows))
        adapted = self._is_adapted(row.id for row in plan.rows)
        return DecodeKind(bucket, None, shares, bool(divided), shifted, knows=True, adapted=adapted)

    def _set_window(self, plan: DecodeWindow, sampled: Sampled, features: Features | None) -> DecodeKind:
        """Set what a window of steps reads beside the state of its rows."""
        bucket, queries = self.slots.bucket([row.id for row in plan.rows]), plan.queries if plan.drafts else 0
        if queries:
            # As of known tokens.
            bucket = min(1 << (bucket - 1).bit_length(), self.slots.num_slots)
            assert bucket * queries <= self.slots.num_slots, "the planner knows how many rows a step has"
            assert features == Features(), "a kernel samples all rows, and nothing is changed"
            known = []
            for slot, spec, row in zip(sampled.slots.tolist(), sampled.specs, plan.rows, strict=True):
                before, position = spec.predicted, row.start + 1 - len(row.unseen)
                place, ids = (len(before) + position, row.unseen) if position else (0, before + row.unseen)
                known.append((slot, len(before), place, ids))
            self.state.set_known(known, self.up)
            if plan.answers is not None:
                self.state.set_answers(plan.answers, self.up)
        own_keys = np.array(sampled.positions)
        groups, shares = self.prefix_groups, False
        if groups is not None and queries:
            # Rows go on by numbers of tokens that are not known.
            groups.forget()
        elif groups is not None and (shares := groups.update(plan.rows, bucket, self.up)):
            own_keys -= groups.own_begins[sampled.slots]
        divided = own_keys.max() > self.steps.attention.undivided_keys(bucket * max(queries, 1))
        shifted = self._has_sections and (self._is_invariant or any(spec.images for spec in sampled.specs))
        adapted = self._is_adapted(row.id for row in plan.rows)
        return DecodeKind(bucket, features, shares, bool(divided), shifted, queries, adapted=adapted)

    def _launch_packed(self, plan: PackedStep, sampled: Sampled, clock: DeviceClock) -> Callable[[], StepResult]:
        count = len(sampled.specs)
        if count and self.state.begins(sampled.features):
            chunks = [chunk for chunk in plan.chunks if chunk.sampled]
            rows = [SampledRow(s, c.end, c.output_token_ids) for s, c in zip(sampled.specs, chunks, strict=True)]
            self.state.set_tokens(list(zip(sampled.slots.tolist(), rows, strict=True)), self.up)
        self.pooling.update(plan)
        ran, columns, of_prompts, pooled = self._run_packed(plan, sampled)
        if self.states is not None:
            self.states.save(plan, self.slots.states_of, self.up)
        encoded = NOTHING_ENCODED if self.images is None else self.images.take_encoded()
        if not count:
            clock.stop()
            return lambda: to_result([], [], clock, ran, of_prompts(), pooled(), encoded)
        self.sampler.sample(self.model.logits(ran.out[:count]), sampled, columns, self.up, decodes=False)
        clock.stop()
        fetch = self.down.fetch(self.sampler.first_tokens[0, :count])
        asked = sampled.features.logprobs is not None
        fetch_logprobs = self.down.fetch(self.state.logprobs[-1, :count]) if asked else None

        def wait() -> StepResult:
            ids = [[token] for token in fetch().tolist()]
            rows = None if fetch_logprobs is None else fetch_logprobs()[:, None]
            logprobs = [] if rows is None else read_all(rows, sampled.specs, ids)
            return to_result(ids, logprobs, clock, ran, of_prompts(), pooled(), encoded)

        return wait

    def _run_packed(self, plan: PackedStep, sampled: Sampled) -> tuple[Ran, Tensor, _PromptLogprobs, _Pooled]:
        """Final hidden states of the last rows, the slots of the sampled sequences, and what prompts report."""
        specs = self.slots.specs
        # Steps that compute logits of whole prompts, or encode images, are long: they run as they are.
        whole, scored = reads_all(plan, specs), scores(plan, specs)
        sees = any(specs[chunk.id].images for chunk in plan.chunks)
        padded = self.packed.enabled and plan.num_tokens <= MAX_PADDED_TOKENS and not scored and not sees
        tile_rows = self.kernels.tile_rows
        # Tiles that chunks share have no ends of keys.
        shares = self._shares_tiles and not (sees and self._sees_both_ways)
        shared = group_tiles(plan, self.slots, self.cache.block_size, tile_rows) if shares else None
        adapted = self._is_adapted(chunk.id for chunk in plan.chunks)
        if padded:
            kind = PackedKind(padded_size(plan.num_tokens), shared is not None, whole, adapted)
            layout = self.steps.layout(kind)
        else:
            layout = self.steps.exact_layout(plan, shared)
        cells, columns = self.up.send(pack(plan, self.slots, layout, tile_rows, shared), sampled.slots)
        hidden: Tensor | None = None
        of_prompts: _PromptLogprobs = dict
        seen = self._seen(plan) if sees else NOTHING
        if padded:
            self.steps.packed_cells[: len(cells)].copy_(cells)
            ran = self.packed.run(kind)
        elif whole:
            ran = Ran(self.steps.forward(layout.inputs(cells), None, seen, adapted=adapted))
        else:
            ran = Ran(self.steps.last_hidden(layout.inputs(cells), seen, adapted=adapted))
        if whole:
            hidden = ran.out[: plan.num_tokens]
            ran = ran._replace(out=hidden[layout.inputs(cells).last_rows])
        if hidden is not None and scored:
            operators = self.model.logits, self.kernels.logprob_rows
            of_prompts = prompt_logprobs(plan.chunks, specs, hidden, *operators, self.up, self.down)
        pooled = self.pooling.fetch(plan, specs, ran.out[len(columns) :], hidden, self.up, self.down)
        return ran, columns, of_prompts, pooled

    def _is_adapted(self, ids: Iterable[int]) -> bool:
        """Whether any of these sequences has an adapter."""
        return self.adapters is not None and any(self.slots.specs[each].adapter for each in ids)

    @property
    def _has_sections(self) -> bool:
        """Whether images have rotary positions of their own."""
        return self.images is not None and self.images.sections is not None

    @property
    def _sees_both_ways(self) -> bool:
        """Whether an image's tokens see each other."""
        return self.images is not None and self.images.both_ways != ""

    def _seen(self, plan: PackedStep) -> Seen:
        """What a step has of images."""
        assert self.images is not None, "the model sees"
        specs, turns = self.slots.specs, None
        if self.images.sections is not None:
            axes = self.images.axes
            rows = [section_positions(specs[chunk.id].images, chunk.start, chunk.end, axes) for chunk in plan.chunks]
            (sent,) = self.up.send(np.concatenate(rows).ravel())
            turns = Turns(sent.view(-1, axes), self.images.sections)
        seeing: KeyEnds | None = None
        if self._sees_both_ways:
            ends = [key_ends(specs[chunk.id].images, chunk.start, chunk.end) for chunk in plan.chunks]
            (places,) = self.up.send(np.concatenate(ends))
            seeing = KeyEnds(places, everywhere=self.images.both_ways != "windows")
        return Seen(self.images.rows_of(plan.chunks, specs), turns, seeing)

    @torch.inference_mode()
    def _run_deferred(self) -> None:
        """Launch what waited for earlier results."""
        if self._deferred is not None:
            finish, self._deferred = self._deferred, None
            finish()
