"""Thousands of random steps, the contents of the KV cache simulated slot by slot.

A slot holds the whole prefix whose K and V it stands for, so that any block shared, copied, evicted or written
wrongly shows as a prefix that does not belong to the sequence reading it. So do states, and snapshots of them.
"""

import pickle
import random
from collections import Counter
from itertools import product

import pytest
from msgspec import structs

from rosebatch.engine.long_rope import LONG, LongRope
from rosebatch.engine.plan import GONE, StepResult
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.torch_runner.batch import BlockTables
from tests.engine.fake_runner import (
    VOCAB,
    Follower,
    fake_completion,
    forget_replayed,
    make_sequence,
    next_token,
    random_pools,
    verify,
)

SEEDS = 400
GROUPS = 4
# Each of these is a path that the checks below are about: a run without one of them would prove nothing.
_EVENTS = (
    *("preemptions", "copies", "hits", "resumed", "partial", "stop"),
    *("length", "forks", "gone", "windows", "started over", "accepted", "rejected", "saved", "restored", "kept"),
    *("snapshots", "loads", "overwritten", "state forks", "adapters", "passed"),
)


class Prefixes:
    """Every prefix as a number: equal numbers, equal tokens. Slower to build than a hash, but it cannot collide."""

    def __init__(self):
        self._ids = {}

    def of(self, tokens):
        """The number of each prefix of ``tokens``, the shortest first."""
        node, out = 0, []
        for token in tokens:
            node = self._ids.setdefault((node, token), len(self._ids) + 1)
            out.append(node)
        return out


