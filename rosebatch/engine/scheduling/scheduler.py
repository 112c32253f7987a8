"""The life of sequences: they wait, run, get tokens from results, and finish. No torch.

Plans may run ahead of their results: ``schedule`` counts a plan's tokens as computed and pending, ``commit`` brings
their values later. A sequence gives up its slot when its last token is planned, and its blocks when that token is
known. Blocks that a commit frees may be handed out while a plan that still writes to them is under way: the device
works in the order of the plans.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rosebatch.core.request import Constraint, Request, feed_rows
from rosebatch.engine.plan import (
    NOT_FINITE,
    DecodeWindow,
    PackedStep,
    RestartPolicy,
    SequenceSpec,
    StepPlan,
    StepResult,
)
from rosebatch.engine.pooling.outputs import outputs_of
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.block_tables import BlockTables
from rosebatch.engine.scheduling.chunk_ends import ChunkEnds
from rosebatch.engine.scheduling.forced_tokens import apply_forced
from rosebatch.engine.scheduling.host_blocks import HostBlocks
from rosebatch.engine.scheduling.prefix_cache import PrefixCache
from rosebatch.engine.scheduling.queues import SequenceQueues
from rosebatch.engine.scheduling.resident_adapters import ResidentAdapters
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.engine.scheduling.snapshots import Snapshots
from rosebatch.engine.scheduling.step_planner import MIXED, MixedSteps, SeparateDecodes, StepPlanner, StepPolicy


class Committed(NamedTuple):
    """What a commit brought.

    Attributes:
        finished: the sequences that finished.
        gaps: seconds between a sequence's last tokens and these, and how many sequences had such a gap.
        drafted, accepted: drafts that were verified, and those of them that were right.
        forced: tokens that no step sampled, because no other could come.
    """

    finished: list[SequenceState]
    gaps: Mapping[float, int]
    drafted: int = 0
    accepted: int = 0
    forced: int = 0


class Scheduler:
    """Continuous batching over a block pool.

    Args:
        pools: the blocks of the KV cache, for each group of layers with the same sliding window; none without a cache.
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: budget of a step with prompts in it; decode windows need none.
        policy: whether prompts and decodes share steps.
        prefix_cache: reuse blocks whose prefix is known, and make full blocks findable.
        chunked_prefill: split prompts over steps; otherwise a prompt is computed whole, even over the budget.
        restarts: decides when sequences restart; None for never.
        exact_prefixes: see ``PrefixCache``.
        share_prompts: the completions of a request share the blocks of its prompt; otherwise each computes it.
        host_blocks: blocks of the host for preempted sequences; needs one group without a window, and no states.
        replays: preempted sequences sample their tokens again, see ``SequenceState.rewind``; else all their tokens are
            computed like a prompt, where none are saved. And a chunk ends where a block or its sequence does: attention
            then adds up in one order.
        chunk_unit: with ``replays``, chunks end at multiples of so many tokens too, and so do cached prefixes.
        whole_images: no chunk ends inside of an image.
        snapshots: slots for copies of states, of sequences that have any; needs chunked prefill, and one group without
            a window. Such sequences share nothing without it.
        forces: width of the logits, where tokens that a grammar leaves no choice for are not sampled, and computed like
            those of a prompt. 0: all are sampled.
        adapter_slots: of adapters on the device; 0 if all are there.
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
        host_blocks: int = 0,
        replays: bool = False,
        chunk_unit: int = 1,
        whole_images: bool = False,
        snapshots: int = 0,
        forces: int = 0,
        adapter_slots: int = 0,
    ) -> None:
        assert not host_blocks or (len(pools) == 1 and not pools[0].window), "the host holds whole sequences"
        assert not snapshots or chunked_prefill, "chunks end where snapshots are"
        size = pools[0].block_size if pools else 1
        unit = math.lcm(size, chunk_unit) if replays else 1
        blocks, ends = max(unit // size, 1), ChunkEnds(unit, whole_images)
        self.blocks = BlockTables(pools, Snapshots(snapshots, blocks * size, ends) if snapshots else None)
        self.queues = SequenceQueues()
        self.prefixes = PrefixCache(self.blocks, enabled=prefix_cache, exact=exact_prefixes, unit=blocks)
        self.restarts = restarts
        self.planner = StepPlanner(
            queues=self.queues,
            blocks=self.blocks,
            prefixes=self.prefixes,
            host_blocks=HostBlocks(host_blocks, self.blocks.block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            chunked_prefill=chunked_prefill,
            share_prompts=share_prompts,
            rewind=self._rewind if replays else None,
            ends=ends,
            adapters=ResidentAdapters(adapter_slots),
            forces=forces,
        )

    @property
    def pool(self) -> BlockPool:
        """The blocks of the first group of layers, the only one of most models."""
        return self.blocks.pools[0]

    @property
    def max_sequence_len(self) -> int | None:
        """Most tokens of a sequence that has the KV cache for itself; None for no limit."""
        return self.blocks.max_sequence_len(chunked=self.planner.chunked_prefill)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting, running or ending."""
        return len(self.queues) > 0

    @property
    def num_unfinished(self) -> int:
        """Sequences waiting, running or ending, and their forks."""
        return len(self.queues)

    def require_room(self, request: Request) -> None:
        """Check that the images of a request fit steps.

        Raises:
            RowError: one does not.
        """
        planner = self.planner
        if planner.chunked_prefill:
            planner.ends.require_room(request.images, len(request.prompt_token_ids), planner.max_chunk)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence after all others. Its forks come first when its prompt is computed."""
        if self.restarts is not None:
            for each in (sequence, *sequence.forks):
                each.restart(self.restarts.spec_for(each.spec, each.num_tokens))
        self.queues.add(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan a step; None if nothing can be planned before the results of an earlier plan are committed."""
        self.queues.join_forks()
        self.queues.end_planned()
        if self.restarts is not None:
            self._restart_due(self.restarts)
        return self.planner.next_plan()

    def commit(self, plan: StepPlan, result: StepResult, now: float | None = None) -> Committed:
        """Record what a plan brought: tokens appended, stops decided, blocks freed. Plans are committed in order.

        Args:
            plan: the oldest that is not committed.
            result: what the plan brought.
            now: when the result was known, in seconds of ``time.perf_counter``; None reads the clock.
        """
        now = time.perf_counter() if now is None else now
        self.blocks.mark_launched()
        answered: list[SequenceState] = []
        ended: list[SequenceState] = []
        guided: list[SequenceState] = []
        gaps: Counter[float] = Counter()
        drafted, accepted, forcing = result.drafted, result.accepted, self.planner.forcing
        verified = isinstance(plan, DecodeWindow) and plan.drafts
        if isinstance(plan, PackedStep):
            answered = self._commit_prompts(plan, result, now)
            sampled = [(c.id, c.start + len(c.token_ids) - c.sampled, c.sampled) for c in plan.chunks if c.sampled]
        else:
            sampled = [(row.id, row.end - row.length, row.length) for row in plan.rows if row.length]
        # Full blocks of known tokens were registered when planned. Those of a window hold tokens that come only now.
        is_window = isinstance(plan, DecodeWindow) and not plan.knows
        enabled, size = self.prefixes.enabled, self.blocks.block_size
        started = self.queues.started
        all_logprobs = result.logprobs or [[]] * len(sampled)
        followed = self._follow(sampled, result.token_ids)
        for (sequence_id, start, length), token_ids, logprobs in zip(
            sampled, result.token_ids, all_logprobs, strict=True
        ):
            sequence = started.get(sequence_id)
            if sequence is None:
                # An earlier result ended it when this plan was under way already.
                continue
            sequence.num_pending_tokens -= length
            times, drafts = sequence.token_times, sequence.drafts
            num_times = len(times)
            if verified and NOT_FINITE in token_ids:
                # A wrong draft's K and V may be to blame. The row goes on without drafts, from the tokens before.
                token_ids, sequence.lags = token_ids[:-1], True
            token_ids = sequence.verify(token_ids) if drafts else token_ids
            kept = sequence.apply_token_ids(token_ids, logprobs, now, complete=followed.get(sequence_id))
            if 0 < num_times < len(times):
                gaps[now - times[num_times - 1]] += 1
            if drafts:
                # Wrong drafts were computed for nothing.
                sequence.num_computed_tokens = start + kept
                drafted, accepted = drafted + len(drafts), accepted + max(kept - 1, 0)
            elif verified:
                sequence.num_computed_tokens = start + kept
                sequence.num_unsure_tokens, sequence.num_seen_tokens = 0, sequence.num_known_tokens
            if enabled and (is_window or drafts) and start // size < (start + kept) // size:
                self.prefixes.register(sequence, start, start + kept)
            if sequence.constraint is not None and sequence.finish_reason is None:
                if forcing and not sequence.num_pending_tokens:
                    guided.append(sequence)
                    continue
                sequence.apply_rest(sequence.constraint, now)
            if sequence.finish_reason is not None:
                ended.append(sequence)
        forced = apply_forced(guided, self.planner.forces, now) if guided else 0
        ended += [sequence for sequence in guided if sequence.finish_reason is not None]
        for sequence in ended:
            self._free(sequence)
        finished = answered + ended
        if (answers := self.planner.answers) is not None:
            for sequence in ended:
                answers.add(sequence.generated)
        self.queues.finish(finished)
        return Committed(finished, gaps, drafted, accepted, forced)

    def _follow(self, sampled: Sequence[tuple[int, int, int]], token_ids: Sequence[list[int]]) -> dict[int, bool]:
        """Let constraints follow the tokens of rows that got one, all together; returns whether it is the last.

        Rows with drafts, with tokens that are sampled once more, or with logits that are not finite are left out.
        """
        started, ids = self.queues.started, list[int]()
        constraints, tokens = dict[int, Constraint](), list[int]()
        for (sequence_id, _, length), own in zip(sampled, token_ids, strict=True):
            if length != 1 or len(own) != 1 or (sequence := started.get(sequence_id)) is None:
                continue
            if sequence.constraint is None or sequence.replayed or own[0] == NOT_FINITE:
                continue
            constraints[len(ids)] = sequence.constraint
            ids.append(sequence_id)
            tokens.append(own[0])
        return dict(zip(ids, feed_rows(constraints, tokens), strict=True))

    def _commit_prompts(self, plan: PackedStep, result: StepResult, now: float) -> list[SequenceState]:
        """Record log-probabilities and pooled states of prompts; returns the sequences that these finish."""
        answered: list[SequenceState] = []
        if not result.prompt_logprobs and not result.pooled:
            # Nearly all, and quicker to tell.
            return answered
        for number, values in result.prompt_logprobs.items():
            sequence = self.queues.started[plan.chunks[number].id]
            # A sequence that restarted may have them already.
            if sequence.needs_prompt_logprobs:
                sequence.apply_prompt_logprobs(plan.chunks[number].start + 1, values, now)
                if sequence.finish_reason is not None:
                    answered.append(sequence)
        pooled = [self.queues.started[plan.chunks[number].id] for number in result.pooled]
        params = [own for sequence in pooled if (own := sequence.request.pooling) is not None]
        for sequence, output in zip(pooled, outputs_of([*result.pooled.values()], params), strict=True):
            sequence.apply_pooled(output, now)
        answered += pooled
        for sequence in answered:
            sequence.num_pending_tokens -= 1
            self._free(sequence)
        return answered

    def _free(self, sequence: SequenceState) -> None:
        """Take the blocks of a finished sequence; the prefix cache keeps them if they are finite."""
        if sequence.not_finite:
            self.blocks.taint(sequence)
        self.blocks.free(sequence)

    def propose(self, sequence: SequenceState, drafts: Sequence[int]) -> None:
        """Let the sequence's next chunk verify these tokens, which may follow those so far; allowed ones only."""
        assert isinstance(self.planner.policy, MixedSteps), "decode windows verify nothing"
        assert not sequence.num_pending_tokens, "drafts follow known tokens"
        drafts = drafts[: max(sequence.spec.decode_len - sequence.num_tokens - 1, 0)]
        if sequence.constraint is not None:
            sequence.ahead = sequence.constraint.ahead(drafts)
            drafts = drafts[: len(sequence.ahead)]
        sequence.drafts = tuple(drafts)

    def restart(self, sequence: SequenceState, spec: SequenceSpec) -> None:
        """Compute a running sequence again from its first token, in other blocks, before all that wait.

        It stays as old as it is. As the youngest, it would give its blocks to another that restarts, and so in turns
        for ever where tokens are sampled again.

        Args:
            sequence: keeps its tokens, all of which are known.
            spec: its new one, with another salt if its keys change.
        """
        assert not sequence.num_pending_tokens, "its tokens must be known"
        self.blocks.free(sequence)
        self.queues.send_back(sequence, keeps_turn=True)
        sequence.restart(spec)

    def _rewind(self, sequence: SequenceState) -> None:
        """Back to the prompt, and to the spec that it began with."""
        sequence.rewind()
        if self.restarts is not None:
            sequence.restart(self.restarts.spec_for(sequence.spec, sequence.num_tokens))

    def _restart_due(self, policy: RestartPolicy) -> None:
        """Restart the sequences that have reached their ``restart_len``, once their tokens are known."""
        running = self.queues.running
        # Forced tokens may have come at once, beyond that length.
        due = [s for s in running if s.spec.restart_len is not None and s.num_tokens >= s.spec.restart_len]
        due = [sequence for sequence in due if not sequence.num_pending_tokens]
        for sequence in reversed(due):
            self.restart(sequence, policy.spec_for(sequence.spec, sequence.num_tokens))

    def abort(self) -> None:
        """Drop all sequences, also after an error in the middle of a step.

        Plans under way must not be committed any more. Perhaps the last one was not computed, so blocks that were
        registered since the last commit are no longer findable. The next plan resets the runner.
        """
        self.blocks.forget_in_flight()
        for sequence in self.queues:
            self.blocks.doubt(sequence)
        self.blocks.free_all()
        self.queues.clear()
        self.planner.reset()

    def check_integrity(self) -> None:
        """Assert that blocks and sequences agree; see ``BlockPool.check_integrity``."""
        self.blocks.check_integrity(self.queues)
        if self.blocks.snapshots is not None:
            self.blocks.snapshots.check_integrity(self.queues)
        self.planner.host_blocks.check_integrity(self.queues.waiting)
        self.queues.check_integrity()
        self.planner.adapters.check_integrity(self.queues.running)
        if isinstance(self.planner.policy, SeparateDecodes):
            parts = [s for s in self.queues.running if not (s.decoding or s.num_pending_tokens)]
            size, shares = self.blocks.block_size, self.blocks.snapshots is not None
            short = [s for s in parts if not (shares and len(s.block_ids) * size >= s.num_tokens)]
            assert len(short) <= 1, "one at most has a prompt that is computed in part, and not all of its blocks"
        for sequence in self.queues.running:
            held = len(sequence.block_ids) * self.blocks.block_size
            assert not self.blocks.pools or held >= sequence.num_computed_tokens
