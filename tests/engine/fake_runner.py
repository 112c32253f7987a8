"""Runners without tensors: what any runner knows if it follows plans and nothing else, and a fake model on top."""

import random
from collections.abc import Callable, Iterable

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.cache.windows import blocks_of_window
from rosebatch.engine.plan import GONE, Chunk, DecodeRow, DecodeWindow, SequenceSpec, StepPlan, StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.sequence import SequenceState, stop_ids_of

VOCAB = 20


def random_pools(rng: random.Random, num_blocks: int, block_size: int) -> list[BlockPool]:
    """Of one or several groups of layers. Those of windows may have fewer blocks, and hold less than a sequence."""
    pools = []
    for window in rng.choice([(0,), (0,), (0, 5), (3,), (0, 2, 9)]):
        fewest = min(num_blocks, blocks_of_window(window, block_size) + 2) if window else num_blocks
        pools.append(BlockPool(rng.randint(fewest, num_blocks), block_size, window))
    return pools


def next_token(token_ids: Iterable[int], seed: int | None = None) -> int:
    """The fake model: a token that depends on every token before it, and on the seed."""
    return hash((*token_ids, seed or 0)) % VOCAB


def fake_completion(
    prompt: Iterable[int], max_tokens: int, stop: frozenset[int] = frozenset(), seed: int | None = None
) -> list[int]:
    """What the fake model generates for a prompt, without any engine."""
    tokens, out = list(prompt), []
    while len(out) < max_tokens:
        out.append(next_token(tokens, seed))
        tokens.append(out[-1])
        if out[-1] in stop:
            break
    return out


def make_sequence(
    prompt: Iterable[int],
    max_tokens: int = 100,
    id: int = 0,
    *,
    max_model_len: int = 10**6,
    eos: frozenset[int] = frozenset(),
    sample: int = 0,
    **sampling: object,
) -> SequenceState:
    """A sequence whose request has the same id, and token ids as jobs have them."""
    request = Request(id, TokenIds.of([*prompt]), SamplingParams(max_tokens=max_tokens, **sampling))
    stop_ids = stop_ids_of(request.sampling, eos, 1 << 31)
    return SequenceState.start(request, id=id, sample=sample, max_model_len=max_model_len, stop_ids=stop_ids)


def forget_replayed(held: list[int], chunk: Chunk, spec: SequenceSpec) -> None:
    """Drop the tokens that are sampled once more: a chunk that ends a prompt samples the first token after it."""
    prompt = len(spec.prompt_token_ids)
    if chunk.sampled and chunk.end - (chunk.sampled - 1) == prompt:
        del held[prompt:]


def verify(held: list[int], drafts: Iterable[int], sample: Callable[[list[int]], int]) -> list[int]:
    """The tokens sampled after ``held`` and after each of the drafts; ``held`` gets those that a right draft led to."""
    drafts = list(drafts)
    sampled = [sample([*held, *drafts[:count]]) for count in range(len(drafts) + 1)]
    right = next((count for count, draft in enumerate(drafts) if draft != sampled[count]), len(drafts))
    held += sampled[: right + 1]
    return sampled


class Follower:
    """Follows plans: specs and block tables by sequence id. Refuses a plan that does not fit those before it.

    Attributes:
        specs: of all sequences that were started and not released since.
        blocks: their block ids, in each group.
    """

    def __init__(self, num_groups: int = 1) -> None:
        self.num_groups = num_groups
        self.specs: dict[int, SequenceSpec] = {}
        self.blocks: dict[int, list[list[int]]] = {}

    def update(self, plan: StepPlan) -> None:
        """Take over what a plan changes."""
        if plan.reset:
            self.specs, self.blocks = {}, {}
        for sequence_id in plan.released:
            del self.specs[sequence_id], self.blocks[sequence_id]
        for spec in plan.started:
            assert spec.id not in self.specs, f"sequence {spec.id} was started twice"
            self.specs[spec.id], self.blocks[spec.id] = spec, [[] for _ in range(self.num_groups)]
        work = plan.rows if isinstance(plan, DecodeWindow) else plan.chunks
        assert len({each.id for each in work}) == len(work), "a sequence twice in a plan"
        started = {spec.id for spec in plan.started}
        assert started <= {each.id for each in work}, "started, but not computed"
        resumed = {row.id for row in work if isinstance(row, DecodeRow) and row.resumed}
        assert isinstance(plan, DecodeWindow) <= (resumed == started), "a decode step starts what comes back, and tells"
        for each in work:
            for group, first, blocks in each.blocks:
                table = self.blocks[each.id][group]
                assert first <= len(table), f"sequence {each.id} has no block {len(table)}"
                table[first : first + len(blocks)] = blocks

    def check(self, scheduler: Scheduler) -> None:
        """Right after ``schedule``: it knows the running sequences and no others, with all their blocks."""
        assert self.specs == {sequence.id: sequence.spec for sequence in scheduler.queues.running}
        for sequence in scheduler.queues.running:
            for known, table in zip(self.blocks[sequence.id], sequence.tables, strict=True):
                assert len(known) == len(table)
                # A runner is not told that a block left the window.
                assert all(ours in (theirs, GONE) for theirs, ours in zip(known, table, strict=True))


