"""Groups of rows that begin alike: exact cases, and random runs in which every row must find each key once."""

import random

import numpy as np
import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import DecodeWindow
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.staging import Staging
from rosebatch.engine.triton_runner import prefix_groups
from rosebatch.engine.triton_runner.prefix_groups import Group, PrefixGroupState, divide, find_groups
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch_kernels.common.shared_keys import MAX_PARTS, SIZES, Pieces, items_wanted
from tests.engine.test_slots_random import ListDevice

CPU = torch.device("cpu")


def tables(*rows):
    """Block tables of 40 blocks: each row's are its own after the prefix that it is given."""
    made = np.arange(len(rows) * 40, dtype=np.int32).reshape(len(rows), 40) + 1000
    for row, prefix in enumerate(rows):
        made[row, : len(prefix)] = prefix
    return made


def found(made, positions, block_size=128):
    groups = find_groups(made, np.array(positions), block_size)
    return [(sorted(group.rows.tolist()), group.first, group.end) for group in groups]


def test_rows_that_begin_alike():
    """From 512 keys and 16 rows on; rows need not be neighbours."""
    four, three = range(4), range(3)
    mixed = [four if row % 2 else () for row in range(32)]
    assert found(tables(*mixed), [600] * 32) == [(list(range(1, 32, 2)), 0, 512)]
    for prefixes, position in (mixed[:31], 600), ([three] * 32, 600), ([four] * 32, 511), ([four] * 15, 600):
        assert found(tables(*prefixes), [position] * len(prefixes)) == []


def test_only_whole_blocks_in_front_of_a_position():
    """Tables of forks may have blocks in common that are not full yet."""
    alike = [range(10)] * 16
    assert found(tables(*alike), [1279] + [1400] * 15) == [(list(range(16)), 0, 9 * 128)]
    # A row that is shorter than what is worth it leaves the others a group.
    assert found(tables(*alike, range(10)), [100] + [1400] * 16) == [(list(range(1, 17)), 0, 1280)]


def test_groups_inside_of_groups():
    """Examples behind a system prompt; two sets of them, and rows that have the system prompt alone."""
    system = list(range(5))
    one, other = [*system, *range(50, 54)], [*system, *range(60, 68)]
    first, *others = found(tables(*[one, other, system] * 16), [4000] * 48)
    assert first == (list(range(48)), 0, 640)
    assert sorted(others) == [(list(range(0, 48, 3)), 640, 1152), (list(range(1, 48, 3)), 640, 1664)]


def test_a_short_beginning_belongs_to_the_groups_inside():
    """Too short by itself, its keys are not lost for those who share more."""
    one, other = [1, *range(50, 53)], [1, *range(60, 64)]
    made = tables(*[one, other] * 16)
    assert sorted(found(made, [4000] * 32)) == [(list(range(0, 32, 2)), 0, 512), (list(range(1, 32, 2)), 0, 640)]


def items_of(groups, batch, wanted=8, limit=100):
    groups = [Group(np.array(rows), first, end) for rows, first, end in groups]
    return divide(groups, np.arange(batch), batch, wanted, limit)


def test_keys_are_divided_among_as_many_items_as_are_wanted():
    items, members, begins, counts = items_of([(range(70), 0, 1024)], 80, wanted=8)
    assert members.tolist() == list(range(70))
    ends = [0, 256, 512, 768, 1024]
    assert items.tolist() == [
        [place, count, ends[part], ends[part + 1], part] for place, count in ((0, 64), (64, 6)) for part in range(4)
    ]
    assert begins.tolist() == [1024] * 70 + [0] * 10 and counts.tolist() == [4] * 70 + [0] * 10


def test_parts_of_groups_inside_follow_those_outside():
    items, members, begins, counts = items_of([(range(32), 0, 256), (range(8, 24), 256, 640)], 32, wanted=2)
    assert items.tolist() == [[0, 32, 0, 256, 0], [32, 16, 256, 576, 1], [32, 16, 576, 640, 2]]
    assert members.tolist() == [*range(32), *range(8, 24)]
    assert (begins[0], begins[8], counts[0], counts[8]) == (256, 640, 1, 3)


def test_groups_without_room_are_left_out_with_those_inside():
    """Keys in front of a group inside would be read by nobody."""
    outside, inside, other = (range(16), 0, 256), (range(10), 256, 512), (range(20, 30), 0, 256)
    kept = items_of([outside, inside, other], 32, wanted=1, limit=2)
    assert kept.begins.tolist() == [512] * 10 + [256] * 6 + [0] * 16
    assert items_of([(range(70), 0, 256), (range(10), 256, 512)], 70, wanted=1, limit=1) is None


def test_nothing_to_divide():
    assert items_of([], 4) is None
    assert items_of([(range(70), 0, 256)], 70, limit=1) is None


def test_items_leave_a_part_of_a_gpu_to_the_decode_kernel():
    heads = (16, 8), (12, 12), (32, 8), (64, 1)
    assert [items_wanted(*each, sizes=SIZES.measured) for each in heads] == [12, 8, 6, 3]


