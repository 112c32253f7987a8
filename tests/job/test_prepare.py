"""The order in which rows reach the engine, and when they are read."""

from itertools import count, pairwise

from rosebatch.errors import RowError
from rosebatch.io.rows import FailedRow, PromptRow
from rosebatch.job.prepare import PreparedPrompt, PreparedRow, by_prefix
from rosebatch.sampling_params import GREEDY


def row(index, prompt):
    given = PromptRow(index=index, where=f"line {index + 1}", metadata={}, sampling=GREEDY, prompt_token_ids=prompt)
    return PreparedRow(given, (PreparedPrompt(prompt, GREEDY),))


def test_rows_that_begin_alike_follow_each_other_within_a_window():
    """Else the cache loses a shared beginning before its next use; failed rows come first."""
    failed = FailedRow(index=3, where="line 4", metadata={}, error=RowError("empty_prompt", "nothing"))
    rows = [row(0, (5, 6)), row(1, (2, 9)), row(2, (5,)), failed, row(4, (2,)), row(5, (1,))]
    order = [item.index if item is failed else item.row.index for item in by_prefix(iter(rows), 4)]
    assert order == [3, 1, 2, 0, 5, 4]


def test_a_window_is_read_while_the_one_before_it_is_handed_out():
    """Reading 512 rows at once took longer than the launched steps, and the device waited."""
    numbers, read = count(), []

    def rows():
        for number in numbers:
            read.append(number)
            yield row(number, (number % 7,))

    handed_out = by_prefix(rows(), 8)
    behind = []
    for _ in range(40):
        next(handed_out)
        behind.append(len(read))
    assert behind[0] == 8
    assert all(later - earlier == 1 for earlier, later in pairwise(behind))


def test_a_window_does_not_wait_for_rows_that_may_not_come():
    """Held rows would stay unserved until others come, and finished rows would wait with them."""
    items = by_prefix(iter([row(0, (5, 6)), row(1, (5, 5)), None, None, None, None, row(2, (1,))]), 4)
    assert [item and item.row.index for item in items] == [1, 0, None, None, 2]