class FakeRunner(Follower):
    """Carries out plans with the fake model. Like a device, it feeds back tokens itself and stops at end tokens.

    Attributes:
        tokens: of every sequence that was ever started, by id: the prompt and what was sampled.
        seen: those that windows with drafts have had or sampled, by id.
    """

    def __init__(self, num_groups: int = 1) -> None:
        super().__init__(num_groups)
        self.tokens: dict[int, list[int]] = {}
        self.seen: dict[int, list[int]] = {}

    def launch(self, plan: StepPlan, masks: Callable | None = None) -> Callable[[], StepResult]:
        self.update(plan)
        for spec in plan.started:
            self.tokens.setdefault(spec.id, list(spec.prompt_token_ids))
            self.seen.pop(spec.id, None)
        if isinstance(plan, DecodeWindow):
            assert max(row.length for row in plan.rows) <= plan.steps * plan.queries
            result = StepResult([self._decode(row, plan) for row in plan.rows])
        else:
            result = StepResult([tokens for tokens in map(self._compute, plan.chunks) if tokens])
        return lambda: result

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a plan and wait for its result."""
        return self.launch(plan)()

    def _compute(self, chunk: Chunk) -> list[int]:
        """The sampled tokens of a chunk, whose tokens are those of the prompt, or sampled before, or drafts."""
        spec, held = self.specs[chunk.id], self.tokens[chunk.id]
        forget_replayed(held, chunk, spec)
        drafts = chunk.token_ids[max(len(held) - chunk.start, 0) :]
        assert list(chunk.token_ids) == [*held[chunk.start : chunk.end], *drafts]
        assert chunk.sampled == max(chunk.end - len(held) + 1, 0), "a token was left out"
        output = held[len(spec.prompt_token_ids) :]
        assert list(chunk.output_token_ids) == (output if chunk.sampled and spec.sampling.adjusts else [])
        return verify(held, drafts, lambda tokens: self.next_token(tokens, spec)) if chunk.sampled else []

    def next_token(self, token_ids: list[int], spec: SequenceSpec) -> int:
        """What the model samples after these tokens."""
        return next_token(token_ids, spec.sampling.seed)

    def _decode(self, row: DecodeRow, plan: DecodeWindow) -> list[int]:
        spec, held = self.specs[row.id], self.tokens[row.id]
        assert not row.resumed or list(row.resumed) == held[len(spec.prompt_token_ids) :]
        first, most = len(held), row.length
        assert self._ended(spec) or first == row.start + 1, "a token was left out"
        if plan.queries > 1:
            # As many drafts are right as it happens.
            most -= hash((row.id, row.start)) % (most - min(most, plan.steps) + 1)
            seen = self.seen.setdefault(row.id, [])
            known = row.start + 1
            seen[known - len(row.unseen) :] = row.unseen
            assert self._ended(spec) or seen == held[:known], "the device knows all tokens, once each"
        while len(held) < first + most and not self._ended(spec):
            self._sample(spec)
        if plan.queries > 1:
            self.seen[row.id] = held[:]
        return held[first:]

    def _sample(self, spec: SequenceSpec) -> int:
        held = self.tokens[spec.id]
        held.append(self.next_token(held, spec))
        return held[-1]

    def _ended(self, spec: SequenceSpec) -> bool:
        held = self.tokens[spec.id]
        return held[-1] in spec.stop_ids and len(held) > len(spec.prompt_token_ids)


def told(write):
    """What a write tells of the device's cells, by flat index. Of two values of a cell, either might count."""
    found = {**write.cells, **write.rollovers}
    for indices, values in write.many:
        for index, value in zip(indices.tolist(), values.tolist(), strict=True):
            assert index not in found
            found[index] = value
    return found
