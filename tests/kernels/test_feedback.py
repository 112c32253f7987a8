"""The token feedback against a loop over rows: what it takes over, what it writes for the host, and nothing else."""

import random

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.tokens import NOT_FINITE
from rosebatch_kernels.feedback import reference
from rosebatch_kernels.feedback.layout import LIMIT, NEXT, NUM_FIELDS, POSITION, STOPS, TOKEN

kernel = Launchers("feedback.kernel")
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}

ENDS = [3, 5]


class State:
    """Random sequences on a device and, advanced by the definition, in lists; about a third of them are not live."""

    def __init__(self, columns, window, device, seed=0, apart=0):
        numbers = random.Random(seed)
        self.fields = [[numbers.randrange(1000) for _ in range(columns)] for _ in range(NUM_FIELDS)]
        for column in range(columns):
            position = self.fields[POSITION][column]
            self.fields[NEXT][column] = position + 1
            self.fields[LIMIT][column] = position + numbers.choice([-position, 0, 1, 2, 3, 4, 9])
            self.fields[STOPS][column] = numbers.choice([0, 1, 1])
        self.history = [[-7] * columns for _ in range(window)]
        self.step = 0
        # The rest of each row is nobody's.
        self.device_fields, self.device_history = (
            torch.nn.functional.pad(torch.tensor(rows, dtype=torch.int32), (0, apart), value=-9).to(device)
            for rows in (self.fields, self.history)
        )
        self.apart = apart
        self.device_step = torch.zeros(1, dtype=torch.int32, device=device)

    def advance(self, implementation, tokens, slots=None, counted=True, ends=ENDS, dtype=torch.int32):
        """One call on the device, and the same by the definition."""
        device, width = self.device_fields.device, len(self.history[0])
        implementation.advance(
            torch.tensor(tokens, dtype=dtype, device=device),
            self.device_fields[:, :width],
            None if slots is None else torch.tensor(slots, dtype=torch.int32, device=device),
            self.device_history[:, :width],
            self.device_step if counted else None,
            torch.tensor(ends, dtype=torch.int32, device=device),
        )
        fields, row = self.fields, self.step % len(self.history) if counted else 0
        for number, token in enumerate(tokens):
            column = number if slots is None else slots[number]
            live = fields[POSITION][column] < fields[LIMIT][column]
            self.history[row][column if counted else number] = token if live else -1
            if live:
                fields[TOKEN][column] = max(token, 0)
                fields[POSITION][column] += 1
                fields[NEXT][column] += 1
                if token == NOT_FINITE or (token in ends and fields[STOPS][column]):
                    fields[LIMIT][column] = 0
        self.step += counted

    def check(self):
        """The device has the same, to the bit, and nothing behind the rows' ends."""
        width = len(self.history[0])
        assert self.device_step.tolist() == [self.step]
        assert self.device_fields[:, :width].tolist() == self.fields
        assert self.device_history[:, :width].tolist() == self.history
        assert (self.device_fields[:, width:] == -9).all()
        assert (self.device_history[:, width:] == -9).all()


def sampled(count, seed):
    numbers = random.Random(seed)
    return [numbers.randrange(8) for _ in range(count)]


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "columns", "window"), [(1, 1, 1), (7, 10, 4), (63, 64, 3), (1000, 1000, 2)])
def test_steps_in_a_row(implementation, rows, columns, window, integer, device):
    """The ring is written round and round; columns past the batch, and sequences that have ended, stay as they are."""
    state = State(columns, window, device)
    for step in range(2 * window + 1):
        state.advance(implementation, sampled(rows, step), dtype=integer)
        state.check()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (5, 64), (33, 40)])
def test_rows_of_given_columns(implementation, rows, columns, counted, device):
    """After a prefill: without the counter, the tokens are left in the rows' order at the start of the history."""
    state = State(columns, 2, device)
    for seed in range(3):
        slots = random.Random(seed).sample(range(columns), rows)
        state.advance(implementation, sampled(rows, seed), slots, counted)
        state.check()


def test_neither_columns_nor_counter(implementation, device):
    state = State(10, 3, device)
    state.advance(implementation, sampled(7, 0), counted=False)
    state.check()


@pytest.mark.parametrize("ends", [[], [5], [7, 0, 2, 3, 6]])
def test_end_tokens(implementation, ends, device):
    """All of them count, none is needed; of a sequence that ignores them none does."""
    state = State(64, 4, device)
    state.fields[LIMIT] = [n + 100 for n in state.fields[POSITION]]
    state.device_fields[LIMIT] = torch.tensor(state.fields[LIMIT])
    for step in range(4):
        state.advance(implementation, sampled(64, step), ends=ends)
        state.check()
    assert (0 in state.fields[LIMIT]) == bool(ends)


def test_a_row_without_logits_stops(implementation, device):
    """Whether end tokens stop it or not; the next step reads its token, which must be one of the vocabulary."""
    state = State(64, 4, device)
    state.fields[LIMIT] = [n + 100 for n in state.fields[POSITION]]
    state.device_fields[LIMIT] = torch.tensor(state.fields[LIMIT])
    for step in range(3):
        tokens = [NOT_FINITE if row % 5 == step else token for row, token in enumerate(sampled(64, step))]
        state.advance(implementation, tokens)
        state.check()
    assert min(state.fields[TOKEN]) == 0


def test_counter_past_the_window(implementation, device):
    """The counter is never set back in a run: where it stands in the ring follows from the remainder."""
    state = State(5, 3, device)
    state.step = 2**31 - 5
    state.device_step.fill_(state.step)
    for step in range(4):
        state.advance(implementation, sampled(5, step))
        state.check()


def test_rows_that_lie_apart(implementation, device):
    """Fields and history as parts of wider matrices."""
    state = State(20, 3, device, apart=13)
    for step in range(4):
        state.advance(implementation, sampled(17, step), slots=list(range(17))[::-1])
        state.check()
