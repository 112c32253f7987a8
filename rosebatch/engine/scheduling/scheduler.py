"""Which tokens of which sequences are computed in the next step, and in which blocks. No torch.

A sequence has tokens and computed tokens, and a step lets computed catch up within the token budget. Chunked prefill,
prefix hits and resuming after a preemption are that one rule. Reserving blocks happens here, before the forward pass;
writing K/V into them happens inside it.

Plans may run ahead of their results: a plan counts its tokens as computed and sampled (pending) at once, and ``commit``
brings their values later. A sequence whose last token is planned gives up its seat at once, its blocks when that token
is known. Blocks that a commit frees may be handed out while a plan that still writes to them is under way: the device
works in the order of the plans.
"""

from collections import deque
from collections.abc import Sequence as Seq

from rosebatch.engine.plan import Chunk, StepPlan, StepResult
from rosebatch.engine.scheduling.block_pool import ROOT_HASH, BlockPool, hash_block
from rosebatch.request import Sequence, Status


class Scheduler:
    """Continuous batching over a block pool.

    Args:
        pool: the blocks of the KV cache.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step.
        prefix_cache: take over blocks whose prefix is known, and make filled blocks findable.
        chunked_prefill: split prompts over steps; otherwise a prompt is computed whole, even over the budget.
        decode_window: 0 mixes prompts and decodes in a step. Otherwise decodes stand apart, up to so many steps in one
            plan, and prompts go first.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: bool = True,
        chunked_prefill: bool = True,
        decode_window: int = 0,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_cache = prefix_cache
        self.chunked_prefill = chunked_prefill
        self.decode_window = decode_window
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.ending: list[Sequence] = []
        # Whether the token budget, and not seats or blocks, ended the last admission.
        self._admitting = False
        # Forks of the prompts that the last plan computes, and the number of all that are yet to join the waiting.
        self._forked: list[Sequence] = []
        self._num_forks = 0
        # Preempted since the last plan.
        self._preempted: list[Sequence] = []
        # Blocks whose hash was registered for the step under way: shareable, since every layer writes K/V before
        # it reads any, but not yet copyable, since copies run before the first layer.
        self._in_flight: set[int] = set()
        # Copy sources stay held until the copy has run, or their successor could be handed out under it.
        self._copy_sources: list[int] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting, running or ending."""
        return bool(self.waiting or self.running or self.ending or self._forked)

    @property
    def num_unfinished(self) -> int:
        """Sequences waiting, running or ending, and their forks."""
        return len(self.waiting) + len(self.running) + len(self.ending) + self._num_forks

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others; its forks go in front of them when its prompt is computed."""
        self.waiting.append(sequence)
        self._num_forks += len(sequence.forks)

    def schedule(self) -> StepPlan | None:
        """Plan a step: running sequences first, oldest first, then as many waiting ones as fit.

        None where nothing can be planned before the results of an earlier plan are committed.
        """
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        preempted, self._preempted = self._preempted, []
        self.waiting.extendleft(reversed(self._forked))
        self._num_forks -= len(self._forked)
        self._forked = []
        self._free_seats()
        budget = self._continue_running(chunks, copies, preempted)
        if not preempted and self._admits():
            budget = self._admit_waiting(budget, chunks, copies)
            self._admitting = budget <= 0
        steps = 0
        if self.decode_window and not chunks:
            steps = self._plan_decodes(chunks, copies, preempted)
        if not chunks:
            self._preempted = preempted
            return None
        chunks.sort(key=lambda chunk: chunk.length != 1)
        return StepPlan(tuple(chunks), tuple(copies), tuple(preempted), steps)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Record what a plan brought: tokens appended, stops decided, blocks freed. Plans are committed in order.

        Returns:
            the sequences that finished.
        """
        # All plans so far have been launched: what they copy is safe, what they compute can be copied by the next.
        self._in_flight.clear()
        self.pool.free(self._copy_sources)
        self._copy_sources = []
        finished = []
        for number, values in result.prompt_logprobs.items():
            chunk = plan.chunks[number]
            chunk.sequence.apply_prompt_logprobs(chunk.start + 1, values)
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        all_logprobs = result.logprobs or [[]] * len(sampling)
        for chunk, token_ids, logprobs in zip(sampling, result.token_ids, all_logprobs, strict=True):
            sequence = chunk.sequence
            if sequence.status is Status.FINISHED:
                # An earlier plan turned out to end it; this one had begun by then.
                continue
            sequence.num_pending_tokens -= chunk.length if plan.decode_steps else 1
            kept = sequence.apply_token_ids(token_ids, logprobs)
            if plan.decode_steps and self.prefix_cache:
                self._register_full_blocks(sequence, chunk.start, chunk.start + kept)
            if sequence.finish_reason is not None:
                sequence.status = Status.FINISHED
                self._release(sequence)
                finished.append(sequence)
        if finished:
            self.running = [s for s in self.running if s.status is Status.RUNNING]
            self.ending = [s for s in self.ending if s.status is Status.ENDING]
        return finished

    def check_integrity(self) -> None:
        """Assert that blocks and sequences agree; see ``BlockPool.check_integrity``."""
        holders = [s.block_ids for s in (*self.running, *self.ending, *self.waiting, *self._forked)]
        self.pool.check_integrity([*holders, self._copy_sources])
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            assert len(sequence.block_ids) * self.pool.block_size >= sequence.num_computed_tokens
            assert sequence.num_computed_tokens < sequence.num_tokens <= sequence.max_len
        for sequence in self.ending:
            assert sequence.status is Status.ENDING and sequence.num_pending_tokens
        for sequence in self.waiting:
            assert sequence.status is Status.WAITING
            assert not sequence.block_ids or sequence.num_computed_tokens == sequence.num_prompt_tokens - 1
        unborn = sum(len(sequence.forks) for sequence in (*self.running, *self.waiting))
        assert self._num_forks == unborn + len(self._forked), "forks are counted once"

    def _free_seats(self) -> None:
        """Let others have the seats of sequences of which there is nothing left to plan."""
        ending = [s for s in self.running if s.num_pending_tokens and not s.num_remaining_tokens]
        if ending:
            for sequence in ending:
                sequence.status = Status.ENDING
            self.ending += ending
            self.running = [s for s in self.running if s.status is Status.RUNNING]

    def _continue_running(self, chunks: list[Chunk], copies: list[tuple[int, int]], preempted: list[Sequence]) -> int:
        """Plan chunks of the running sequences; what is left of the budget."""
        budget = self.max_num_batched_tokens
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            position += 1
            if self.decode_window and sequence.decoding:
                continue
            length = min(sequence.num_uncomputed_tokens, budget)
            while not self._reserve(sequence, length, copies):
                if not self._make_room(preempted) or sequence.status is Status.WAITING:
                    return budget
            chunks.append(self._plan_chunk(sequence, length))
            budget -= length
        return budget

    def _admits(self) -> bool:
        """Whether to look at the waiting: where decodes have to stand by, prompts are let in many at a time."""
        if not self.decode_window:
            return True
        seats = self.max_num_seqs - len(self.running)
        return bool(self.waiting) and (self._admitting or seats >= min(len(self.waiting), self.max_num_seqs // 8 or 1))

    def _plan_decodes(self, chunks: list[Chunk], copies: list[tuple[int, int]], preempted: list[Sequence]) -> int:
        """Plan a window of decode steps for all sequences that have tokens to come; the number of steps."""

        def live() -> list[tuple[Sequence, int]]:
            return [(s, s.num_remaining_tokens) for s in self.running if s.decoding]

        pairs = live()
        steps = min(self.decode_window, max((left for _, left in pairs), default=0))
        if any(sequence.constraint is not None for sequence, _ in pairs):
            # What may follow a token is known when the host has seen it.
            steps = min(steps, 1)
        while sum(needed := self._needs(pairs, steps)) > self.pool.num_free:
            if steps > 1:
                steps //= 2
            elif self._make_room(preempted):
                pairs = live()
            else:
                return 0
        for (sequence, left), blocks in zip(pairs, needed, strict=True):
            length = min(steps, left)
            reserved = not blocks or self._reserve(sequence, length, copies)
            assert reserved, "the window was made to fit"
            chunks.append(Chunk(sequence, sequence.num_computed_tokens, length, samples=True))
            sequence.num_computed_tokens += length
            sequence.num_pending_tokens += length
        return steps if pairs else 0

    def _needs(self, pairs: Seq[tuple[Sequence, int]], steps: int) -> list[int]:
        """Blocks that each sequence has to get for so many steps, or for as many tokens as it has left."""
        return [self._blocks_short_of(s, s.num_computed_tokens + min(steps, left)) for s, left in pairs]

    def _admit_waiting(self, budget: int, chunks: list[Chunk], copies: list[tuple[int, int]]) -> int:
        """Plan chunks of waiting sequences, in order; what is left of the budget."""
        over_budget_allowed = not self.chunked_prefill
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            sequence = self.waiting[0]
            if not sequence.block_ids:
                hits = self._cached_prefix(sequence)
                self.pool.share(hits)
                sequence.block_ids = hits
                sequence.num_computed_tokens = min(len(hits) * self.pool.block_size, len(sequence.token_ids) - 1)
            length = sequence.num_uncomputed_tokens
            if self.chunked_prefill:
                length = min(length, budget)
            elif length > budget and not (over_budget_allowed and length > self.max_num_batched_tokens):
                self._release(sequence)
                break
            # Room for all its known tokens and one more block for everyone, or it would be preempted at once.
            room = self._blocks_short_of(sequence, len(sequence.token_ids)) + len(self.running)
            if room > self.pool.num_free or not self._reserve(sequence, length, copies):
                self._release(sequence)
                if not self.running and self._release_fork():
                    continue
                break
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
            self.running.append(sequence)
            chunks.append(self._plan_chunk(sequence, length))
            budget -= length
            over_budget_allowed = False
        return budget

    def _plan_chunk(self, sequence: Sequence, length: int) -> Chunk:
        start = sequence.num_computed_tokens
        end = start + length
        if self.prefix_cache:
            self._in_flight.update(self._register_full_blocks(sequence, start, end))
        sequence.num_computed_tokens = end
        samples = end == sequence.num_tokens
        if samples:
            sequence.num_pending_tokens += 1
            sequence.decoding = True
            self._fork(sequence)
        return Chunk(sequence, start, length, samples)

    def _fork(self, sequence: Sequence) -> None:
        """Give its forks the blocks of its prompt, all of which but the last token they then have computed.

        They join the waiting before the next plan: a copy of the last block would run ahead of what this one writes.
        """
        for fork in sequence.forks:
            fork.block_ids = sequence.block_ids[: -(-sequence.num_prompt_tokens // self.pool.block_size)]
            fork.num_computed_tokens = sequence.num_prompt_tokens - 1
            fork.num_cached_tokens = sequence.num_cached_tokens
            self.pool.share(fork.block_ids)
        self._forked += sequence.forks
        sequence.forks = []

    def _blocks_short_of(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks missing to hold ``num_tokens``, the copy of a block that may not be written included."""
        missing = -(-num_tokens // self.pool.block_size) - len(sequence.block_ids)
        return (missing if missing > 0 else 0) + self._must_copy(sequence)

    def _must_copy(self, sequence: Sequence) -> bool:
        first = sequence.num_computed_tokens // self.pool.block_size
        return first < len(sequence.block_ids) and not self.pool.writable(sequence.block_ids[first])

    def _reserve(self, sequence: Sequence, length: int, copies: list[tuple[int, int]]) -> bool:
        """Make the next ``length`` tokens writable: roll over into new blocks, copy a shared one. False if full.

        A full last block needs nothing but a successor, whoever else holds it (source: article S1): the
        boundary step is the same code as every other, and a shared full block is never copied.
        """
        needed = self._blocks_short_of(sequence, sequence.num_computed_tokens + length)
        if needed == 0:
            return True
        if needed > self.pool.num_free:
            return False
        blocks = self.pool.allocate(needed)
        if self._must_copy(sequence):
            first = sequence.num_computed_tokens // self.pool.block_size
            source, copy = sequence.block_ids[first], blocks.pop()
            sequence.block_ids[first] = copy
            copies.append((source, copy))
            self._copy_sources.append(source)
        sequence.block_ids += blocks
        return True

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold a beginning of the sequence, its last token left to compute.

        A prompt that is cached to its very end keeps the last block and recomputes one token in a copy of it,
        unless that block is being computed in this very step: then the block is left out.
        """
        if not self.prefix_cache or sequence.needs_prompt_logprobs:
            return []
        size = self.pool.block_size
        hits: list[int] = []
        for index in range(len(sequence.token_ids) // size):
            block = self.pool.lookup(self._block_hash(sequence, index))
            if block is None:
                break
            hits.append(block)
        if len(hits) * size == len(sequence.token_ids) and hits[-1] in self._in_flight:
            hits.pop()
        return hits

    def _register_full_blocks(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Make the blocks findable that become full when tokens ``start .. end - 1`` are computed; those that were."""
        first, behind = start // self.pool.block_size, end // self.pool.block_size
        if first == behind:
            return []
        blocks = ((sequence.block_ids[i], self._block_hash(sequence, i)) for i in range(first, behind))
        return [block for block, block_hash in blocks if self.pool.register(block, block_hash)]

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        hashes, size = sequence.block_hashes, self.pool.block_size
        for i in range(len(hashes), index + 1):
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(hash_block(parent, sequence.token_ids[i * size : (i + 1) * size]))
        return hashes[index]

    def _make_room(self, preempted: list[Sequence]) -> bool:
        """Take blocks back: those that a waiting fork holds, else all of the newest sequence.

        False where that one's tokens must be known first. It resumes first of the waiting, recomputing what is not
        cached.
        """
        if self._release_fork():
            return True
        victim = self.running[-1]
        if victim.num_pending_tokens:
            return False
        self.running.pop()
        self._release(victim)
        victim.status = Status.WAITING
        victim.decoding = False
        self.waiting.appendleft(victim)
        preempted.append(victim)
        return True

    def _release_fork(self) -> bool:
        """Take the blocks of the last waiting sequence that holds any: it will be computed like any other."""
        holder = next((sequence for sequence in reversed(self.waiting) if sequence.block_ids), None)
        if holder is not None:
            self._release(holder)
        return holder is not None

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
