"""Which tokens of which sequences are computed in the next step, and in which blocks. No torch.

A sequence has tokens and computed tokens. A step lets computed catch up within the token budget. Chunked prefill,
prefix hits and resuming after a preemption are that one rule. Blocks are reserved here, before the forward pass; K and
V are written inside it.

Plans may run ahead of their results. A plan counts its tokens as computed and sampled (pending) at once, and ``commit``
brings their values later. A sequence gives up its seat when its last token is planned, and its blocks when that token
is known. Blocks that a commit frees may be handed out while a plan that still writes to them is under way: the device
works in the order of the plans.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rosebatch.engine.plan import (
    BlockChange,
    BlockCopy,
    Chunk,
    DecodeRow,
    DecodeWindow,
    PackedStep,
    RestartPolicy,
    SequenceSpec,
    StepPlan,
    StepResult,
)
from rosebatch.engine.scheduling.block_groups import BlockGroups
from rosebatch.engine.scheduling.block_pool import BlockPool, hash_block, token_bytes
from rosebatch.engine.scheduling.sequence import SequenceState, Status


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Prompts and decodes share packed steps."""


@dataclass(frozen=True, slots=True)
class SeparateDecodes:
    """Prompts go first, in packed steps of their own; decodes follow in windows of up to ``max_steps``."""

    max_steps: int


class Committed(NamedTuple):
    """What a commit brought.

    Attributes:
        finished: the sequences that finished.
        waits: seconds between a sequence's last tokens and these, and how many sequences waited so long.
    """

    finished: list[SequenceState]
    waits: Mapping[float, int]


StepPolicy = MixedSteps | SeparateDecodes
MIXED = MixedSteps()


