"""The engine: requests of token ids in, completions of token ids out."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, islice
from types import MappingProxyType

import numpy as np
from msgspec.structs import replace

from rosebatch.core.pooling_params import PLAIN_POOLING, ModelPooling
from rosebatch.core.request import Completion, Constraint, Request, StopMatcher
from rosebatch.engine.drafts.drafter import Drafter
from rosebatch.engine.drafts.window_drafter import WindowDrafter
from rosebatch.engine.metrics.outlook import Outlook, bin_of
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.engine.plan import NO_ADAPTER, AdapterKey, DecodeWindow, PackedStep, StepPlan, StepResult
from rosebatch.engine.sampling.masks import fill_masks, only_mask
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState, stop_ids_of
from rosebatch.engine.scheduling.servable import require_servable
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.step_runner import StepRunner


class Engine:
    """Schedules, runs and commits steps until every request is completed.

    With ``async_depth`` the next plan is launched before the results of the last are read. So the device seldom waits
    for Python.

    Args:
        scheduler: plans the steps.
        runner: carries them out.
        vocab_size: token ids are below this.
        max_model_len: maximum number of tokens of prompt and completion together.
        eos_token_ids: the model's end tokens.
        async_depth: plans that may be under way while the next is made, one more while all are of prompts; needs a
            scheduler with separate decodes.
        hidden_size: length of a hidden state; None if no request has more dimensions.
        generates: whether the model has an output projection.
        pooling: the model's own.
        drafter: proposes what may follow, before each step, or whether the device does. None for no drafts.
        adapters: that requests may name.

    Attributes:
        max_model_len: the same, but no more than the KV cache holds.
        stats: counts of all steps since ``restart_stats``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        async_depth: int = 0,
        hidden_size: int | None = None,
        generates: bool = True,
        pooling: ModelPooling = PLAIN_POOLING,
        drafter: Drafter | WindowDrafter | None = None,
        adapters: Mapping[str, AdapterKey] = MappingProxyType({}),
    ) -> None:
        separate = isinstance(scheduler.planner.policy, SeparateDecodes)
        assert separate or not async_depth, "mixed steps need the tokens of the step before"
        self.async_depth = async_depth
        self.scheduler = scheduler
        self.runner = runner
        self.vocab_size = vocab_size
        # A sequence that does not fit the cache alone could never finish.
        self.max_model_len = min(max_model_len, scheduler.max_sequence_len or max_model_len)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.hidden_size = hidden_size
        self.generates = generates
        self.pooling = pooling
        self.drafter = drafter
        self.adapters = adapters
        self.restart_stats()
        self._num_started = 0
        self._constraints: dict[int, Constraint] = {}
        self._launched: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences in a step."""
        return self.scheduler.planner.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Token budget of a step, see ``Scheduler``."""
        return self.scheduler.planner.max_num_batched_tokens

    @property
    def prefix_cache(self) -> bool:
        """Whether prompts with a common prefix share its K and V."""
        return self.scheduler.prefixes.enabled

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is still under way."""
        return len(self.scheduler.queues) > 0

    @property
    def num_unfinished(self) -> int:
        """Completions that are waiting or running."""
        return len(self.scheduler.queues)

    @property
    def num_ending(self) -> int:
        """Those of them whose tokens are all planned: they keep no other from a slot."""
        return self.scheduler.queues.num_ending

    def has_waiting(self, rows: int, tokens: int) -> bool:
        """Whether so many sequences wait, with so many tokens to compute. No more of them are looked at than needed."""
        waiting = self.scheduler.queues.waiting
        if len(waiting) < rows:
            return False
        sums = accumulate(sequence.num_uncomputed_tokens for sequence in waiting)
        return any(found >= tokens for found in sums)

    def outlook(self) -> Outlook:
        """What was done since ``restart_stats``, and what is left to do. It takes a look at every sequence."""
        stats, queues = self.stats, self.scheduler.queues
        requests = prompt_left = room = 0
        begun: Counter[int] = Counter()
        generated: Counter[int] = Counter()
        for sequence in queues:
            requests += sequence.sample == 0
            lacking = max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)
            length = sequence.num_tokens - sequence.num_prompt_tokens
            begun[bin_of(length)] += not lacking
            generated[bin_of(length)] += length
            prompt_left += lacking
            room += sequence.num_remaining_tokens * (1 + len(sequence.forks))
        return Outlook(
            1,
            max(requests, 1),
            len(queues),
            begun,
            prompt_left,
            generated,
            room,
            stats.finished.copy(),
            stats.stopped.copy(),
            stats.prompt_tokens,
            stats.output_tokens,
            stats.prefill_seconds,
            stats.decode_seconds,
            stats.token_steps,
            stats.decoded,
            stats.squares,
            stats.products,
            time.perf_counter() - self._counted_from,
        )

    def restart_stats(self) -> EngineStats:
        """Count from zero; returns the new counters, which the engine fills as it runs."""
        self.stats = EngineStats()
        self._counted_from = time.perf_counter()
        return self.stats

    def add(
        self,
        request: Request,
        *,
        stop_matcher: Callable[[], StopMatcher] | None = None,
        constraint: Callable[[], Constraint] | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request: each of its ``n`` completions is a sequence of its own.

        Args:
            request: what to complete.
            stop_matcher: makes one for each completion.
            constraint: makes one for each completion.
            arrival_time: when it came, in seconds of ``time.perf_counter``; None is now.

        Raises:
            RowError: see ``require_servable``, and ``require_steps`` and ``of`` of ``ModelPooling``.
        """
        self.require_servable(request)
        if request.pooling is not None:
            pooling = self.pooling.of(request.pooling)
            # No token of a decoder sees those after it.
            read = pooling.read(request.prompt_token_ids)
            request = replace(request, prompt_token_ids=read, pooling=pooling)
        if request.predicted and max(request.predicted) >= self.vocab_size:
            # Of a tokenizer with more tokens than the model.
            request = replace(request, predicted=())
        now = time.perf_counter() if arrival_time is None else arrival_time
        adapter = self.adapters[request.adapter] if request.adapter else NO_ADAPTER
        sequences, stop_ids = [], stop_ids_of(request.sampling, self.eos_token_ids, self.vocab_size)
        for sample in range(request.sampling.n):
            sequence = SequenceState.start(
                request,
                id=self._num_started,
                sample=sample,
                max_model_len=self.max_model_len,
                stop_ids=stop_ids,
                stop_matcher=None if stop_matcher is None else stop_matcher(),
                constraint=None if constraint is None else constraint(),
                arrival_time=now,
                adapter=adapter,
            )
            self._num_started += 1
            if sequence.constraint is not None:
                self._constraints[sequence.spec.id] = sequence.constraint
            sequences.append(sequence)
        first, *first.forks = sequences
        self.scheduler.add(first)

    def require_servable(self, request: Request) -> None:
        """Check a request; see the function of this name, ``ModelPooling.require_steps`` and ``Scheduler``."""
        require_servable(
            request, self.vocab_size, self.max_model_len, hidden_size=self.hidden_size, generates=self.generates
        )
        if request.pooling is not None:
            self.pooling.require_steps(request.pooling, request.prompt_token_ids)
        if request.images:
            self.scheduler.require_room(request)

    def step(self) -> list[Completion]:
        """Launch a plan and commit those that are due; returns the completions that they finished."""
        launched = self._launch_next()
        limit = self._max_launched() if launched else 0
        if 0 < len(self._launched) <= limit:
            return []
        assert self._launched, "a step must make progress"
        finished = self._commit_oldest()
        while launched and len(self._launched) > limit:
            finished += self._commit_oldest()
        while self._launched and not self.has_unfinished:
            # Launched before it was known that nothing was left to do.
            finished += self._commit_oldest()
        if self.async_depth and not self._launched:
            # Nothing could be planned before this was known. The device should not wait for the caller as well.
            self._launch_next()
        return [sequence.completion() for sequence in finished]

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Queue requests and yield completions as they finish.

        At most twice as many are queued as can run, because queueing takes time: the device works meanwhile.
        """
        queued = iter(requests)
        if self.async_depth:
            # The device begins with the first ones.
            rows = tokens = 0
            for request in islice(queued, self.max_num_seqs):
                self.add(request)
                rows, tokens = rows + 1, tokens + len(request.prompt_token_ids)
                if 8 * rows >= self.max_num_seqs and 8 * tokens >= self.max_num_batched_tokens:
                    yield from self.step()
                    rows = tokens = 0
        while True:
            for request in islice(queued, max(0, 2 * self.max_num_seqs - self.num_unfinished)):
                self.add(request)
            if not self.has_unfinished:
                return
            yield from self.step()

    def abort(self) -> None:
        """Wait for what is under way and drop every request, also after an error in a step.

        The prefix cache keeps what committed plans have computed.
        """
        launched, self._launched = self._launched, deque()
        try:
            for _, wait in launched:
                # Neither the result nor its error is read.
                with suppress(Exception):
                    wait()
        finally:
            self._constraints.clear()
            self.scheduler.abort()

    def _launch_next(self) -> bool:
        """Launch what can be planned; returns whether anything could."""
        planner = self.scheduler.planner
        last = self._launched[-1][0] if self._launched else None
        if isinstance(last, DecodeWindow) and last.drafts:
            # How many tokens it brings is not known before.
            return False
        if self.drafter is not None:
            self.drafter.propose(self.scheduler)
        # Where drafts follow, and what a grammar forces, is not known before either. Prompts need not wait for it.
        planner.decodes = last is None or not (planner.queries > 1 or planner.forcing)
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self._launched.append((plan, self.runner.launch(plan, self._masks(plan))))
        return True

    def _masks(self, plan: StepPlan) -> Callable[[], np.ndarray]:
        """See ``Masks``."""
        # Looked up now: an earlier plan's result may end one of them.
        guided = [i for i in plan.sampled_ids if i in self._constraints] if self._constraints else []
        constraints = [self._constraints[i] for i in guided]
        sequences = [self.scheduler.queues.started[i] for i in guided]

        def masks() -> np.ndarray:
            if not any([each.replayed or each.mask is not None or each.drafts for each in sequences]):  # noqa: C419
                # Mostly, and quicker to tell.
                return fill_masks(constraints, self.vocab_size)
            rows, ready = list[Constraint](), dict[int, np.ndarray]()
            for constraint, sequence in zip(constraints, sequences, strict=True):
                if sequence.replayed:
                    # Its constraint has followed this token already.
                    ready[len(rows)] = only_mask(sequence.replayed[0], self.vocab_size)
                elif sequence.mask is not None:
                    ready[len(rows)] = sequence.mask
                rows += [constraint, *sequence.ahead[: len(sequence.drafts)]]
            return fill_masks(rows, self.vocab_size, ready)

        return masks

    def _max_launched(self) -> int:
        """Plans that may be under way before the oldest is waited for.

        One more while all plans are of prompts: their last step may be short, and would end before the first decode
        steps are planned. After decode steps, plans wait for the blocks that these give back.
        """
        only_prompts = all(isinstance(plan, PackedStep) for plan, _ in self._launched)
        return self.async_depth + int(self.async_depth > 0 and only_prompts)

    def _commit_oldest(self) -> list[SequenceState]:
        plan, wait = self._launched.popleft()
        result = wait()
        now = time.perf_counter()
        live = len(self.scheduler.queues.running)
        self.stats.record(plan, result, now, blocks_used=self.scheduler.blocks.num_used, live=live)
        finished, gaps, drafted, accepted, forced = self.scheduler.commit(plan, result, now)
        self.stats.count_free(drafted, accepted, forced)
        if isinstance(self.drafter, WindowDrafter) and isinstance(plan, DecodeWindow) and plan.drafts:
            lengths = {row.id: len(ids) for row, ids in zip(plan.rows, result.token_ids, strict=True)}
            self.drafter.learn(plan.queries, plan.steps, lengths)
        for seconds, count in gaps.items():
            self.stats.itl.add(seconds, count)
        if self._constraints:
            for sequence in finished:
                # Later plans may have further tokens of it, which it does not get.
                self._constraints.pop(sequence.id, None)
        bins = [bin_of(len(sequence.generated)) for sequence in finished]
        self.stats.finished.update(bins)
        pairs = zip(bins, finished, strict=True)
        self.stats.stopped.update([length for length, sequence in pairs if sequence.finish_reason == "stop"])
        return finished
