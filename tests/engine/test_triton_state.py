"""The host's changes on the device: exact contents, whichever way they are written."""

import random
from array import array
from itertools import product

import numpy as np
import pytest
import torch

from rosebatch.engine.plan import GONE, Chunk, DecodeRow, DecodeWindow, PackedStep
from rosebatch.engine.staging import Staging
from rosebatch.engine.triton_runner.slots import Slots, StateWrite
from rosebatch.engine.triton_runner.state import DeviceState
from rosebatch_kernels.feedback import layout
from tests.engine.fake_runner import make_sequence, told

SLOTS, WIDTH, WINDOW, GROUPS = 5, 3, 4, 3
FIELD_VALUES, TABLE_VALUES = layout.NUM_FIELDS * SLOTS, SLOTS * WIDTH


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def make_state(device):
    """A state of which every cell is known: its own flat index, plus 1000."""

    def make():
        state = DeviceState(SLOTS, WIDTH, WINDOW, device, num_groups=GROUPS)
        for tensor, first in ((state.fields, 1000), (state.block_tables, 1000 + FIELD_VALUES)):
            tensor.copy_(torch.arange(first, first + tensor.numel()).view(tensor.shape))
        return state

    return make


def contents(state):
    """All cells in the order of ``Slots``."""
    return state.fields.flatten().tolist() + state.block_tables.flatten().tolist()


UNTOUCHED = list(range(1000, 1000 + FIELD_VALUES + GROUPS * TABLE_VALUES))


def apply_to_list(cells, write):
    """What a write means, in Python: moves read what was there before any of them, cells and rollovers come after."""
    before, cells = list(cells), list(cells)
    for source, target in write.moves:
        for field in range(layout.NUM_FIELDS):
            cells[field * SLOTS + target] = before[field * SLOTS + source]
        for table, column in product(range(FIELD_VALUES, len(cells), TABLE_VALUES), range(WIDTH)):
            cells[table + target * WIDTH + column] = before[table + source * WIDTH + column]
    for index, value in told(write).items():
        cells[index] = value
    return cells


def test_a_new_state_decodes_nothing(device):
    state = DeviceState(SLOTS, WIDTH, WINDOW, device)
    # Only the places of states are told apart.
    assert state.fields[layout.STATE].tolist() == list(range(SLOTS))
    state.fields[layout.STATE] = 0
    assert (set(contents(state)), state.step.tolist()) == ({0}, [0])
    assert state.history.tolist() == [[-1] * SLOTS] * WINDOW
    assert {t.dtype for t in (state.fields, state.block_tables, state.history, state.step)} == {torch.int32}


# The two ways to write.
WAYS = [DeviceState.apply, DeviceState.apply_rollovers_one_by_one]


@pytest.mark.parametrize("apply", WAYS)
def test_cells_are_where_slots_count_them(make_state, device, apply):
    """One field of one slot, one block of one row of two tables, the corners, and the least and largest numbers."""
    state = make_state()
    last = FIELD_VALUES + GROUPS * TABLE_VALUES - 1
    cells = {0: -1, layout.LIMIT * SLOTS + 2: 2**31 - 1, FIELD_VALUES - 1: -(2**31), FIELD_VALUES: 7, last: 8}
    cells |= {FIELD_VALUES + 3 * WIDTH + 1: 9, FIELD_VALUES + 2 * TABLE_VALUES + 3 * WIDTH + 2: 10}
    apply(state, StateWrite(cells=cells), Staging(device))
    assert state.fields[layout.LIMIT, 2] == 2**31 - 1
    assert (state.block_tables[0, 3, 1], state.block_tables[2, 3, 2]) == (9, 10)
    assert contents(state) == apply_to_list(UNTOUCHED, StateWrite(cells=cells))


@pytest.mark.parametrize("apply", WAYS)
def test_moves_come_before_cells(make_state, device, apply):
    """The row that was left ends, the row that was taken keeps what it brought, of all groups, and is told the rest."""
    state = make_state()
    write = StateWrite(moves=[(4, 0), (3, 1)], cells={layout.LIMIT * SLOTS + 4: 0, FIELD_VALUES: 77})
    apply(state, write, Staging(device))
    assert state.fields[:, 1].tolist() == [1000 + field * SLOTS + 3 for field in range(layout.NUM_FIELDS)]
    assert state.block_tables[0, 0].tolist() == [77, 1001 + FIELD_VALUES + 4 * WIDTH, 1002 + FIELD_VALUES + 4 * WIDTH]
    moved = [1000 + FIELD_VALUES + TABLE_VALUES + 4 * WIDTH + column for column in range(WIDTH)]
    assert (state.block_tables[1, 0].tolist(), contents(state)) == (moved, apply_to_list(UNTOUCHED, write))


