"""Which worker gets which rows: credits, neighbours, deaths."""

import random
import sys

import pytest

from rosebatch.io.parse import Record
from rosebatch.job.workers.chunk import in_chunks
from rosebatch.job.workers.dispatch import Dispatcher

MUCH = 1 << 40


def records(count, size=10):
    return [Record(number, f"line {number + 1}", b"", size) for number in range(count)]


def numbers(rows):
    return [row.number for row in rows]


def take(found, worker):
    """The rows that a worker gets."""
    return [row for chunk in found.take(worker) for row in chunk.records]


def dispatcher(workers=2, slots=100, rows=0, max_bytes=MUCH, ended=True, length_of=lambda record: 0):
    found = Dispatcher(workers, max_bytes, length_of)
    for number in range(workers):
        found.join(number, slots)
    found.offer(in_chunks(records(rows)))
    if ended:
        found.end()
    return found


def finish(found, worker, rows):
    for row in rows:
        found.answered(worker, [row.number])


def test_rows_go_out_once_each_in_order():
    """A row served twice would have two results; one left out, none."""
    found, got = dispatcher(rows=1000), []
    while not found.finished:
        for worker in range(2):
            rows = take(found, worker)
            got += numbers(rows)
            finish(found, worker, rows)
    assert got == list(range(1000))


def test_credit_is_twice_the_seats():
    """With less, seats would be empty between two rows; with more, rows would wait where nobody computes them."""
    found = dispatcher(rows=1000)
    assert len(take(found, 0)) == 200
    assert take(found, 0) == []


def test_rows_travel_in_chunks():
    """Neighbours often begin alike: one by one they would go to different workers, and their beginning to each."""
    found = dispatcher(rows=1000, slots=128)
    first = take(found, 0)
    finish(found, 0, first[:63])
    assert take(found, 0) == []
    finish(found, 0, first[63:64])
    assert numbers(take(found, 0)) == list(range(256, 320))


@pytest.mark.parametrize("slots", [1, 2, 5, 16, 33, 64, 100])
def test_few_seats_are_never_empty(slots):
    """A worker with fewer seats than a chunk has rows had to finish all of them before it got others."""
    found = dispatcher(rows=1000, slots=slots)
    held = take(found, 0)
    for _ in range(300):
        finish(found, 0, [held.pop(0)])
        held += take(found, 0)
        assert len(held) >= min(2 * slots, 1.5 * slots + 1) - 1


def test_credits_shrink_towards_the_end():
    """Each worker has its share of what is left: none has rows waiting that another could begin."""
    found = dispatcher(workers=4, rows=120)
    assert [len(take(found, worker)) for worker in range(4)] == [30, 30, 30, 30]


def test_a_worker_that_still_loads_has_its_share():
    """The first to be ready would take all of a short input, and the others would wait for nothing."""
    found = Dispatcher(2, MUCH)
    found.offer(in_chunks(records(100)))
    found.end()
    found.join(0, 100)
    assert len(take(found, 0)) == 50
    found.lose()
    assert len(take(found, 0)) == 50


def test_credits_do_not_shrink_while_more_rows_may_come():
    """What is left is not known then: a slow reader would starve the workers."""
    found = dispatcher(workers=2, rows=100, ended=False)
    assert len(take(found, 0)) == 100


def test_reading_ahead_is_bounded():
    """An input of any length must not be read into memory."""
    found = dispatcher(workers=2, slots=100, ended=False)
    assert found.wants
    found.offer(in_chunks(records(3200)))
    assert not found.wants
    found = dispatcher(workers=2, slots=100, ended=False)
    found.offer(in_chunks(records(1, size=1 << 30)))
    assert not found.wants


def test_bytes_of_a_worker_are_bounded():
    """Hundreds of rows of a megabyte would fill the memory of a process; a row above the bound runs alone."""
    found = Dispatcher(1, 25)
    found.join(0, 100)
    found.offer(in_chunks([*records(3), Record(3, "line 4", b"", 99)]))
    found.end()
    rows = take(found, 0)
    assert numbers(rows) == [0, 1]
    assert take(found, 0) == []
    finish(found, 0, rows)
    rows = take(found, 0)
    assert numbers(rows) == [2]
    finish(found, 0, rows)
    assert numbers(take(found, 0)) == [3]


def test_chunks_stay_whole_before_the_end():
    """To divide a packed chunk, the parent has to look inside; with many workers it has no time for that."""
    found = dispatcher(slots=100, rows=1000, ended=False)
    assert [len(chunk) for chunk in found.take(0)] == [64, 64, 64]
    found.end()
    assert [len(chunk) for chunk in found.take(1)] == [64, 64, 64, 8]


def test_a_call_takes_as_long_with_many_workers():
    """Sums over all workers at each call took most of the parent's time at a thousand of them."""

    def calls(workers):
        found, count = dispatcher(workers=workers, rows=200, slots=20), 0

        def profile(frame, event, argument):
            nonlocal count
            count += 1

        sys.setprofile(profile)
        found.offer(in_chunks(records(1)))
        finish(found, 0, take(found, 0)[:1])
        _ = found.wants, found.busy, found.finished
        sys.setprofile(None)
        return count

    assert calls(1000) <= calls(2)


