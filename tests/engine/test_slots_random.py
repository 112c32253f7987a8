"""Random runs of the engine on a device made of lists, which knows nothing but what ``Slots`` tells it."""

import random

import pytest

from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.request import Request
from rosebatch.sampling_params import SamplingParams
from rosebatch_kernels.feedback import layout


class ListDevice:
    """Applies what it is told and decodes every live row, as the kernels do, checking that the row may be decoded.

    A token is a function of the request and the position, so that nothing but the bookkeeping decides the result.
    """

    END = 3

    def __init__(self, num_slots, max_len, block_size):
        self.block_size = block_size
        self.slots = Slots(num_slots, -(-max_len // block_size))
        self.fields = [[0] * num_slots for _ in range(layout.NUM_FIELDS)]
        self.table = [[0] * self.slots.width for _ in range(num_slots)]
        self.moves = 0

    @staticmethod
    def token(sequence, position):
        return hash((sequence.request.index, position)) % 20

    def launch(self, plan):
        self.apply(self.slots.update(plan))
        slot_of = {chunk.sequence: self.slots.slot_of[chunk.sequence] for chunk in plan.chunks}
        assert len(set(self.slots.slot_of.values())) == len(self.slots.slot_of), "two sequences in one slot"
        for sequence, slot in slot_of.items():
            assert self.table[slot][: len(sequence.block_ids)] == sequence.block_ids
        if not plan.decode_steps:
            return self.result([[self.decode(slot_of[c.sequence], c.sequence)] for c in plan.chunks if c.samples])
        owners = {slot_of[chunk.sequence]: chunk for chunk in plan.chunks}
        tokens = {chunk.sequence: [] for chunk in plan.chunks}
        for step in range(plan.decode_steps):
            for slot in range(self.slots.bucket(plan.chunks)):
                if self.live(slot):
                    chunk = owners[slot]
                    assert self.fields[layout.POSITION][slot] == chunk.start + step and step < chunk.length
                    tokens[chunk.sequence].append(self.decode(slot, chunk.sequence))
        return self.result(list(tokens.values()))

    def apply(self, write):
        self.moves += len(write.moves)
        for source, target in write.moves:
            for row in self.fields:
                row[target] = row[source]
            self.table[target] = list(self.table[source])
        for index, value in write.cells.items():
            assert -(2**31) <= value < 2**31
            field, slot = divmod(index, len(self.table))
            if field < layout.NUM_FIELDS:
                self.fields[field][slot] = value
            else:
                slot, column = divmod(index - layout.NUM_FIELDS * len(self.table), self.slots.width)
                self.table[slot][column] = value

    def live(self, slot):
        return self.fields[layout.POSITION][slot] < self.fields[layout.LIMIT][slot]

    def decode(self, slot, sequence):
        """Compute the row's token: the position must be one that its blocks have room for."""
        assert self.live(slot)
        position = self.fields[layout.POSITION][slot]
        assert position < len(sequence.block_ids) * self.block_size
        assert self.fields[layout.NEXT][slot] == position + 1
        token = self.token(sequence, position + 1)
        self.fields[layout.POSITION][slot] += 1
        self.fields[layout.NEXT][slot] += 1
        if token == self.END and self.fields[layout.STOPS][slot]:
            self.fields[layout.LIMIT][slot] = 0
        return token

    @staticmethod
    def result(tokens):
        return lambda: StepResult(tokens)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(40))
def test_the_device_decodes_exactly_the_planned_rows(seed, lookahead):
    """With chunks, preemptions, late results, stop tokens that the device does not know, and rows that move."""
    rng = random.Random(seed)
    size, max_len, seats = rng.choice([1, 2, 4]), 24, rng.choice([1, 3, 16])
    pool = BlockPool(rng.choice([24, 48, 400]) // size, size)
    scheduler = Scheduler(
        pool,
        max_num_seqs=seats,
        max_num_batched_tokens=rng.choice([4, 64]),
        prefix_cache=rng.random() < 0.5,
        decode_window=rng.choice([1, 4, 8]),
    )
    device = ListDevice(seats, max_len, size)
    engine = Engine(
        scheduler, device, vocab_size=20, max_model_len=max_len, eos_token_ids=[device.END], lookahead=lookahead
    )
    wanted = {}
    for index in range(rng.randint(1, 30)):
        ids = tuple(rng.randrange(20) for _ in range(rng.randint(1, 12)))
        ignore_eos, stops = rng.random() < 0.5, (5,) if rng.random() < 0.3 else ()
        sampling = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=ignore_eos, stop_token_ids=stops)
        request = Request(index=index, prompt_token_ids=ids, sampling=sampling)
        engine.add(request)
        sequence = scheduler.waiting[-1]
        tokens = [device.token(sequence, position) for position in range(len(ids), sequence.max_len)]
        ends = [i for i, token in enumerate(tokens) if token in sequence.stop_ids]
        wanted[index] = tuple(tokens[: ends[0] + 1] if ends else tokens)
    got = {}
    while engine.has_unfinished:
        got |= {completion.request.index: completion.token_ids for completion in engine.step()}
    assert got == wanted


def test_rows_do_move_in_such_runs():
    """Or the test above would not have seen any move: sequences that end one after the other."""
    device = ListDevice(16, 64, 4)
    scheduler = Scheduler(BlockPool(400, 4), max_num_seqs=16, max_num_batched_tokens=64, decode_window=4)
    engine = Engine(scheduler, device, vocab_size=20, max_model_len=64, lookahead=1)
    for index in range(16):
        sampling = SamplingParams(max_tokens=3 * index + 1, ignore_eos=True)
        engine.add(Request(index=index, prompt_token_ids=(1,), sampling=sampling))
    while engine.has_unfinished:
        engine.step()
    assert device.moves > 3
