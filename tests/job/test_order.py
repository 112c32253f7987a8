"""The order in which rows reach the engine, and when they are read."""

import json
from io import BytesIO
from itertools import chain, count, groupby, islice, pairwise, repeat
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import RowError
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds, packed
from rosebatch.io.output import FileOutput, StreamOutput
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job import order
from rosebatch.job.order import in_good_order
from rosebatch.job.prepared import Prepared, PreparedPrompt
from rosebatch.job.service import Work
from tests.helpers.json_lines import write_lines


def row(index, prompt, limit=512, lora=None):
    sampling, where = SamplingParams(max_tokens=limit), f"line {index + 1}"
    given = Row(index=index, where=where, metadata={}, sampling=sampling, prompt_token_ids=prompt, lora=lora)
    return Prepared(given, (PreparedPrompt(packed(prompt), sampling),))


def test_rows_that_begin_alike_follow_each_other_within_a_window():
    """Else the cache loses a shared beginning before its next use; failed rows come first."""
    failed = FailedRow(index=3, where="line 4", metadata={}, error=RowError("empty_prompt", "nothing"))
    rows = [row(0, (5, 6)), row(1, (2, 9)), row(2, (5,)), failed, *(row(4 + i, (2 - i % 2,)) for i in range(5))]
    found = [item.index if item is failed else item.row.index for item in in_good_order(iter(rows), 4)]
    assert found == [3, 1, 2, 0, 5, 7, 4, 6, 8]


def test_rows_of_an_adapter_follow_each_other():
    """Equal prompts of two adapters share nothing."""
    rows = [row(i, (5 + i // 2,), lora=(None, "b", "a")[i % 3]) for i in range(6)]
    assert [item.row.index for item in in_good_order(iter(rows), 6)] == [0, 3, 2, 5, 1, 4]


def test_adapters_that_do_not_fit_change_seldom():
    """At the end the longest rows came first, whatever their adapter; and each window began with the first adapter."""
    adapters = [(None, "b", "a", "c")[i % 4] for i in range(40)]
    rows = [row(i, (9,), limit=500 - 12 * i, lora=adapter) for i, adapter in enumerate(adapters)]
    items = in_good_order(iter(rows), 8, ahead=24, by_adapter=True)
    # The third window holds all that is left.
    assert [lora for lora, _ in groupby(item.row.lora for item in items)] == 2 * [None, "a", "b", "c"] + [
        None,
        "a",
        "b",
    ]


def test_rows_are_sorted_by_the_token_ids_that_they_have():
    """30 million ids had a copy of 120 MB, to be sorted before the engine refused them."""
    token_ids = TokenIds.of([5, 6, 9])
    rows = [row(0, token_ids), row(1, TokenIds.of([5, 7, 8, 9]))]
    behind = order._not_compared(rows)
    assert order._place(rows[0], shares=True, longest_first=False, behind=behind)[-1] is token_ids


def test_rows_that_all_begin_alike_are_sorted_by_the_rest():
    """The beginning is left out of what is compared: a shorter prompt, and longer rests, keep their places."""
    front, rests = [7] * 40, ([3], [], [2, 9], [2], [1] * 90, [4, 0], [2, 8], [1] * 89)
    rows = [row(number, TokenIds.of([*front, *rest])) for number, rest in enumerate(rests)]
    failed = FailedRow(index=8, where="line 9", metadata={}, error=RowError("empty_prompt", "nothing"))
    found = [item.row.index for item in in_good_order(iter([*rows, failed]), 9) if item is not failed]
    assert found == sorted(range(8), key=rests.__getitem__)


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


def test_a_source_that_expects_no_row_is_not_asked_for_each_that_is_left():
    """The last 512 rows of each call took the host 4 µs more each: none could come while they were handed out."""
    asked = count()
    source = chain((row(i, (i,)) for i in range(9)), (None for _ in asked))
    items = in_good_order(source, 4, expects_rows=lambda: False)
    assert [item.row.index for item in islice(items, 9)] == list(range(9))
    assert next(asked) == 1
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


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_document_far_apart_is_computed_once(job, tmp_path, form):
    """With 50 questions for each of 2,000 documents in random order, nearly all of the prompts were computed again."""
    rows = [{"prompt": f"{i % 30:03d}" * 50 + f" {i}", "max_tokens": 2} for i in range(600)]
    source, target = tmp_path / f"in.{form}", tmp_path / "out.jsonl"
    write_lines(source, rows) if form == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), source)
    # The cache has room for five documents beside the four rows that run.
    _, engine = job.run_file(source, target, limits={"seqs": 4, "blocks": 400, "budget": 400}, quiet=True)
    assert [json.loads(line)["index"] for line in target.read_text().splitlines()] == list(range(600))
    assert engine.stats.computed_tokens < 30 * 150 + 600 * 10


def test_rows_of_a_stream_keep_the_order_of_the_input(tmp_path):
    """Results wait for earlier rows: thousands of them, before the first is written."""
    reader = PromptReader(str(write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])), {})
    for output, sorts_within in ((StreamOutput(BytesIO()), 0), (FileOutput(Mock(), Mock()), 1 << 28)):
        Work(reader, output, Mock(), Mock(), Mock(), Mock()).sort_rows(1 << 30)
        assert reader.sorts_within == sorts_within