def test_the_last_rows_are_dealt_longest_first():
    """A long row begun last runs alone; and one worker with all of the long ones works alone."""
    lengths = [number % 3 for number in range(120)]
    found = dispatcher(workers=4, rows=120, length_of=lambda record: lengths[record.number])
    for worker in range(4):
        rows = numbers(take(found, worker))
        assert [lengths[row] for row in rows] == [2] * 10 + [1] * 10 + [0] * 10


def test_a_worker_with_room_takes_from_the_fullest_hand():
    """From an empty one it would get nothing, though rows are left."""
    found = dispatcher(workers=2, slots=10, rows=60, length_of=lambda record: -record.number)
    first = take(found, 0)
    assert numbers(first) == list(range(0, 40, 2))
    finish(found, 0, first[:15])
    assert numbers(take(found, 0)) == list(range(1, 31, 2))
    assert numbers(take(found, 1)) == [31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 40, 42, 44, 46, 48]


def test_lengths_are_looked_at_in_the_end_only():
    """The parent has no time to parse every row of a long input."""
    asked = []
    found = dispatcher(rows=1000, ended=False, length_of=lambda record: asked.append(record.number) or 0)
    held = take(found, 0)
    assert not asked
    finish(found, 0, held)
    found.end()
    take(found, 0)
    assert len(asked) == len(set(asked)) == 1000 - len(held)


def test_bytes_of_a_worker_are_bounded_in_the_end_too():
    """Hands are dealt by length, whatever the size of their rows."""
    found = dispatcher(workers=1, max_bytes=25, rows=5, length_of=lambda record: -record.number)
    rows = take(found, 0)
    assert numbers(rows) == [0, 1]
    finish(found, 0, rows[:1])
    assert numbers(take(found, 0)) == [2]


def test_rows_of_a_dead_worker_are_served_again():
    """They must not be lost, and those that it had answered must not come twice."""
    found = dispatcher(rows=20)
    rows, others = take(found, 0), take(found, 1)
    finish(found, 0, rows[:4])
    assert found.died(0) == []
    found.join(0, 100)
    finish(found, 1, others)
    again = []
    while not found.finished:
        rows = take(found, 0)
        again += numbers(rows)
        finish(found, 0, rows)
    assert again == list(range(4, 10))


def test_suspects_run_alone():
    """Beside others, a row that kills would bring these under suspicion too."""
    found = dispatcher(workers=1, rows=100, slots=40)
    take(found, 0)
    found.died(0)
    found.join(0, 40)
    first = take(found, 0)
    # As many as run at a time: most deaths have other causes, and smaller groups would leave seats empty.
    assert numbers(first) == list(range(40))
    assert take(found, 0) == []
    found.died(0)
    found.join(0, 40)
    # The other group of the first death, then what is left of this one in smaller groups.
    groups = []
    while rows := take(found, 0):
        groups.append(len(rows))
        assert take(found, 0) == []
        finish(found, 0, rows)
    assert groups == [40, *[5] * 8, 20]


@pytest.mark.parametrize("deadly", [{0}, {70}, {99}, {3, 4, 90}])
@pytest.mark.parametrize("workers", [1, 3])
def test_only_rows_that_kill_by_themselves_fail(deadly, workers):
    """Rows beside them would become error rows though nothing is wrong with them."""
    found = dispatcher(workers=workers, slots=20, rows=100)
    answered, failed, deaths = [], [], 0
    while not found.finished:
        for worker in range(workers):
            rows = take(found, worker)
            if deadly.isdisjoint(numbers(rows)):
                answered += numbers(rows)
                finish(found, worker, rows)
            else:
                deaths += 1
                failed += numbers(found.died(worker))
                found.join(worker, 20)
    assert sorted(failed) == sorted(deadly)
    assert sorted(answered) == sorted(set(range(100)) - deadly)
    assert deaths <= 6 * len(deadly)


def test_one_death_proves_nothing():
    """The system may kill any worker; the row that it had alone just then became an error row."""
    found = dispatcher(workers=1, rows=1)
    for failed in ([], [], [], [0]):
        assert numbers(take(found, 0)) == [0]
        assert numbers(found.died(0)) == failed
        found.join(0, 20)
    assert found.finished


@pytest.mark.parametrize("classes", [1, 7])
@pytest.mark.parametrize("seed", range(20))
def test_random_deaths(seed, classes):
    """Whatever the order of events, each row is answered once."""
    chance = random.Random(seed)
    workers, total = chance.randint(1, 5), chance.randint(0, 400)
    found = Dispatcher(workers, MUCH, lambda record: record.number * 13 % classes)
    rows, held = iter(records(total)), {}
    alive, answered, failed = set(), [], []
    for _ in range(100_000):
        if found.finished:
            break
        if chance.random() < 0.5:
            more = [row for row in (next(rows, None) for _ in range(chance.randint(1, 30))) if row]
            chunks = in_chunks(more) if chance.random() < 0.5 else [chunk.pack() for chunk in in_chunks(more)]
            found.offer(chunks) if more else found.end()
        worker = chance.randrange(workers)
        if worker not in alive:
            found.join(worker, chance.randint(1, 20))
            alive.add(worker)
            held[worker] = []
        held[worker] += take(found, worker)
        if chance.random() < 0.05:
            failed += numbers(found.died(worker))
            alive.discard(worker)
            continue
        for row in chance.sample(held[worker], chance.randint(0, len(held[worker]))):
            found.answered(worker, [row.number])
            held[worker].remove(row)
            answered.append(row.number)
    assert found.finished
    assert sorted(answered + failed) == list(range(total))