class Scheduler:
    """Continuous batching over a block pool.

    Args:
        pools: the blocks of the KV cache, for each group of layers with the same sliding window.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: budget of a step with prompts in it; decode windows need none.
        policy: whether prompts and decodes share steps.
        prefix_cache: reuse blocks whose prefix is known, and make full blocks findable.
        chunked_prefill: split prompts over steps; otherwise a prompt is computed whole, even over the budget.
        restarts: decides when sequences restart; None for never.
        exact_prefixes: a block of generated tokens serves only sequences that generated them at the same positions.
            Prompt tokens are computed in other shapes than generated ones, which may change their last bits.
        share_prompts: the completions of a request share the blocks of its prompt; otherwise each computes it.
    """

    def __init__(
        self,
        *pools: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: StepPolicy = MIXED,
        prefix_cache: bool = True,
        chunked_prefill: bool = True,
        restarts: RestartPolicy | None = None,
        exact_prefixes: bool = False,
        share_prompts: bool = True,
    ) -> None:
        self.blocks = BlockGroups(pools)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy
        self.prefix_cache = prefix_cache
        self.chunked_prefill = chunked_prefill
        self.restarts = restarts
        self.exact_prefixes = exact_prefixes
        self.share_prompts = share_prompts
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.ending: list[SequenceState] = []
        # Unfinished sequences that a plan has had, by id.
        self._started: dict[int, SequenceState] = {}
        # Whether the token budget, and not seats or blocks, ended the last admission.
        self._admitting = False
        # Forks of the prompts in the last plan; and the number of all forks that have yet to join the waiting.
        self._forked: list[SequenceState] = []
        self._num_forks = 0
        # Since the last plan: sequences that were preempted, and ids that no later plan has.
        self._preempted: list[SequenceState] = []
        self._released: list[int] = []
        # Whether an abort has dropped sequences since the last plan.
        self._reset = False
        longest = self.blocks.longest_chunk
        self._longest_chunk = max_num_batched_tokens if longest is None else min(longest, max_num_batched_tokens)

    @property
    def pool(self) -> BlockPool:
        """The blocks of the first group of layers, the only one of most models."""
        return self.blocks.pools[0]

    @property
    def max_sequence_len(self) -> int | None:
        """Most tokens of a sequence that has the KV cache for itself; None for no limit."""
        return self.blocks.max_sequence_len(chunked=self.chunked_prefill)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting, running or ending."""
        return bool(self.waiting or self.running or self.ending or self._forked)

    @property
    def num_unfinished(self) -> int:
        """Sequences waiting, running or ending, and their forks."""
        return len(self.waiting) + len(self.running) + len(self.ending) + self._num_forks

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence behind all others; its forks go to the front when its prompt is computed."""
        if self.restarts is not None:
            for each in (sequence, *sequence.forks):
                each.restart(self.restarts.spec_for(each.spec, each.num_tokens))
        self.waiting.append(sequence)
        self._num_forks += len(sequence.forks)

    def restart(self, sequence: SequenceState, spec: SequenceSpec) -> None:
        """Compute a running sequence again from its first token, in other blocks, before all that wait.

        Args:
            sequence: keeps its tokens, all of which are known.
            spec: its new one, with another salt if its keys change.
        """
        assert not sequence.num_pending_tokens, "its tokens must be known"
        self.running.remove(sequence)
        self._send_back(sequence)
        sequence.restart(spec)

    def propose(self, sequence: SequenceState, drafts: Sequence[int]) -> None:
        """Let the sequence's next chunk verify these tokens, which may follow those so far."""
        assert isinstance(self.policy, MixedSteps), "decode windows verify nothing"
        assert not sequence.num_pending_tokens, "drafts follow known tokens"
        sequence.drafts = tuple(drafts[: max(sequence.spec.decode_len - sequence.num_tokens - 1, 0)])

    def schedule(self) -> StepPlan | None:
        """Plan a step: running sequences, oldest first, then as many waiting ones as fit.

        None if nothing can be planned before the results of an earlier plan are committed.
        """
        draft = _Draft(preempted=self._preempted)
        self._preempted = []
        self.waiting.extendleft(reversed(self._forked))
        self._num_forks -= len(self._forked)
        self._forked = []
        self._release_slots()
        if self.restarts is not None:
            self._restart_due(self.restarts)
        budget = self._continue_running(draft)
        # A preempted sequence would take its blocks back at once; but where nothing runs, only it can go on.
        if not (draft.preempted and self.running) and self._admits():
            budget = self._admit_waiting(draft, budget)
            self._admitting = budget <= 0
        if not draft.chunks and isinstance(self.policy, SeparateDecodes):
            self._plan_decodes(draft, self.policy.max_steps)
        plan = draft.plan(self._released, self._reset)
        if plan is None:
            self._preempted = draft.preempted
        else:
            self._released, self._reset = [], False
            self.blocks.release(self.running, self._forked)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float | None = None) -> "Committed":
        """Record what a plan brought: tokens appended, stops decided, blocks freed. Plans are committed in order.

        Args:
            plan: the oldest that is not committed.
            result: of the plan.
            now: when the result was known, in seconds of ``time.perf_counter``; None reads the clock.
        """
        now = time.perf_counter() if now is None else now
        self.blocks.launched()
        if isinstance(plan, PackedStep):
            for number, values in result.prompt_logprobs.items():
                chunk = plan.chunks[number]
                scored = self._started[chunk.id]
                # After a restart they may differ.
                if scored.needs_prompt_logprobs:
                    scored.apply_prompt_logprobs(chunk.start + 1, values)
            sampled = [(chunk.id, chunk.end - chunk.sampled, chunk.sampled) for chunk in plan.chunks if chunk.sampled]
        else:
            sampled = [(row.id, row.start, row.length) for row in plan.rows]
        all_logprobs = result.logprobs or [[]] * len(sampled)
        finished = self._take_pooled(plan, result, now)
        waits: Counter[float] = Counter()
        for (sequence_id, start, length), token_ids, logprobs in zip(
            sampled, result.token_ids, all_logprobs, strict=True
        ):
            sequence = self._started.get(sequence_id)
            if sequence is None:
                # An earlier result ended it when this plan was under way already.
                continue
            sequence.num_pending_tokens -= length
            last = sequence.token_times[-1] if sequence.token_times else None
            verifies = bool(sequence.drafts)
            if verifies:
                token_ids = sequence.verify(token_ids)
            kept = sequence.apply_token_ids(token_ids, logprobs, now)
            if kept and last is not None:
                waits[now - last] += 1
            if verifies:
                sequence.num_computed_tokens = start + kept
            if self.prefix_cache and (verifies or isinstance(plan, DecodeWindow)):
                self._register_full_blocks(sequence, start, start + kept)
            if sequence.not_finite:
                self.blocks.taint(sequence)
            if sequence.finish_reason is not None:
                self._finish(sequence)
                finished.append(sequence)
        if finished:
            self.running = [s for s in self.running if s.status is Status.RUNNING]
            self.ending = [s for s in self.ending if s.status is Status.ENDING]
        return Committed(finished, waits)

    def _take_pooled(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceState]:
        """The sequences whose embeddings a plan has brought. They are finished."""
        finished = []
        for number, pooled in result.pooled.items():
            assert isinstance(plan, PackedStep), "prompts are computed in packed steps"
            sequence = self._started[plan.chunks[number].id]
            sequence.num_pending_tokens -= 1
            sequence.apply_pooled(pooled, now)
            if sequence.not_finite:
                self.blocks.taint(sequence)
            self._finish(sequence)
            finished.append(sequence)
        return finished

    def abort(self) -> None:
        """Drop all sequences, also after an error in the middle of a step.

        Plans under way must not be committed any more. Nobody knows whether the last one was computed, so blocks that
        were registered since the last commit are no longer findable. The next plan resets the runner.
        """
        self.blocks.forget_in_flight()
        for sequence in (*self.running, *self.ending, *self.waiting, *self._forked):
            self._free_blocks(sequence)
        self.blocks.launched()
        self._started.clear()
        self.waiting.clear()
        self.running, self.ending, self._forked, self._num_forks = [], [], [], 0
        self._preempted, self._released = [], []
        self._admitting, self._reset = False, True

    def check_integrity(self) -> None:
        """Assert that blocks and sequences agree; see ``BlockPool.check_integrity``."""
        self.blocks.check_integrity((*self.running, *self.ending, *self.waiting, *self._forked))
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            assert len(sequence.block_ids) * self.blocks.block_size >= sequence.num_computed_tokens
            assert sequence.num_computed_tokens < sequence.num_tokens <= sequence.max_len
        for sequence in self.ending:
            assert sequence.status is Status.ENDING and sequence.num_pending_tokens
        for sequence in self.waiting:
            assert sequence.status is Status.WAITING
            assert not sequence.tables or sequence.num_computed_tokens == sequence.num_prompt_tokens - 1
        assert all(self._started[s.id] is s for s in (*self.running, *self.ending)), "what runs was started"
        assert not any(s.status is Status.FINISHED for s in self._started.values()), "what finished is forgotten"
        unborn = sum(len(sequence.forks) for sequence in (*self.running, *self.waiting))
        assert self._num_forks == unborn + len(self._forked), "forks are counted once"

    def _release_slots(self) -> None:
        """Release the seats of sequences whose last token is planned."""
        ending = [s for s in self.running if s.num_pending_tokens and not s.num_remaining_tokens]
        if ending:
            for sequence in ending:
                sequence.status = Status.ENDING
                self._released.append(sequence.id)
            self.ending += ending
            self.running = [s for s in self.running if s.status is Status.RUNNING]

    def _continue_running(self, draft: "_Draft") -> int:
        """Plan chunks of the running sequences; returns the rest of the budget."""
        budget = self.max_num_batched_tokens
        mixed = isinstance(self.policy, MixedSteps)
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            position += 1
            if sequence.decoding and not mixed:
                continue
            length = min(sequence.num_uncomputed_tokens + len(sequence.drafts), budget, self._longest_chunk)
            if length > 1:
                length = self.blocks.cut(sequence, length)
            while (changes := self._reserve(sequence, length, draft)) is None:
                if not self._make_room(draft) or sequence.status is Status.WAITING:
                    return budget
            budget = self._plan_chunk(draft, sequence, length, changes, budget)
        return budget

    def _admits(self) -> bool:
        """Whether to look at the waiting. Where decodes have to pause for them, prompts are admitted many at a time."""
        if isinstance(self.policy, MixedSteps):
            return True
        slots = self.max_num_seqs - len(self.running)
        return bool(self.waiting) and (self._admitting or slots >= min(len(self.waiting), self.max_num_seqs // 8 or 1))

    def _plan_decodes(self, draft: "_Draft", max_steps: int) -> None:
        """Plan a window of decode steps for all sequences that have tokens to come."""

        def live() -> list[tuple[SequenceState, int]]:
            return [(s, left) for s in self.running if s.decoding and (left := s.spec.decode_len - s.num_tokens)]

        pairs = live()
        steps = min(max_steps, max((left for _, left in pairs), default=0))
        if any(sequence.spec.guided for sequence, _ in pairs):
            # The grammar allows the next token only once the host has seen the last one.
            steps = min(steps, 1)
        while not self.blocks.has(map(sum, zip(*filter(None, needed := self._needs(pairs, steps)), strict=True))):
            if steps > 1:
                steps //= 2
            elif self._make_room(draft):
                pairs = live()
            else:
                return
        for (sequence, left), blocks in zip(pairs, needed, strict=True):
            length = min(steps, left)
            changes = self._reserve(sequence, length, draft) if blocks else ()
            assert changes is not None, "the window was made to fit"
            draft.rows.append(DecodeRow(sequence.id, sequence.num_computed_tokens, length, changes))
            sequence.num_computed_tokens += length
            sequence.num_pending_tokens += length
        draft.steps = steps

    def _needs(self, pairs: Sequence[tuple[SequenceState, int]], steps: int) -> list[Sequence[int]]:
        """Blocks that each sequence is short of for so many steps, or for as many tokens as it has left."""
        return [self.blocks.short_of(s, s.num_computed_tokens + min(steps, left)) for s, left in pairs]

    def _restart_due(self, policy: RestartPolicy) -> None:
        """Restart the sequences that have reached their ``restart_len``, once their tokens are known."""
        due = [s for s in self.running if s.num_tokens == s.spec.restart_len and not s.num_pending_tokens]
        for sequence in reversed(due):
            self.restart(sequence, policy.spec_for(sequence.spec, sequence.num_tokens))

    def _admit_waiting(self, draft: "_Draft", budget: int) -> int:
        """Plan chunks of waiting sequences, in order; returns the rest of the budget."""
        over_budget_allowed = not self.chunked_prefill
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            sequence = self.waiting[0]
            if not sequence.tables:
                hits = self.blocks.take_prefix(sequence, self._findable(sequence))
                sequence.num_computed_tokens = min(hits * self.blocks.block_size, len(sequence.token_ids) - 1)
            length = sequence.num_uncomputed_tokens
            if self.chunked_prefill:
                length = min(length, budget, self._longest_chunk)
            elif length > budget and not (over_budget_allowed and length > self.max_num_batched_tokens):
                self._free_blocks(sequence)
                break
            # Room for all its known tokens and one more block for everyone, or it would be preempted at once.
            end, others = sequence.num_computed_tokens + length, len(self.running)
            room = self.blocks.has_room(sequence, len(sequence.token_ids), end, spare=others)
            is_new = not any(sequence.tables)
            changes = self._reserve(sequence, length, draft) if room else None
            if changes is None:
                self._free_blocks(sequence)
                if not self.running and self._release_fork():
                    continue
                break
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
            self.running.append(sequence)
            self._started[sequence.id] = sequence
            draft.started.append(sequence.spec)
            changes = changes if is_new else self.blocks.whole(sequence)
            budget = self._plan_chunk(draft, sequence, length, changes, budget)
            over_budget_allowed = False
        return budget

    def _plan_chunk(
        self, draft: "_Draft", sequence: SequenceState, length: int, changes: tuple[BlockChange, ...], budget: int
    ) -> int:
        """Returns the rest of the budget: nothing behind a part of a prompt, whose other blocks are not taken yet."""
        start, known = sequence.num_computed_tokens, sequence.num_tokens
        end = start + length
        token_ids = sequence.token_ids[start:end]
        if sequence.drafts:
            sequence.drafts = sequence.drafts[: max(end - known, 0)]
            token_ids.extend(sequence.drafts)
        if self.prefix_cache:
            # Blocks with drafts are registered once these are verified.
            self._register_full_blocks(sequence, start, min(end, known), in_flight=True)
        sequence.num_computed_tokens = end
        ends, pools = end >= known, sequence.spec.pooling is not None
        sampled = end - known + 1 if ends and not pools else 0
        if ends:
            sequence.num_pending_tokens += sampled or 1
            sequence.decoding = not pools
            self._fork(sequence)
        output = tuple(sequence.output_token_ids) if sampled and sequence.sampling.adjusts else ()
        draft.chunks.append(Chunk(sequence.id, start, token_ids, sampled, changes, output, ends and pools))
        return budget - length if ends else 0

    def _fork(self, sequence: SequenceState) -> None:
        """Give its forks the blocks of its prompt: for them, all prompt tokens but the last are computed.

        They join the waiting before the next plan. In this plan, a copy of the last block would run before the block
        is written.
        """
        for fork in sequence.forks if self.share_prompts else ():
            self.blocks.share(sequence, fork, sequence.num_prompt_tokens)
            fork.num_computed_tokens = sequence.num_prompt_tokens - 1
            fork.num_cached_tokens = sequence.num_cached_tokens
        self._forked += sequence.forks
        sequence.forks = []

    def _reserve(self, sequence: SequenceState, length: int, draft: "_Draft") -> tuple[BlockChange, ...] | None:
        """Make the next ``length`` tokens writable: the changes of its block tables, or None without enough blocks."""
        return self.blocks.reserve(sequence, sequence.num_computed_tokens + length, draft.wipes, draft.copies)

    def _findable(self, sequence: SequenceState) -> list[bytes]:
        """Hashes of the full blocks that may be cached."""
        if not self.prefix_cache or sequence.needs_whole_prompt:
            return []
        return self._block_hashes(sequence, len(sequence.token_ids) // self.blocks.block_size)

    def _register_full_blocks(self, sequence: SequenceState, start: int, end: int, *, in_flight: bool = False) -> None:
        """Make findable the blocks that tokens ``start .. end - 1`` fill."""
        first, behind = start // self.blocks.block_size, end // self.blocks.block_size
        if first != behind:
            hashes = self._block_hashes(sequence, behind)[first:behind]
            self.blocks.register(sequence, first, hashes, in_flight=in_flight)

    def _block_hashes(self, sequence: SequenceState, count: int) -> list[bytes]:
        """Hashes of at least so many of the sequence's first blocks, all of them full."""
        hashes, size = sequence.block_hashes, self.blocks.block_size
        known = len(hashes)
        if known < count:
            parent = hashes[-1] if hashes else sequence.spec.salt
            blocks = token_bytes(sequence.token_ids[known * size : count * size], size)
            for index, tokens in enumerate(blocks, start=known):
                if self.exact_prefixes and index == sequence.num_prompt_tokens // size:
                    # The first block with generated tokens.
                    parent += b"%d generated" % sequence.num_prompt_tokens
                parent = hash_block(parent, tokens)
                hashes.append(parent)
        return hashes

    def _make_room(self, draft: "_Draft") -> bool:
        """Take blocks back: those of a waiting fork, else all of the newest sequence.

        The preempted sequence resumes before all others that wait, and recomputes what is not cached. False if its
        tokens must be known first.
        """
        if self._release_fork():
            return True
        victim = self.running[-1]
        if victim.num_pending_tokens:
            return False
        self.running.pop()
        self._send_back(victim)
        draft.preempted.append(victim)
        return True

    def _send_back(self, sequence: SequenceState) -> None:
        """Take the blocks of a sequence that was running. It keeps its tokens and waits in front of all others."""
        self._free_blocks(sequence)
        sequence.status = Status.WAITING
        sequence.decoding = False
        sequence.drafts = ()
        self._released.append(sequence.id)
        self.waiting.appendleft(sequence)

    def _release_fork(self) -> bool:
        """Take the blocks of the last waiting sequence that holds any: it will be computed like any other."""
        holder = next((sequence for sequence in reversed(self.waiting) if sequence.tables), None)
        if holder is not None:
            self._free_blocks(holder)
        return holder is not None

    def _finish(self, sequence: SequenceState) -> None:
        if sequence.status is Status.RUNNING:
            self._released.append(sequence.id)
        sequence.status = Status.FINISHED
        del self._started[sequence.id]
        self._free_blocks(sequence)

    def _free_blocks(self, sequence: SequenceState) -> None:
        self.blocks.free(sequence)
        sequence.num_computed_tokens = 0


class _Draft:
    """A plan in the making."""

    def __init__(self, preempted: list[SequenceState]) -> None:
        self.chunks: list[Chunk] = []
        self.rows: list[DecodeRow] = []
        self.steps = 0
        self.wipes: list[tuple[int, int]] = []
        self.copies: list[BlockCopy] = []
        self.started: list[SequenceSpec] = []
        self.preempted = preempted

    def plan(self, released: list[int], reset: bool) -> StepPlan | None:
        """The plan; None if it computes nothing."""
        changes: dict[str, Any] = {
            "wipes": tuple(self.wipes),
            "copies": tuple(self.copies),
            "started": tuple(self.started),
            "released": tuple(released),
            "num_preempted": len(self.preempted),
            "reset": reset,
        }
        if self.chunks:
            chunks = tuple(sorted(self.chunks, key=lambda chunk: len(chunk.token_ids) != 1))
            return PackedStep(chunks=chunks, **changes)
        return DecodeWindow(rows=tuple(self.rows), steps=self.steps, **changes) if self.rows else None
