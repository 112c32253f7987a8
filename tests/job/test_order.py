"""The order in which rows reach the engine, and when they are read."""

from itertools import chain, count, islice, pairwise, repeat

from rosebatch.core.errors import RowError
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.order import in_good_order
from rosebatch.job.prepared import Prepared, PreparedPrompt


def row(index, prompt, limit=512):
    sampling = SamplingParams(max_tokens=limit)
    given = Row(index=index, where=f"line {index + 1}", metadata={}, sampling=sampling, prompt_token_ids=prompt)
    return Prepared(given, (PreparedPrompt(prompt, sampling),))


def test_rows_that_begin_alike_follow_each_other_within_a_window():
    """Else the cache loses a shared beginning before its next use; failed rows come first."""
    failed = FailedRow(index=3, where="line 4", metadata={}, error=RowError("empty_prompt", "nothing"))
    rows = [row(0, (5, 6)), row(1, (2, 9)), row(2, (5,)), failed, *(row(4 + i, (2 - i % 2,)) for i in range(5))]
    order = [item.index if item is failed else item.row.index for item in in_good_order(iter(rows), 4)]
    assert order == [3, 1, 2, 0, 5, 7, 4, 6, 8]


def test_a_window_is_read_while_the_one_before_it_is_handed_out():
    """Reading 512 rows at once took longer than the launched steps, and the device waited."""
    numbers, read = count(), []

    def rows():
        for number in numbers:
            read.append(number)
            yield row(number, (number % 7,))

    handed_out = in_good_order(rows(), 8)
    behind = []
    for _ in range(40):
        next(handed_out)
        behind.append(len(read))
    assert behind[0] == 8
    assert all(later - earlier == 1 for earlier, later in pairwise(behind))


def test_a_window_does_not_wait_for_rows_that_may_not_come():
    """Held rows would stay unserved until others come, and finished rows would wait with them."""
    items = in_good_order(iter([row(0, (5, 6)), row(1, (5, 5)), None, None, None, None, row(2, (1,))]), 4)
    assert [item and item.row.index for item in items] == [1, 0, None, None, 2]


def test_the_last_rows_go_by_their_length():
    """A long row begun last ran alone: of 1,500 rows of mixed lengths that cost 9 % of the time."""
    lengths = [9, 1, 500, 8, 1, 7, 64, 2, 70, 300]
    items = in_good_order((row(i, (i,), limit) for i, limit in enumerate(lengths)), 4)
    # Three were left when the end was seen.
    assert [lengths[item.row.index] for item in items] == [9, 1, 500, 8, 1, 7, 64, 300, 70, 2]


def test_a_source_that_expects_no_row_is_like_one_that_has_ended():
    """Calls of other threads may join at any moment: without this, no call's last rows would be sorted."""
    lengths = [9, 1, 500, 8, 1, 7, 64, 2, 70, 300]
    rows = [row(i, (i,), limit) for i, limit in enumerate(lengths)]
    ended = [item.row.index for item in in_good_order(iter(rows), 4)]
    items = in_good_order(chain(rows, repeat(None)), 4, expects_rows=lambda: False)
    assert [item.row.index for item in islice(items, len(rows))] == ended
    assert next(items) is None


def test_a_long_row_at_the_end_begins_early(job):
    """The same where it counts: in steps of the engine."""
    lines = [{"prompt_token_ids": [1], "max_tokens": 40 if i == 13 else 10, "ignore_eos": True} for i in range(14)]
    _, _, engine = job.run(lines, seqs=4, blocks=200)
    assert engine.stats.decode_steps < 60


def test_without_a_shared_beginning_only_the_end_is_sorted():
    """Models without a prefix cache served a long last row alone: their rows were not sorted at all."""
    items = in_good_order((row(i, (9 - i,), limit) for i, limit in enumerate([9, 1, 8, 2, 3, 70])), 3, shares=False)
    assert [item.row.index for item in items] == [0, 1, 2, 3, 5, 4]