class CheckingRunner(Follower):
    """Does to a dict what a real runner does to tensors, and reads back what attention would read.

    With ``exact``, a slot also says how its K and V were computed: None for a prompt token, else the length of the
    prompt in front of the generated tokens. Both change the last bits. With a ``trained_len``, it says whether its key
    has long factors: those of a sequence whose known tokens are more than these. States hold what their last token's
    slot does, by the id of a sequence that runs.
    """

    def __init__(self, block_size, exact, windows, trained_len, has_states):
        super().__init__(len(windows))
        self.block_size, self.exact, self.windows, self.trained_len = block_size, exact, windows, trained_len
        self.tables, self.cache = BlockTables(len(windows)), [{} for _ in windows]
        self.prefixes, self.tokens, self.host = Prefixes(), {}, {}
        self.has_states, self.states, self.snapshots = has_states, {}, {}
        self.adapters, self.needs_loads = {}, False

    def first_read(self, chunk, group):
        """The first position that the first token of a chunk sees."""
        return max(0, chunk.start + 1 - self.windows[group]) if self.windows[group] else 0

    def slots(self, chunk, group):
        """Of all positions that a chunk reads or writes."""
        size, blocks = self.block_size, self.blocks[chunk.id][group]
        return [blocks[i // size] * size + i % size for i in range(self.first_read(chunk, group), chunk.end)]

    def contents(self, chunk):
        """What each slot of a sequence must hold, up to the end of a chunk."""
        num_prompt_tokens = len(self.specs[chunk.id].prompt_token_ids)
        tokens = self.tokens[chunk.id]
        is_long = 0 < self.trained_len < len(tokens)
        assert (self.specs[chunk.id].salt == LONG) == is_long
        prefixes = self.prefixes.of(tokens[: chunk.start] + list(chunk.token_ids))
        made = [num_prompt_tokens if self.exact and i >= num_prompt_tokens else None for i in range(chunk.end)]
        adapter = self.specs[chunk.id].adapter
        return [(*each, is_long, adapter) for each in zip(prefixes, made, strict=True)]

    def run(self, plan, frozen):
        """``frozen`` are full blocks, (group, block), computed before this step and still held: not to be written."""
        size = self.block_size
        self.update(plan)
        self.tables.update(plan)
        assert (self.tables.specs, self.tables.blocks) == (self.specs, self.blocks)
        for spec in plan.started:
            self.tokens.setdefault(spec.id, list(spec.prompt_token_ids))
        self.adapters |= {slot: adapter for adapter, slot in plan.adapter_loads}
        assert self.needs_loads <= ({spec.adapter for spec in self.specs.values()} - {0} <= {*self.adapters.values()})
        for block, kept in plan.saves:
            self.host[kept] = [self.cache[0].get(block * size + i) for i in range(size)]
        for group, block in plan.wipes:
            for slot in range(block * size, block * size + size):
                self.cache[group].pop(slot, None)
        assert not {(group, s) for group, s, _ in plan.copies} & {(group, d) for group, _, d in plan.copies}
        assert len({(group, d) for group, _, d in plan.copies}) == len(plan.copies)
        copied = [(g, d * size + i, self.cache[g].get(s * size + i)) for g, s, d in plan.copies for i in range(size)]
        for group, slot, content in copied:
            self.cache[group][slot] = content
        for block, kept in plan.restores:
            assert (0, block) not in frozen
            self.cache[0] |= {block * size + i: content for i, content in enumerate(self.host[kept])}
        written, read = set(), []
        for spec in plan.started:
            self.states[spec.id] = None
        self.states |= {sequence_id: self.snapshots[slot] for slot, sequence_id in plan.state_loads}
        for chunk in plan.chunks:
            forget_replayed(self.tokens[chunk.id], chunk, self.specs[chunk.id])
        for chunk, group in product(plan.chunks, range(self.num_groups)):
            known = self.tokens[chunk.id][chunk.start : chunk.end]
            assert list(chunk.token_ids[: len(known)]) == known
            first, slots, contents = self.first_read(chunk, group), self.slots(chunk, group), self.contents(chunk)
            read.append((group, slots, contents[first:]))
            for slot, content in zip(slots[chunk.start - first :], contents[chunk.start :], strict=True):
                assert (group, slot) not in written, f"slot {slot} written twice in a step"
                assert (group, slot // size) not in frozen, f"slot {slot} of a full block written again"
                written.add((group, slot))
                self.cache[group][slot] = content
        for chunk in plan.chunks:
            contents = self.contents(chunk)
            if self.has_states:
                assert not chunk.start or self.states[chunk.id] == contents[chunk.start - 1], "states go on from others"
            self.states[chunk.id] = contents[-1]
        assert len({slot for _, slot in plan.state_saves}) == len(plan.state_saves)
        self.snapshots |= {slot: self.states[sequence_id] for sequence_id, slot in plan.state_saves}
        for group, slots, contents in read:
            assert [self.cache[group].get(slot) for slot in slots] == contents
        return StepResult([self.sample(chunk) for chunk in plan.chunks if chunk.sampled])

    def sample(self, chunk):
        seed, drafts = self.specs[chunk.id].sampling.seed, chunk.token_ids[len(chunk.token_ids) - chunk.sampled + 1 :]
        return verify(self.tokens[chunk.id], drafts, lambda tokens: next_token(tokens, seed))


def random_prompts(rng, longest):
    """Prompts with common prefixes of all lengths. Some are equal, some the next turn of another's conversation."""
    trunks = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(2)]
    prompts = []
    for _ in range(rng.randint(4, 14)):
        kind = rng.random()
        if prompts and kind < 0.25:
            prompts.append(list(rng.choice(prompts)))
            continue
        if prompts and kind < 0.4:
            prompt = rng.choice(prompts)
            prompts.append((prompt + fake_completion(prompt, longest - len(prompt)))[: rng.randint(1, longest)])
            continue
        prompt = rng.choice(trunks)[: rng.randint(0, longest)]
        if kind < 0.85:
            prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
        prompts.append((prompt or [0])[:longest])
    return prompts


def check_plan(scheduler, plan):
    """What holds for every plan, whatever the limits."""
    lengths = [len(chunk.token_ids) for chunk in plan.chunks]
    assert lengths and min(lengths) >= 1
    assert len(plan.chunks) <= scheduler.planner.max_num_seqs
    assert len(plan.sampled_ids) == sum(chunk.sampled > 0 for chunk in plan.chunks)
    assert sorted(lengths, key=lambda n: n != 1) == lengths
    assert not {chunk.id for chunk in plan.chunks} & (set(plan.released) - {spec.id for spec in plan.started})
    if scheduler.planner.chunked_prefill:
        assert plan.num_tokens <= scheduler.planner.max_num_batched_tokens
    else:
        assert all(chunk.sampled for chunk in plan.chunks)
        over = [n for n in lengths if n > scheduler.planner.max_num_batched_tokens]
        assert len(over) <= 1
        # Beside one that is too long for any step, the rest keep to the budget.
        assert plan.num_tokens - sum(over) <= scheduler.planner.max_num_batched_tokens
    running = {sequence.id: sequence for sequence in scheduler.queues.running}
    for chunk in plan.chunks:
        sequence = running[chunk.id]
        assert chunk.end == sequence.num_computed_tokens
        assert chunk.sampled == max(chunk.end - len(sequence.token_ids) + 1, 0)
    assert pickle.loads(pickle.dumps(plan)) == plan


def run_once(seed):
    """One random engine with random requests to its end; what happened on the way."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 16)
    num_blocks = rng.randint(max(2, -(-24 // block_size)), max(4, 90 // block_size))
    pools = random_pools(rng, num_blocks, block_size)
    trained_len = rng.choice([0, 0, rng.randint(1, 40)])
    chunked_prefill = rng.random() < 0.7
    # No model with states has long factors.
    can_have_states = chunked_prefill and [pool.window for pool in pools] == [0] and not trained_len
    has_states = can_have_states and rng.random() < 0.6
    scheduler = Scheduler(
        *pools,
        max_num_seqs=rng.choice([1, 2, 4, 8, 64]),
        max_num_batched_tokens=rng.choice([1, 2, 5, 16, 64]),
        prefix_cache=rng.random() < 0.7,
        chunked_prefill=chunked_prefill,
        exact_prefixes=rng.random() < 0.5,
        replays=rng.random() < 0.5,
        restarts=LongRope(trained_len, 10**6) if trained_len else None,
        host_blocks=rng.choice([4, 100]) if [pool.window for pool in pools] == [0] and not has_states else 0,
        snapshots=rng.choice([1, 2, 8]) if has_states else 0,
        adapter_slots=0 if trained_len else rng.choice([0, 1, 2, 3]),
    )
    adapter_slots = scheduler.planner.adapters.slots
    capacity = scheduler.max_sequence_len or num_blocks * block_size
    runner = CheckingRunner(
        block_size, scheduler.prefixes.exact, [pool.window for pool in pools], trained_len, has_states
    )
    runner.needs_loads = adapter_slots > 0
    prompts = random_prompts(rng, longest=min(capacity - 1, 40))
    stop = frozenset({0}) if rng.random() < 0.5 else frozenset()
    max_samples = rng.choice([1, 1, 2, 5])
    pending, sequences = [], {}
    for prompt in prompts:
        limit, samples = rng.randint(1, 24), rng.randint(1, max_samples)
        ends, number = {"max_tokens": limit, "max_model_len": capacity, "eos": stop}, len(sequences)
        first, *forks = (make_sequence(prompt, id=number + i, sample=i, **ends) for i in range(samples))
        adapter = 0 if trained_len else rng.randint(0, 5)
        for sequence in (first, *forks):
            sequence.spec = structs.replace(sequence.spec, adapter=adapter, salt=b"x" * adapter)
        first.forks = forks
        pending.append(first)
        sequences |= {sequence.id: sequence for sequence in (first, *forks)}
    patience = rng.choice([0.0, 0.5, 0.9])
    guesses = rng.random() < 0.3 and not has_states
    used = set()
    counts, done = Counter(), []
    while pending or scheduler.has_unfinished:
        while pending and (not scheduler.has_unfinished or rng.random() >= patience):
            scheduler.add(pending.pop(0))
        waiting = {s.id for s in scheduler.queues.waiting}
        saved = {s.id for s in scheduler.queues.waiting if s.saved_blocks}
        assert scheduler.num_unfinished == len(sequences) - len(done) - sum(1 + len(s.forks) for s in pending)
        full = [
            (s, group, block)
            for s in scheduler.queues.running
            for group, table in enumerate(s.tables)
            for block in table[: s.num_computed_tokens // block_size]
            if block != GONE
        ]
        for sequence in scheduler.queues.running if guesses else ():
            right = fake_completion(sequence.token_ids, 4, seed=sequence.sampling.seed)
            scheduler.propose(sequence, [rng.choice([token, token, 1]) for token in right])
        gone = sum(table.count(GONE) for s in scheduler.queues.running for table in s.tables)
        plan = scheduler.schedule()
        scheduler.check_integrity()
        check_plan(scheduler, plan)
        counts["steps"] += 1
        counts["preemptions"] += plan.num_preempted
        counts["copies"] += len(plan.copies)
        counts["saved"] += len(plan.saves)
        counts["restored"] += len(plan.restores)
        counts["snapshots"] += len(plan.state_saves)
        counts["loads"] += len(plan.state_loads)
        counts["adapters"] += len(plan.adapter_loads)
        assert all(1 <= slot <= adapter_slots for _, slot in plan.adapter_loads)
        begun = max((spec.id for spec in plan.started), default=0)
        counts["passed"] += adapter_slots > 0 and any(s.id < begun for s in scheduler.queues.waiting)
        counts["overwritten"] += len(used.intersection(slot for _, slot in plan.state_saves))
        used.update(slot for _, slot in plan.state_saves)
        counts["started over"] += sum(bool(spec.salt) and spec.id in plan.released for spec in plan.started)
        for chunk in plan.chunks:
            sequence = sequences[chunk.id]
            if sequence.sample and not sequence.output_token_ids:
                counts["state forks" if has_states else "forks"] += chunk.start == sequence.num_prompt_tokens - 1
            elif chunk.id in waiting:
                counts["hits"] += chunk.start > 0 and chunk.id not in saved
                counts["resumed"] += len(sequence.output_token_ids) > 0
            counts["partial"] += not chunk.sampled
        frozen = {(group, block) for s, group, block in full if s.id not in plan.released}
        counts["gone"] += sum(table.count(GONE) for s in scheduler.queues.running for table in s.tables) > gone
        counts["windows"] += len(pools) > 1
        result = runner.run(plan, frozen)
        runner.check(scheduler)
        lengths = {chunk.id: len(sequences[chunk.id].token_ids) for chunk in plan.chunks if chunk.sampled > 1}
        done += scheduler.commit(plan, result).finished
        for chunk in plan.chunks:
            if chunk.id in lengths:
                kept = len(sequences[chunk.id].token_ids) - lengths[chunk.id]
                counts["accepted"] += kept > 1
                counts["rejected"] += kept < chunk.sampled
        scheduler.check_integrity()
    assert scheduler.blocks.num_used == 0
    counts["kept"] += counts["restored"] < counts["saved"]
    assert sorted(s.id for s in done) == sorted(sequences)
    for sequence in done:
        prompt = sequence.request.prompt_token_ids
        limit, seed = sequence.max_len - len(prompt), sequence.sampling.seed
        ended = "stop" if sequence.token_ids[-1] in stop else "length"
        assert sequence.output_token_ids == fake_completion(prompt, limit, stop, seed)
        assert sequence.finish_reason == ended
        counts[ended] += 1
    if not scheduler.prefixes.enabled:
        assert counts["hits"] == 0
        assert max_samples > 1 or counts["copies"] == 0
    if not scheduler.planner.chunked_prefill:
        assert counts["partial"] == 0
    return counts


@pytest.mark.matrix
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_schedules(group):
    counts = Counter()
    for seed in range(group, SEEDS, GROUPS):
        counts += run_once(seed)
    assert [event for event in _EVENTS if not counts[event]] == []
    assert counts["steps"] > 500
