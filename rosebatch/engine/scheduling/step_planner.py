"""Which tokens of which sequences are computed in the next step, and in which blocks. No torch.

A sequence has tokens and computed tokens. A step lets computed catch up within the token budget. Chunked prefill,
prefix hits and resuming after a preemption are that one rule. Blocks are reserved here, before the forward pass; K and
V are written inside it.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from rosebatch.engine.plan import BlockChange, Chunk, DecodeRow, StepPlan
from rosebatch.engine.scheduling.answer_pool import AnswerPool
from rosebatch.engine.scheduling.block_tables import BlockTables
from rosebatch.engine.scheduling.chunk_ends import ChunkEnds
from rosebatch.engine.scheduling.host_blocks import HostBlocks
from rosebatch.engine.scheduling.plan_builder import PlanBuilder
from rosebatch.engine.scheduling.prefix_cache import PrefixCache
from rosebatch.engine.scheduling.queues import SequenceQueues
from rosebatch.engine.scheduling.resident_adapters import ResidentAdapters
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.engine.scheduling.snapshots import Snapshots

_NO_TOKENS = array("I")
# A sequence that waits for the slot of an adapter lets others pass: those that came after it, up to so many times as
# may run. Then the next slot that is free is its own.
_PASSES = 4
# Waiting sequences at most that a plan lets wait for what it computes: the next one is not far.
_MOST_ASIDE = 64


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Prompts and decodes share packed steps."""


@dataclass(frozen=True, slots=True)
class SeparateDecodes:
    """Prompts go first, in packed steps of their own; decodes follow in windows of up to ``max_steps``."""

    max_steps: int


StepPolicy = MixedSteps | SeparateDecodes
MIXED = MixedSteps()