class SharingDevice(ListDevice):
    """Looks up the keys that each row of a window attends to."""

    PIECES = None

    def __init__(self, *args):
        super().__init__(*args)
        self.slots = Slots(self.slots.num_slots, self.slots.width, keeps_tables=True)
        self.state = PrefixGroupState(self.slots, self.block_size, (2, 1), CPU, self.PIECES)
        self.staging = Staging(CPU)
        self.shared = 0

    def apply(self, write):
        if write.moves:
            self.state.forget()
        super().apply(write)

    def launch(self, plan, masks):
        if plan.started or plan.reset:
            self.state.forget()
        update = self.slots.update

        def updated(plan):
            write = update(plan)
            self.slots.update = update
            return write

        self.slots.update = updated
        result = super().launch(plan, masks)
        for sequence_id, (blocks, *_) in self.follower.blocks.items():
            assert self.slots.tables[self.slots.slot_of[sequence_id]][: len(blocks)].tolist() == blocks
        if isinstance(plan, DecodeWindow):
            self.check(plan)
        return result

    def check(self, plan):
        """Every key before a row's own ones is in one of its items; the row itself reads the others."""
        batch = self.slots.bucket(plan.sampled_ids)
        if not self.state.update(plan.rows, batch, self.staging):
            return
        keys = self.state.keys(batch)
        for row in plan.rows:
            slot = self.slots.slot_of[row.id]
            own = self.follower.blocks[row.id][0]
            parts, read = [], []
            for place, count, first, end, part in keys.items.tolist():
                members = keys.members[place : place + count].tolist()
                assert count <= prefix_groups.MEMBERS
                if slot not in members:
                    continue
                parts.append(part)
                table = self.slots.tables[members[0]]
                for key in range(first, end):
                    assert table[key // self.block_size] == own[key // self.block_size]
                read += range(first, end)
            self.check_parts(row, parts, int(keys.begins[slot]), int(keys.counts[slot]))
            assert sorted(read) == list(range(int(keys.begins[slot])))
            assert self.state.own_begins[slot] == keys.begins[slot]
            assert len(read) <= row.start
            self.shared += len(read)

    def check_parts(self, row, parts, begin, count):
        """Each has a place of its own."""
        assert sorted(parts) == list(range(count)) and len(parts) <= MAX_PARTS


class DeviceWithPieces(SharingDevice):
    """Rows get pieces of 8 and 16 keys in the middle of windows. The new key is cached or not."""

    PIECES = Pieces(4, 2)

    def check_parts(self, row, parts, begin, count):
        """Shared keys are whole pieces, as long as the row's own in all steps of the window."""
        if begin:
            (piece,) = {self.PIECES.of(row.start + keys) for keys in range(row.length + 1)}
            assert begin == count * piece
            assert {*parts} == {piece}


@pytest.fixture
def small_groups(monkeypatch):
    """Two rows are a group, two keys worth it, three rows an item, and there is room for few items."""
    for name, value in {"MIN_ROWS": 2, "MIN_KEYS": 2, "MEMBERS": 3, "_UNIT": 3}.items():
        monkeypatch.setattr(prefix_groups, name, value)
    monkeypatch.setattr(prefix_groups, "max_items", lambda batch: 2 + batch // 2)
    monkeypatch.setattr(prefix_groups, "items_wanted", lambda *_, **__: 6)


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("kind", [SharingDevice, DeviceWithPieces])
def test_every_key_is_read_once(kind):
    """With chunks, preemptions, forks, rows that move or end: a group is found before they do, and used after."""
    shared = 0
    for seed in range(60):
        rng = random.Random(seed)
        size, slots = rng.choice([1, 2, 4]), rng.choice([3, 16, 40])
        scheduler = Scheduler(
            BlockPool(rng.choice([24, 48, 400]) // size, size),
            max_num_seqs=slots,
            max_num_batched_tokens=rng.choice([4, 64]),
            policy=SeparateDecodes(rng.choice([1, 4, 8])),
        )
        device = kind(slots, 24, size)
        engine = Engine(
            scheduler,
            device,
            vocab_size=20,
            max_model_len=24,
            eos_token_ids=[device.END],
            async_depth=rng.randint(0, 1),
        )
        system = [7, 8, 9, 10, 11]
        prefixes = [(), system, [*system, 1, 2, 3], [*system, 1, 4, 4, 4], [*system, 1, 2, 3, 5, 5, 5]]
        for index in range(rng.randint(4, 50)):
            ids = (*rng.choice(prefixes), *(rng.randrange(20) for _ in range(rng.randint(1, 3))))
            limit, ignores, n = rng.randint(1, 10), rng.random() < 0.5, rng.choice([1, 1, 3])
            engine.add(Request(index, ids, SamplingParams(max_tokens=limit, ignore_eos=ignores, n=n)))
        while engine.has_unfinished:
            engine.step()
        shared += device.shared
    assert shared > 10000


def test_what_is_sent_is_not_sent_again():
    """Windows of the same rows, some of which end, change nothing on the device."""
    slots = Slots(16, 8, keeps_tables=True)
    slots.tables[:] = 5
    state = PrefixGroupState(slots, 128, (2, 1), CPU)
    calls = []
    state._send = lambda *_: calls.append(1)

    class Row:
        def __init__(self, number):
            self.id, self.start = number, 600

    rows = [Row(number) for number in range(16)]
    slots.slot_of = {row.id: row.id for row in rows}
    assert all(state.update(rows[some:], 16, None) for some in (0, 0, 3))
    assert len(calls) == 1
    state.forget()
    assert state.update(rows, 16, None) and len(calls) == 2