@pytest.mark.parametrize("apply", WAYS)
def test_nothing_to_write_changes_nothing(make_state, device, apply):
    state = make_state()
    apply(state, StateWrite(), Staging(device))
    assert contents(state) == UNTOUCHED


def test_blocks_of_a_sequence_in_all_groups(make_state, device):
    """A group's table in another's place: layers with a window read the blocks of those without."""
    state, slots = make_state(), Slots(SLOTS, WIDTH)
    a, b = (make_sequence([1] * 6, id=i).spec for i in range(2))
    tables = ((0, 0, (4, 5)), (1, 0, (GONE, 2)), (2, 0, (GONE, 0)))
    chunks = (
        Chunk(0, 0, array("I", [1]), 0, ((0, 0, (7,)), (1, 0, (8,)), (2, 0, (9,)))),
        Chunk(1, 5, array("I", [1]), 1, tables),
    )
    state.apply(slots.update(PackedStep(chunks=chunks, started=(a, b))), Staging(device))
    assert state.block_tables[:, 0, 0].tolist() == [7, 8, 9]
    assert state.block_tables[:, 1, :2].tolist() == [[4, 5], [GONE, 2], [GONE, 0]]
    rows = (DecodeRow(1, 6, 2, ((0, 2, (6,)), (1, 2, (3,)), (2, 2, (3,)))),)
    # Group 1 copies its block 2 to 3: a change of group 2 with the same number is a rollover all the same.
    write = slots.update(DecodeWindow(rows=rows, steps=2, copies=((1, 2, 3),)))
    assert list(write.cells.values()).count(3) == 1 and sorted(write.rollovers.values()) == [3, 6]
    state.apply(write, Staging(device))
    assert state.block_tables[:, slots.slot_of[1]].tolist() == [[4, 5, 6], [GONE, 2, 3], [GONE, 0, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_one_write_equals_cell_by_cell(make_state, device, seed):
    rng = random.Random(seed)
    states, expected, staging = (make_state(), make_state()), UNTOUCHED, Staging(device)
    for _ in range(6):
        rows = rng.sample(range(SLOTS), 4)
        moves = list(zip(rows[:2], rows[2:], strict=True))[: rng.randrange(3)]
        chosen = rng.sample(range(len(UNTOUCHED)), rng.choice([0, 1, 5, len(UNTOUCHED)]))
        values = {index: rng.randrange(-(2**31), 2**31) for index in chosen}
        blocks = {index: values.pop(index) for index in chosen[::3]}
        indices = [index for index in values if index % 3 == 0]
        prompts = np.array(indices, np.int64), np.array([values.pop(index) for index in indices], np.int32)
        write = StateWrite(moves, values, blocks, [prompts] * bool(indices))
        expected = apply_to_list(expected, write)
        for state, apply in zip(states, WAYS, strict=True):
            apply(state, write, staging)
            assert contents(state) == expected


def test_sampling_parameters_of_a_request(make_state, device):
    """From a request to what the kernel is given: reals bit for bit in fp32, the seed in two words, by slot."""
    kinds = [
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 2**63 + 2**31 + 1},
        {},
        {"temperature": 1e-30, "top_k": 2**31 - 1, "seed": 2**32 - 1},
    ]
    specs = [make_sequence([1] * (i + 1), id=i, **kind).spec for i, kind in enumerate(kinds)]
    state = make_state()
    chunks = tuple(Chunk(spec.id, 0, array("I", spec.prompt_token_ids), 1) for spec in specs)
    state.apply(Slots(SLOTS, WIDTH).update(PackedStep(chunks=chunks, started=tuple(specs))), Staging(device))
    for columns in (slice(3), torch.tensor([2, 0], device=device)):
        chosen = [0, 1, 2] if isinstance(columns, slice) else [2, 0]
        params = [specs[i].sampling for i in chosen]
        given = {name: values.cpu().numpy() for name, values in state.sampling(columns).items()}
        assert set(given) == {"temperature", "top_k", "top_p", "min_p", "seeds", "positions"}
        for name in ("temperature", "top_p", "min_p"):
            assert given[name].tolist() == [np.float32(getattr(p, name)) for p in params]
        assert given["top_k"].tolist() == [p.top_k for p in params]
        assert given["positions"].tolist() == [i + 1 for i in chosen]
        words = given["seeds"].astype(np.int64) & 0xFFFFFFFF
        assert [int(low) + (int(high) << 32) for low, high in words] == [p.seed or 0 for p in params]
