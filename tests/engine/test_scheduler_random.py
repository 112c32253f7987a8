"""Thousands of random steps, the contents of the KV cache simulated slot by slot.

A slot holds the whole prefix whose K and V it stands for, so that any block shared, copied, evicted or written
wrongly shows as a prefix that does not belong to the sequence reading it.
"""

import random
from collections import Counter

import pytest

from rosebatch.engine.plan import StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler

SEEDS = 560
GROUPS = 8
VOCAB = 40


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


def next_token(prefix_tokens, sample=0):
    return hash((*prefix_tokens, sample)) % VOCAB


class CheckingRunner:
    """Does to a dict what the real runner does to tensors, and reads back what attention would read."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.cache = {}
        self.prefixes = Prefixes()

    def slots(self, chunk):
        size, blocks = self.block_size, chunk.sequence.block_ids
        return [blocks[i // size] * size + i % size for i in range(chunk.start + chunk.length)]

    def run(self, plan, frozen):
        """``frozen`` are full blocks that were computed before this step and are still held: not to be written."""
        size = self.block_size
        assert not {s for s, _ in plan.copies} & {d for _, d in plan.copies}
        assert len({d for _, d in plan.copies}) == len(plan.copies)
        copied = {d * size + i: self.cache.get(s * size + i) for s, d in plan.copies for i in range(size)}
        self.cache |= copied
        written = set()
        for chunk in plan.chunks:
            prefixes = self.prefixes.of(chunk.sequence.token_ids)
            for position, slot in list(enumerate(self.slots(chunk)))[chunk.start :]:
                assert slot not in written, f"slot {slot} written twice in a step"
                assert slot // size not in frozen, f"slot {slot} of a full block written again"
                written.add(slot)
                self.cache[slot] = prefixes[position]
        for chunk in plan.chunks:
            expected = self.prefixes.of(chunk.sequence.token_ids)[: chunk.start + chunk.length]
            assert [self.cache.get(slot) for slot in self.slots(chunk)] == expected
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        return StepResult([[next_token(s.token_ids, s.request.choice)] for s in sequences])


def random_prompts(rng, longest):
    """Prompts with common beginnings of all lengths, some of them equal, some each other's continuation."""
    trunks = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(2)]
    prompts = []
    for _ in range(rng.randint(4, 14)):
        kind = rng.random()
        if prompts and kind < 0.25:
            prompts.append(list(rng.choice(prompts)))
            continue
        prompt = rng.choice(trunks)[: rng.randint(0, longest)]
        if kind < 0.85:
            prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
        prompts.append((prompt or [0])[:longest])
    return prompts


def check_plan(scheduler, plan):
    """What holds for every plan, whatever the limits."""
    lengths = [chunk.length for chunk in plan.chunks]
    assert lengths and min(lengths) >= 1
    assert len(plan.chunks) <= scheduler.max_num_seqs
    assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(lengths)
    assert sorted(lengths, key=lambda n: n != 1) == lengths
    assert not {id(c.sequence) for c in plan.chunks} & {id(s) for s in plan.preempted}
    if scheduler.chunked_prefill:
        assert plan.num_tokens <= scheduler.max_num_batched_tokens
    else:
        assert all(chunk.samples for chunk in plan.chunks)
        over = [n for n in lengths if n > scheduler.max_num_batched_tokens]
        assert len(over) <= 1
        # Beside one that is too long for any step, the rest keep to the budget.
        assert plan.num_tokens - sum(over) <= scheduler.max_num_batched_tokens
    for chunk in plan.chunks:
        assert chunk.start + chunk.length == chunk.sequence.num_computed_tokens
        assert chunk.samples == (chunk.start + chunk.length == len(chunk.sequence.token_ids))


def expected_tokens(prompt, limit, stop, sample):
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens, sample))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def run_once(seed, make_sequence):
    """One random engine with random requests to its end; what happened on the way."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 16)
    num_blocks = rng.randint(max(2, -(-24 // block_size)), max(4, 90 // block_size))
    capacity = num_blocks * block_size
    scheduler = Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=rng.choice([1, 2, 4, 8, 64]),
        max_num_batched_tokens=rng.choice([1, 2, 5, 16, 64]),
        prefix_cache=rng.random() < 0.7,
        chunked_prefill=rng.random() < 0.7,
    )
    runner = CheckingRunner(block_size)
    prompts = random_prompts(rng, longest=min(capacity - 1, 40))
    stop = frozenset({0}) if rng.random() < 0.5 else frozenset()
    most_samples = rng.choice([1, 1, 2, 5])
    pending, limits = [], {}
    for index, prompt in enumerate(prompts):
        limit, samples = rng.randint(1, 24), rng.randint(1, most_samples)
        first, *forks = (
            make_sequence(prompt, max_tokens=limit, index=index, choice=choice, max_model_len=capacity, eos=stop)
            for choice in range(samples)
        )
        first.forks = forks
        pending.append(first)
        limits |= {(index, choice): first.max_len for choice in range(samples)}
    patience = rng.choice([0.0, 0.5, 0.9])
    counts, done = Counter(), {}
    while pending or scheduler.has_unfinished:
        while pending and (not scheduler.has_unfinished or rng.random() >= patience):
            scheduler.add(pending.pop(0))
        waiting = {id(s) for s in scheduler.waiting}
        assert scheduler.num_unfinished == len(limits) - len(done) - sum(1 + len(s.forks) for s in pending)
        full = [(s, s.block_ids[: s.num_computed_tokens // block_size]) for s in scheduler.running]
        plan = scheduler.schedule()
        scheduler.check_integrity()
        check_plan(scheduler, plan)
        counts["steps"] += 1
        counts["preemptions"] += len(plan.preempted)
        counts["copies"] += len(plan.copies)
        for chunk in plan.chunks:
            if chunk.sequence.request.choice and not chunk.sequence.output_token_ids:
                counts["forks"] += chunk.start == chunk.sequence.num_prompt_tokens - 1
            elif id(chunk.sequence) in waiting:
                counts["hits"] += chunk.start > 0
                counts["resumed"] += len(chunk.sequence.output_token_ids) > 0
            counts["partial"] += not chunk.samples
        frozen = {block for s, blocks in full if s not in plan.preempted for block in blocks}
        finished = scheduler.commit(plan, runner.run(plan, frozen))
        scheduler.check_integrity()
        done |= {(s.request.index, s.request.choice): s for s in finished}
    assert scheduler.pool.num_free == num_blocks
    assert sorted(done) == sorted(limits)
    for (index, choice), sequence in done.items():
        assert sequence.output_token_ids == expected_tokens(prompts[index], limits[index, choice], stop, choice)
        ended = "stop" if sequence.token_ids[-1] in stop else "length"
        assert sequence.finish_reason == ended
        counts[ended] += 1
    if not scheduler.prefix_cache:
        assert counts["hits"] == 0
        assert most_samples > 1 or counts["copies"] == 0
    if not scheduler.chunked_prefill:
        assert counts["partial"] == 0
    return counts


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_schedules(group, make_sequence):
    counts = Counter()
    for seed in range(group, SEEDS, GROUPS):
        counts += run_once(seed, make_sequence)
    # Each of these is a path that the checks above are about: a run without one of them would prove nothing.
    for event in ("preemptions", "copies", "hits", "resumed", "partial", "stop", "length", "forks"):
        assert counts[event] > 0, event
    assert counts["steps"] > 500
