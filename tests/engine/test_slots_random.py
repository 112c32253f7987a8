"""Random runs of the engine on a device made of lists, which knows nothing but what ``Slots`` tells it."""

import random

import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import DecodeWindow, StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch_kernels.feedback import layout
from tests.engine.fake_runner import Follower, random_pools, told

# What some prompts begin with.
TRUNK = (7, 1, 4, 9, 2, 2, 8, 5, 6)
# Of sequences with one group of layers. Those with states share by snapshots, and else not at all.
FURTHER = [{}, {"host_blocks": 6}, {"host_blocks": 100}, {"snapshots": 1}, {"snapshots": 5}]


class ListDevice:
    """Applies what it is told and decodes every live row, as the kernels do, checking that the row may be decoded.

    A token is a function of the sequence and the position, so that nothing but the bookkeeping decides the result.
    What the rows should hold comes from a follower of the same plans.
    """

    END = 3

    def __init__(self, num_slots, max_len, block_size, num_groups=1, *, has_states=False):
        self.block_size = block_size
        self.slots = Slots(num_slots, -(-max_len // block_size))
        self.follower = Follower(num_groups)
        self.fields = [[0] * num_slots for _ in range(layout.NUM_FIELDS)]
        self.fields[layout.STATE] = list(range(num_slots))
        self.tables = [[[0] * self.slots.width for _ in range(num_slots)] for _ in range(num_groups)]
        self.moves = 0
        # The tokens that a state has seen, by its number, and those of snapshots.
        self.has_states = has_states
        self.states, self.snapshots = {}, {}

    @staticmethod
    def token(sequence_id, position):
        return hash((sequence_id, position)) % 20

    def launch(self, plan, masks):
        self.follower.update(plan)
        self.apply(self.slots.update(plan))
        slot_of = self.slots.slot_of
        assert self.slots.specs == self.follower.specs
        assert slot_of.keys() == self.follower.specs.keys()
        assert len(set(slot_of.values())) == len(slot_of), "two sequences in one slot"
        for sequence_id, groups in self.follower.blocks.items():
            for table, blocks in zip(self.tables, groups, strict=True):
                assert table[slot_of[sequence_id]][: len(blocks)] == blocks
        states_of = self.slots.states_of
        self.states |= {states_of(sequence_id): self.snapshots[slot] for slot, sequence_id in plan.state_loads}
        if not isinstance(plan, DecodeWindow):
            for chunk in plan.chunks:
                self.advance(chunk.id, chunk.start, len(chunk.token_ids))
            self.snapshots |= {slot: self.states[states_of(sequence_id)] for sequence_id, slot in plan.state_saves}
            return self.result([[self.decode(sequence_id)] for sequence_id in plan.sampled_ids])
        for row in plan.rows:
            if row.resumed:
                assert row.resumed[-1] == self.token(row.id, row.start)
                assert self.fields[layout.TOKEN][slot_of[row.id]] == row.resumed[-1]
        owners = {slot_of[row.id]: row for row in plan.rows}
        tokens = {row.id: [] for row in plan.rows}
        for step in range(plan.steps):
            for slot in range(self.slots.bucket(plan.sampled_ids)):
                if self.live(slot):
                    row = owners[slot]
                    assert self.fields[layout.POSITION][slot] == row.start + step and step < row.length
                    self.advance(row.id, row.start + step, 1)
                    tokens[row.id].append(self.decode(row.id))
        return self.result(list(tokens.values()))

    def apply(self, write):
        self.moves += len(write.moves)
        for source, target in write.moves:
            for row in self.fields:
                row[target] = row[source]
            for table in self.tables:
                table[target] = list(table[source])
        for index, value in told(write).items():
            assert -(2**31) <= value < 2**31
            num_slots = self.slots.num_slots
            field, slot = divmod(index, num_slots)
            if field < layout.NUM_FIELDS:
                self.fields[field][slot] = value
            else:
                row, column = divmod(index - layout.NUM_FIELDS * num_slots, self.slots.width)
                group, slot = divmod(row, num_slots)
                self.tables[group][slot][column] = value
        assert self.fields[layout.STATE] == self.slots.state_of

    def advance(self, sequence_id, start, length):
        """The states of a sequence see so many tokens after those before ``start``."""
        prompt = tuple(self.slots.specs[sequence_id].prompt_token_ids)
        generated = [self.token(sequence_id, position) for position in range(len(prompt), start + length)]
        tokens, number = (*prompt, *generated), self.slots.states_of(sequence_id)
        assert not (start and self.has_states) or self.states[number] == tokens[:start], "states of other tokens"
        self.states[number] = tokens[: start + length]

    def live(self, slot):
        return self.fields[layout.POSITION][slot] < self.fields[layout.LIMIT][slot]

    def decode(self, sequence_id):
        """Compute the row's token: the position must be one that its blocks have room for."""
        slot = self.slots.slot_of[sequence_id]
        assert self.live(slot)
        position = self.fields[layout.POSITION][slot]
        assert position < len(self.follower.blocks[sequence_id][0]) * self.block_size
        assert self.fields[layout.NEXT][slot] == position + 1
        token = self.token(sequence_id, position + 1)
        self.fields[layout.POSITION][slot] += 1
        self.fields[layout.NEXT][slot] += 1
        if token == self.END and self.fields[layout.STOPS][slot]:
            self.fields[layout.LIMIT][slot] = 0
        return token

    @staticmethod
    def result(tokens):
        return lambda: StepResult(tokens)


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("seed", range(60))
def test_the_device_decodes_exactly_the_planned_rows(seed, async_depth):
    """With chunks, preemptions, late results, stop tokens that the device does not know, and rows that move.

    With states, and their snapshots, where sequences cannot come back from the host.
    """
    rng = random.Random(seed)
    size, max_len, slots = rng.choice([1, 2, 4]), 24, rng.choice([1, 3, 16])
    pools = random_pools(rng, rng.choice([24, 48, 400]) // size, size)
    scheduler = Scheduler(
        *pools,
        max_num_seqs=slots,
        max_num_batched_tokens=rng.choice([4, 64]),
        policy=SeparateDecodes(rng.choice([1, 4, 8])),
        prefix_cache=rng.random() < 0.5,
        **(rng.choice(FURTHER) if [pool.window for pool in pools] == [0] else {}),
        replays=rng.random() < 0.5,
    )
    has_states = scheduler.blocks.snapshots is not None
    device = ListDevice(slots, max_len, size, len(pools), has_states=has_states)
    engine = Engine(
        scheduler, device, vocab_size=20, max_model_len=max_len, eos_token_ids=[device.END], async_depth=async_depth
    )
    wanted = {}
    for index in range(rng.randint(1, 30)):
        ids = tuple(rng.randrange(20) for _ in range(rng.randint(1, 12)))
        ids = (*TRUNK[: rng.choice([0, 5, 9])], *ids)[:12]
        ignore_eos, stops = rng.random() < 0.5, (5,) if rng.random() < 0.3 else ()
        own = {"max_tokens": rng.randint(1, 20), "n": rng.choice([1, 1, 3])}
        engine.add(Request(index, ids, SamplingParams(ignore_eos=ignore_eos, stop_token_ids=stops, **own)))
        first = scheduler.queues.waiting[-1]
        for sequence in (first, *first.forks):
            spec = sequence.spec
            tokens = [device.token(spec.id, position) for position in range(len(ids), spec.max_len)]
            ends = [i for i, token in enumerate(tokens) if token in spec.stop_ids]
            wanted[index, sequence.sample] = tuple(tokens[: ends[0] + 1] if ends else tokens)
    got = {}
    while engine.has_unfinished:
        got |= {(completion.request.id, completion.sample): completion.token_ids for completion in engine.step()}
        scheduler.check_integrity()
    assert got == wanted


def test_sequences_do_come_back_in_such_runs():
    """Or the test above would not have seen any: two sequences and room for one and a half."""
    scheduler = Scheduler(
        BlockPool(9, 4), max_num_seqs=2, max_num_batched_tokens=64, policy=SeparateDecodes(4), host_blocks=9
    )
    engine = Engine(scheduler, ListDevice(2, 24, 4), vocab_size=20, max_model_len=24, async_depth=1)
    for index in range(4):
        engine.add(Request(index, (1,), SamplingParams(max_tokens=22, ignore_eos=True)))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats.restored_blocks > 0


def test_rows_do_move_in_such_runs():
    """Or the test above would not have seen any move: sequences that end one after the other."""
    device = ListDevice(16, 64, 4)
    scheduler = Scheduler(BlockPool(400, 4), max_num_seqs=16, max_num_batched_tokens=64, policy=SeparateDecodes(4))
    engine = Engine(scheduler, device, vocab_size=20, max_model_len=64, async_depth=1)
    for index in range(16):
        engine.add(Request(index, (1,), SamplingParams(max_tokens=3 * index + 1, ignore_eos=True)))
    while engine.has_unfinished:
        engine.step()
    assert device.moves > 3