@dataclass(slots=True, kw_only=True)
class StepPlanner:
    """Plans steps for the sequences in the queues; see ``Scheduler`` for the options.

    A plan counts its tokens as computed and sampled (pending) at once.

    Attributes:
        queries: rows of each sequence in decode steps: with more than one, the device looks for drafts.
        decodes: whether a plan may be of decode steps; else they wait for the results of earlier plans.
        forces: see ``Scheduler``.
        answers: those that were finished, in which drafts are found too; None for no drafts.
        forces_up_to: sequences at most whose tokens are forced: what grammars force in more takes the host too long.
    """

    queues: SequenceQueues
    blocks: BlockTables
    prefixes: PrefixCache
    host_blocks: HostBlocks
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: StepPolicy
    chunked_prefill: bool
    share_prompts: bool
    ends: ChunkEnds
    adapters: ResidentAdapters
    forces: int = 0
    forces_up_to: int = sys.maxsize
    answers: AnswerPool | None = None
    rewind: Callable[[SequenceState], None] | None = None
    queries: int = 1
    decodes: bool = True
    max_chunk: int = field(init=False)
    _plan: PlanBuilder = field(default_factory=PlanBuilder)
    # Whether the token budget, and not slots or blocks, ended the last admission.
    _admitting: bool = False
    # Waiting sequences whose beginning this plan computes: they begin behind it in the next one.
    _aside: list[SequenceState] = field(default_factory=list)
    # Those whose adapter has no slot.
    _passed: list[SequenceState] = field(default_factory=list)
    _ends_anywhere: bool = False
    # Of the answers that the runner has.
    _sent_version: int = 0

    def __post_init__(self) -> None:
        self.max_chunk = min(self.max_num_batched_tokens, self.blocks.longest_chunk or self.max_num_batched_tokens)

    def reset(self) -> None:
        """Start over: all sequences were dropped, and the runner has to forget them."""
        self._plan, self._sent_version = PlanBuilder(reset=True), 0
        self.host_blocks.free_all()
        self.adapters.reset()
        self._admitting, self._aside, self._passed = False, [], []

    def next_plan(self) -> StepPlan | None:
        """Running sequences, oldest first, then as many waiting ones as fit; None if nothing can be planned."""
        plan = self._next_plan()
        if plan is None and not any(sequence.num_pending_tokens for sequence in self.queues):
            # Blocks are short, and no result will give any back: a chunk has to end where they do.
            self._ends_anywhere = True
            plan = self._next_plan()
            self._ends_anywhere = False
        return plan

    def _next_plan(self) -> StepPlan | None:
        """The same with chunks that end where they may, unless ``_ends_anywhere``."""
        budget = self._continue_running()
        # A preempted sequence would take its blocks back at once. But if nothing runs, only it can go on.
        if not (self._plan.num_preempted and self.queues.running) and self._admits():
            budget = self._admit_waiting(budget)
            self._admitting = budget <= 0 or bool(self._aside)
            self.queues.waiting.extendleft(reversed([*self._passed, *self._aside]))
            self._aside, self._passed = [], []
        if not self._plan.chunks and self.decodes and isinstance(self.policy, SeparateDecodes):
            self._plan_decodes(self.policy.max_steps)
        plan = self._plan.build(self.queues.released)
        if plan is not None:
            self._plan, self.queues.released = PlanBuilder(), []
            if self.snapshots is not None:
                self.snapshots.pending.clear()
            self.blocks.release(self.queues.running, self.queues.forked)
        return plan

    def _continue_running(self) -> int:
        """Plan chunks of the running sequences; returns the rest of the budget."""
        budget, running = self.max_num_batched_tokens, self.queues.running
        # Where decodes are separate, only one has tokens here, beside those whose chunks end for snapshots.
        mixed = isinstance(self.policy, MixedSteps)
        for sequence in [each for each in running if mixed or not each.decoding]:
            if budget <= 0 or sequence.waits:
                # The youngest are those that others take blocks from.
                break
            length = min(sequence.num_uncomputed_tokens + len(sequence.drafts), budget, self.max_chunk)
            if sequence.snapshot_ends:
                length = min(length, sequence.snapshot_ends[0] - sequence.num_computed_tokens)
            if length > 1 or not sequence.decoding:
                length = self._cut(sequence, sequence.num_computed_tokens, self.blocks.cut(sequence, length))
                if not length:
                    return 0
            while (changes := self._reserve(sequence, length)) is None:
                if not self._make_room() or sequence.waits:
                    return budget
            budget = self._plan_chunk(sequence, length, changes, budget)
        return budget

    def _admits(self) -> bool:
        """Whether to look at the waiting. If decodes have to pause for prompts, these are admitted in large groups."""
        if isinstance(self.policy, MixedSteps):
            return True
        waiting, slots = len(self.queues.waiting), self.max_num_seqs - len(self.queues.running)
        return waiting > 0 and (self._admitting or slots >= min(waiting, self.max_num_seqs // 8 or 1))

    def _admit_waiting(self, budget: int) -> int:
        """Plan chunks of waiting sequences, in order; returns the rest of the budget.

        A sequence is admitted if all its known tokens fit, with a spare block for each running one. Otherwise it would
        be preempted at once. One whose adapter has no slot lets others pass. Where decode steps are separate, saved
        ones go on in these: such a plan has no chunks.
        """
        waiting, running, blocks = self.queues.waiting, self.queues.running, self.blocks
        separate = isinstance(self.policy, SeparateDecodes)
        over_budget_allowed = not self.chunked_prefill
        snapshots = self.snapshots
        self.adapters.begin(running)
        oldest = sys.maxsize
        while waiting and len(running) + len(self._aside) < self.max_num_seqs and budget > 0:
            sequence = waiting[0]
            if not self.adapters.admits(sequence.spec.adapter):
                self._passed.append(waiting.popleft())
                oldest = min(oldest, sequence.id)
                continue
            if sequence.id - oldest >= _PASSES * self.max_num_seqs:
                break
            resumes = separate and bool(sequence.saved_blocks)
            if self._plan.chunks if resumes else self._plan.started and not self._plan.chunks:
                break
            # A fork's snapshot is found no more, so it keeps that until others need its blocks.
            keeps = snapshots is not None and bool(sequence.tables)
            found = 0 if sequence.tables else self.prefixes.take(sequence)
            if snapshots is not None and not self._may_begin(sequence, found):
                if len(self._aside) == _MOST_ASIDE:
                    break
                self._aside.append(waiting.popleft())
                continue
            start = max(sequence.num_computed_tokens, sequence.num_saved_tokens)
            known = sequence.num_prompt_tokens + len(sequence.generated)
            length = whole = known - start
            if self.chunked_prefill:
                length = min(whole, budget, self.max_chunk)
                if sequence.snapshot_ends:
                    length = min(length, sequence.snapshot_ends[0] - start)
                if length < whole and not (length := self._cut(sequence, start, length)):
                    if not keeps:
                        blocks.free(sequence)
                    return 0
            elif length > budget and not (over_budget_allowed and length > self.max_num_batched_tokens):
                blocks.free(sequence)
                break
            end = start + length
            if not blocks.has_room(sequence, known, end, spare=len(running)):
                if not keeps:
                    blocks.free(sequence)
                if not running and self._release_fork():
                    continue
                break
            # Others may follow a chunk that ends for a snapshot, and take no block that it will need.
            held = end if snapshots is None else known
            is_new, missing = not any(sequence.tables), blocks.short_of(sequence, held)
            changes = blocks.take(sequence, held, missing, self._plan.wipes, self._plan.copies)
            self.queues.start_next()
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
            self._plan.started.append(sequence.spec)
            adapter = sequence.spec.adapter
            if (place := self.adapters.take(adapter, chain(self._passed, waiting))) is not None:
                self._plan.adapter_loads.append((adapter, place))
            if snapshots is not None and (slot := snapshots.load(sequence)) is not None:
                self._plan.state_loads.append((slot, sequence.spec.id))
            if sequence.saved_blocks:
                before = sequence.num_computed_tokens
                self._plan.restores += self.host_blocks.restore(sequence)
                # Others may share them again. No copy of this plan reads them: copies come before restores.
                self.prefixes.register(sequence, before, sequence.num_computed_tokens, in_flight=True)
            if resumes:
                sequence.decoding = sequence.resumed = True
                continue
            changes = changes if is_new else blocks.entries(sequence)
            budget = self._plan_chunk(sequence, length, changes, budget)
            over_budget_allowed = False
        return budget

    def _may_begin(self, sequence: SequenceState, found: int) -> bool:
        """Decide where a sequence with states leaves snapshots; False if it has to wait for the next plan.

        This plan makes the snapshot that it begins with, or there is none for its forks before those of others begin.
        ``found``: see ``PrefixCache.take``.
        """
        snapshots = self.snapshots
        assert snapshots is not None, "it has states"
        if sequence.snapshot in snapshots.pending or (sequence.forks and self._plan.chunks and snapshots.is_full):
            self.blocks.free(sequence)
            return False
        behind = islice(self.queues.waiting, 1, None) if self.prefixes.enabled else ()
        snapshots.plan_ends(sequence, found, behind, forks=self.share_prompts)
        return True

    def _cut(self, sequence: SequenceState, start: int, length: int) -> int:
        """How many of so many tokens from ``start`` on are a chunk; 0 where a step with more room has to take it."""
        if start + length >= sequence.num_tokens:
            return length
        images = sequence.spec.images
        found = self.ends.longest(images, start, length)
        if found or not (self._ends_anywhere or (self.max_chunk < self.ends.unit and not self._plan.chunks)):
            return found
        return self.ends.longest_whole(images, start, length)

    def _plan_chunk(self, sequence: SequenceState, length: int, changes: tuple[BlockChange, ...], budget: int) -> int:
        """Returns the rest of the budget: nothing after a part of a prompt, whose other blocks are not taken yet."""
        spec, start, decodes = sequence.spec, sequence.num_computed_tokens, sequence.decoding
        known, end = sequence.num_tokens, start + length
        token_ids, drafts = sequence.tokens(start, end), sequence.drafts
        if drafts:
            drafts = sequence.drafts = drafts[: max(end - known, 0)]
            token_ids = token_ids + array("I", drafts)
        # Blocks with drafts are registered once these are verified.
        self.prefixes.register(sequence, start, end - len(drafts), in_flight=True)
        sequence.num_computed_tokens = end
        ends = end >= known
        sampled = 1 + len(drafts) if ends and spec.pooling is None and spec.scoring is None else 0
        if ends:
            # A pooled state, or log-probabilities, come in the place of a token.
            sequence.num_pending_tokens += sampled or 1
            sequence.decoding = sampled > 0
            if known + (sampled or 1) == spec.max_len:
                self.queues.planned.append(sequence)
        parts = bool(sequence.snapshot_ends) and end == sequence.snapshot_ends[0]
        if parts:
            self._save(sequence)
        elif ends and sequence.forks:
            self._fork(sequence, sequence.num_prompt_tokens - 1)
        adjusts = sampled and spec.has_features and spec.sampling.adjusts
        output = tuple(sequence.output_token_ids) if adjusts else ()
        pools = ends and spec.pooling is not None
        self._plan.chunks.append(Chunk(spec.id, start, token_ids, sampled, changes, output, pools, decodes))
        return budget - length if ends or parts else 0

    def _save(self, sequence: SequenceState) -> None:
        """Save the states behind a chunk, for those that wait for them, and give them to its forks after the last."""
        del sequence.snapshot_ends[0]
        snapshots, end, size = self.snapshots, sequence.num_computed_tokens, self.blocks.block_size
        assert snapshots is not None, "it has states"
        forks = () if sequence.snapshot_ends or not self.share_prompts else sequence.forks
        block = None if end % size else self.prefixes.findable(sequence, end // size)
        if block is None and not forks:
            return
        if (slot := snapshots.save(block, forks)) is not None:
            self._plan.state_saves.append((sequence.spec.id, slot))
        if forks and forks[0].snapshot is not None:
            self._fork(sequence, end)

    def _fork(self, sequence: SequenceState, end: int) -> None:
        """Give its forks the blocks of its prompt: for them, the tokens before ``end`` are computed.

        They join the waiting before the next plan. In this plan, a copy of the last block would run before the block
        is written. Sequences with states have forks that share where there is a snapshot.
        """
        shares = self.share_prompts and (self.snapshots is None or sequence.forks[0].snapshot is not None)
        for fork in sequence.forks if shares else ():
            self.blocks.share(sequence, fork, end)
            fork.num_computed_tokens = end
            fork.num_cached_tokens = sequence.num_cached_tokens
        self.queues.fork(sequence)

    def _plan_decodes(self, max_steps: int) -> None:
        """Plan a window of decode steps for all sequences that have tokens to come."""

        def live() -> list[tuple[SequenceState, int]]:
            running = self.queues.running
            # Read for each sequence of a step: properties, such as ``decode_len``, would take several times as long.
            return [
                (s, left)
                for s in running
                if s.decoding
                and (
                    left := (s.spec.restart_len or s.spec.max_len)
                    - (s.num_prompt_tokens + len(s.generated) + s.num_pending_tokens)
                )
            ]

        pairs, queries = live(), self.queries
        if any([s.lags or s.num_uncomputed_tokens > 1 for s, _ in pairs]):  # noqa: C419 (as below)
            # The host sends each row's last token, so it has to have seen them all.
            if not any([s.num_pending_tokens for s, _ in pairs]):  # noqa: C419
                self._plan_known(live)
            return
        if queries > 1:
            # Some may have come back from the host in this plan, after drafts were decided on.
            sampled_only = not any(sequence.spec.guided or sequence.spec.has_features for sequence, _ in pairs)
            queries = min(queries, self._most_queries()) if sampled_only else 1
        # No row needs more steps, if all drafts are right: those after them would be in vain.
        steps = min(max_steps, -(-max([left for _, left in pairs], default=0) // queries))
        if any([sequence.spec.guided for sequence, _ in pairs]):  # noqa: C419 (a generator takes twice as long)
            # The grammar allows the next token only once the host has seen the last one.
            steps = min(steps, 1)
        while not self.blocks.has(
            map(sum, zip(*filter(None, needed := self._needs(pairs, steps * queries)), strict=True))
        ):
            if steps > 1:
                steps //= 2
            elif queries > 1:
                steps, queries = min(max_steps, queries // 2), 1
            elif self._make_room():
                pairs = live()
            else:
                return
        rows, wipes, copies, most = self._plan.rows, self._plan.wipes, self._plan.copies, steps * queries
        for (sequence, left), blocks in zip(pairs, needed, strict=True):
            spec, start = sequence.spec, sequence.num_computed_tokens
            length = left if left < most else most
            changes = self.blocks.take(sequence, start + length, blocks, wipes, copies) if blocks else ()
            resumed: tuple[int, ...] = ()
            if sequence.resumed:
                changes, resumed = self.blocks.entries(sequence), tuple(sequence.output_token_ids)
                sequence.resumed = False
            unseen = _NO_TOKENS
            if queries > 1:
                unseen = sequence.tokens(sequence.num_seen_tokens, start + 1)
                sequence.num_unsure_tokens = length - 1
            rows.append(DecodeRow(spec.id, start, length, changes, resumed, unseen))
            sequence.num_computed_tokens = start + length
            sequence.num_pending_tokens += length
            if left <= most:
                self.queues.planned.append(sequence)
        self._plan.steps, self._plan.queries = steps, queries
        if queries > 1 and self.answers is not None and self.answers.version != self._sent_version:
            self._plan.answers, self._sent_version = self.answers.tokens, self.answers.version

    def _plan_known(self, live: Callable[[], list[tuple[SequenceState, int]]]) -> None:
        """Plan a step in which sequences catch up with tokens that a grammar forced: a row for each known token."""
        spare = self.max_num_seqs
        while pairs := live():
            ends = self._known_ends(pairs, spare)
            needed = [self.blocks.short_of(s, end) for (s, _), end in zip(pairs, ends, strict=True)]
            if self.blocks.has(map(sum, zip(*filter(None, needed), strict=True))):
                break
            if spare:
                # Further tokens take no blocks from others: one of these may have come back in this plan.
                spare = 0
            elif not self._make_room():
                return
        else:
            return
        wipes, copies = self._plan.wipes, self._plan.copies
        for (sequence, left), end, blocks in zip(pairs, ends, needed, strict=True):
            spec, start = sequence.spec, sequence.num_computed_tokens
            changes = self.blocks.take(sequence, end, blocks, wipes, copies) if blocks else ()
            sampled, resumed = int(end == sequence.num_tokens), tuple[int, ...]()
            if sequence.resumed:
                changes, resumed = self.blocks.entries(sequence), tuple(sequence.output_token_ids)
                sequence.resumed = False
            adjusts = spec.has_features and spec.sampling.adjusts
            self._plan.rows.append(
                DecodeRow(
                    spec.id,
                    start,
                    sampled,
                    changes,
                    resumed,
                    known=sequence.tokens(start, end),
                    output_token_ids=tuple(sequence.output_token_ids) if adjusts else (),
                )
            )
            self.prefixes.register(sequence, start, end, in_flight=True)
            sequence.num_computed_tokens, sequence.lags = end, not sampled
            sequence.num_pending_tokens += sampled
            if sampled and left == 1:
                self.queues.planned.append(sequence)
        self._plan.steps = 1

    def _known_ends(self, pairs: Sequence[tuple[SequenceState, int]], rows: int) -> list[int]:
        """Where the known tokens end that each sequence computes: at least one, and all together as a step has rows."""
        spare, ends = max(rows - len(pairs), 0), list[int]()
        for sequence, _ in pairs:
            further = min(sequence.num_uncomputed_tokens - 1, spare)
            spare -= further
            ends.append(sequence.num_computed_tokens + 1 + further)
        return ends

    @property
    def snapshots(self) -> Snapshots | None:
        """Of states; None if sequences have none, or share none."""
        return self.blocks.snapshots

    @property
    def forcing(self) -> bool:
        """Whether tokens that grammars force are looked for now, in sequences with none under way."""
        running = self.queues.running
        few = self.forces > 0 and len(running) <= self.forces_up_to
        return few and any(sequence.decoding and sequence.may_be_forced for sequence in running)

    def _most_queries(self) -> int:
        """Rows that each running sequence may have in a step: the runner rounds both numbers to powers of two."""
        room = self.max_num_seqs >> (len(self.queues.running) - 1).bit_length()
        return 1 << max(room, 1).bit_length() - 1

    def _needs(self, pairs: Sequence[tuple[SequenceState, int]], most: int) -> list[Sequence[int]]:
        """Blocks that each sequence is short of for so many tokens, or for those that it has left."""
        short_of = self.blocks.short_of
        return [short_of(s, s.num_computed_tokens + (left if left < most else most)) for s, left in pairs]

    def _reserve(self, sequence: SequenceState, length: int) -> tuple[BlockChange, ...] | None:
        """Make the next ``length`` tokens writable: the changes of its block tables, or None without enough blocks."""
        end = sequence.num_computed_tokens + length
        return self.blocks.reserve(sequence, end, self._plan.wipes, self._plan.copies)

    def _make_room(self) -> bool:
        """Take blocks back: those of a waiting fork, else all of the newest sequence.

        The preempted sequence recomputes what is neither cached nor saved. False if its tokens must be known first.
        """
        if self._release_fork():
            return True
        victim = self.queues.running[-1]
        if victim.num_pending_tokens:
            return False
        self._plan.saves += self.host_blocks.save(victim)
        if not victim.generated:
            self.blocks.doubt(victim)
        self.blocks.free(victim)
        place = self._others_first(victim)
        if self.rewind is not None and not victim.saved_blocks:
            self.rewind(victim)
        self.queues.send_back(victim, place)
        self._plan.num_preempted += 1
        return True

    def _others_first(self, victim: SequenceState) -> int:
        """How many of the waiting resume before a preempted sequence: none, until the longest may end last.

        One that is begun last runs on alone, with the rest of the cache empty. All work in a full cache takes some
        number of steps. Once two of the longest, one after the other, take more, those with more tokens to come go
        first (the idea: Graham 1969, Bounds on multiprocessing timing anomalies).
        """
        waiting, left = self.queues.waiting, victim.num_remaining_tokens
        # A step holds all tokens of a sequence, which are half of the coming ones more on average.
        held = sum(
            (1 + len(s.forks)) * s.num_remaining_tokens * (s.num_tokens + s.max_len) / 2
            for s in chain(self.queues.running, waiting)
        )
        longest = max((s.num_remaining_tokens for s in waiting), default=0)
        if 2 * longest * self.blocks.pools[0].num_blocks * self.blocks.block_size < held:
            return 0
        return next((i for i, s in enumerate(waiting) if s.num_remaining_tokens <= left), len(waiting))

    def _release_fork(self) -> bool:
        """Take the blocks of the last waiting sequence that holds any. It is then computed like any other."""
        holder = next((sequence for sequence in reversed(self.queues.waiting) if sequence.tables), None)
        if holder is not None:
            self.blocks.free(holder)
        return holder is not None
