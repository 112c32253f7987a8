"""Rows of the whole input that begin alike follow each other, and are the rows that they are in input order."""

import gzip
import json
import random
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.io import read_again, whole_order
from rosebatch.io.beginnings import Beginnings
from rosebatch.io.columns import Columns
from rosebatch.io.parse import Record
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow
from rosebatch.io.table_values import BadValues, TextValues
from rosebatch.io.whole_order import in_whole_order
from tests.helpers.json_lines import write_lines

RNG = random.Random(0)
DOCUMENTS = ["".join(RNG.choices("abcdefgh ", k=900)) for _ in range(7)]
# Each document comes again after all others.
ROWS = [{"id": f"r{i}", "prompt": f"{DOCUMENTS[i % 7]} {i}", "max_tokens": 3} for i in range(63)]
BY_DOCUMENT = [i + 7 * j for i in range(7) for j in range(9)]


def ordered(texts, size=3):
    """The numbers of rows with these prompts."""
    records = [Record(number, "", text, len(text)) for number, text in enumerate(texts)]
    groups = (records[start : start + size] for start in range(0, len(records), size))
    return [row.number for group in in_whole_order(groups, bytes, list, 1 << 30) for row in group]


def numbers(reader):
    return [record.number for group in reader.records() for record in group]


def test_rows_that_begin_alike_follow_the_first_of_them():
    """With windows of 3,072 rows, each of 2,000 documents was computed 25 times for its 50 questions."""
    a, b, c = (bytes(64 * [letter]) for letter in b"abc")
    assert ordered([a, b, c, a + b"1", b + b"1", a + b"2", c]) == [0, 3, 5, 1, 4, 2, 6]
    # Inside of them the same, at every depth.
    a, b, c = 1000 * b"a", 600 * b"b", 600 * b"c"
    assert ordered([a + b + b"1", a + c + b"1", a + b + b"2", b, a + c + b"2", a[:300]]) == [0, 2, 1, 4, 5, 3]


def test_the_first_rows_do_not_wait_for_gigabytes(monkeypatch):
    """Rows that are read again count little, so 13 GB of them were read while the GPU had nothing to do."""
    monkeypatch.setattr(whole_order, "_FIRST_BYTES", 1000)
    asked = []

    def groups():
        for number in range(100):
            asked.append(number)
            yield [Record(number, "", bytes(100), 100, None, 100 * number)]

    first = next(in_whole_order(groups(), bytes, list, 1 << 30))
    assert [row.number for row in first] == list(range(10))
    assert len(asked) == 10


@pytest.mark.parametrize("size", [10, 300, 700, 1500, 5000])
def test_large_rows_are_held_in_bounded_numbers(size):
    """A window of 32 MB held two rows of 30 MB, for it was not full with one. None is lost, however large it is."""
    read = 0

    def groups():
        nonlocal read
        for number in range(40):
            read += 1
            yield [Record(number, "", bytes(size), size, None, None)]

    found = in_whole_order(groups(), bytes, list, 1000 + 3 * whole_order._ROW_BYTES)
    held, handed = [], 0
    for group in found:
        held.append(read - handed)
        handed += len(group)
    assert handed == read == 40
    assert max(held) * size <= 1000 + size


def test_rows_that_share_nothing_keep_their_order():
    """Where nothing is gained, nothing changes; so too where all rows share one beginning, and nothing else."""
    texts = [bytes(RNG.choices(range(256), k=RNG.randrange(200))) for _ in range(200)]
    texts = [text for text in texts if len(text) > 4]
    assert ordered(texts) == list(range(len(texts)))
    assert ordered([5000 * b"x" + text for text in texts]) == list(range(len(texts)))
    assert ordered([b"same"] * 9) == list(range(9))
    assert ordered([]) == []
    assert ordered([b""] * 2) == [0, 1]


@pytest.mark.parametrize("shared", [64, 100, 1000, 9000, 40_000])
def test_a_beginning_counts_up_to_a_quarter_less_than_its_length(shared):
    """Else rows would share a document and stay apart, because they share an instruction with all others."""
    assert all(after <= max(before + 64, before * 4 / 3 + 1) for before, after in pairwise(whole_order._DEPTHS))
    front, unique = shared * 4 // 3 * b"i", [bytes([i]) * shared for i in range(4)]
    order = ordered([front + unique[i % 4] + b"%d" % i for i in range(16)])
    assert [number % 4 for number in order] == [i for i in range(4) for _ in range(4)]


def test_held_rows_are_bounded(monkeypatch):
    """The whole file was in memory; and the reader of rows waited for whole windows."""
    monkeypatch.setattr(whole_order, "_FIRST_ROWS", 300)
    monkeypatch.setattr(whole_order, "_MAX_ROWS", 900)
    read = 0

    def groups(size):
        nonlocal read
        for start in range(0, 9000, 100):
            read += 100
            texts = ((number, b"%d" % (number % 250)) for number in range(start, start + 100))
            yield [Record(number, "", text + bytes(size), size) for number, text in texts]

    ahead, handed, found = [], 0, []
    for group in in_whole_order(groups(10), bytes, list, 1 << 30):
        ahead.append(read - handed)
        handed += len(group)
        found += [row.number for row in group]
    assert ahead[0] == 300
    assert 900 < max(ahead) <= 1800
    assert sorted(found) == list(range(9000))
    assert found != sorted(found)
    # Large rows fill the memory before.
    read = handed = 0
    for group in in_whole_order(groups(9600), bytes, list, 2_000_000):
        assert read - handed <= 300
        handed += len(group)
    assert handed == 9000


def test_a_large_row_is_held_once():
    """A row of 30 MB was packed and unpacked: for a moment it was there twice, and its time was two copies."""
    content = {"prompt": "x" * (1 << 20)}
    records = [Record(number, "", content, size) for number, size in ((0, 1 << 20), (1, 100))]
    (group,) = in_whole_order(iter([records]), lambda each: b"", list, 1 << 30)
    assert [row.content == content for row in group] == [True, True]
    assert [row.content is content for row in group] == [True, False]


def test_large_rows_are_read_again_a_few_at_a_time():
    """256 rows of 10 MB were read again at once."""
    groups = iter([[Record(number, "", b"same", 1 << 20, None, number) for number in range(99)]])
    sizes = [len(group) for group in in_whole_order(groups, bytes, list, 1 << 30)]
    assert (max(sizes), sum(sizes)) == (4, 99)


def write_jsonl(folder):
    lines = [json.dumps(row).encode() for row in ROWS]
    # Blank lines, other line ends, a byte order mark and blanks are none of a row's bytes.
    lines[0] = b"\xef\xbb\xbf" + lines[0] + b"\r\n\n"
    lines[20] = b"  " + lines[20] + b" \n\n"
    (folder / "in.jsonl").write_bytes(b"\n".join(lines))
    return folder / "in.jsonl"


def write_gzip(folder):
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(write_jsonl(folder).read_bytes()))
    return folder / "in.jsonl.gz"


def write_json(folder):
    (folder / "in.json").write_text(json.dumps(ROWS))
    return folder / "in.json"


def write_parquet(folder):
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "in.parquet", row_group_size=10)
    return folder / "in.parquet"


def write_csv(folder):
    lines = (f"{row['id']},{row['prompt']},3\n" for row in ROWS)
    (folder / "in.csv").write_text("id,prompt,max_tokens\n" + "".join(lines))
    return folder / "in.csv"


def write_keys(folder):
    """Files in folders whose names are fields, of lines and of other rows."""
    for part in range(3):
        (folder / f"k={part}").mkdir()
        path = write_lines(folder / f"k={part}" / "in.jsonl", ROWS[part * 21 : part * 21 + 21])
        if part == 1:
            path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    return folder


def write_batch(folder):
    body = [{"messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 3} for row in ROWS]
    lines = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body[i]} for i in range(63)]
    return write_lines(folder / "in.jsonl", lines)


@pytest.mark.parametrize(
    "write", [write_jsonl, write_gzip, write_json, write_parquet, write_csv, write_keys, write_batch]
)
def test_rows_of_all_kinds_of_files(tmp_path, write):
    """They are read again, or held: the rows, their places and carried fields must be those of the input order."""
    reader = PromptReader(str(write(tmp_path)), {})
    expected = {row.index: row for row in reader}
    reader.sorts_within = 1 << 20
    rows = list(reader.rows(lambda: None))
    assert [row.index for row in rows] == BY_DOCUMENT == numbers(reader)
    assert {row.index: row for row in rows} == expected
    assert not any(isinstance(row, FailedRow) for row in rows)
    assert [row.index for row in reader] == list(range(63)), "a plain look at the rows is in input order"


def test_a_repeated_id_is_that_of_a_later_row(tmp_path):
    """The first row of an id in the input is good, whichever row is served first."""
    rows = [{**row, "id": "same" if i in (1, 7) else i} for i, row in enumerate(ROWS)]
    reader = PromptReader(str(write_lines(tmp_path / "in.jsonl", rows)), {})
    reader.sorts_within = 1 << 20
    served = list(reader.rows(lambda: None))
    assert [row.index for row in served].index(7) < [row.index for row in served].index(1)
    assert [row.index for row in served if isinstance(row, FailedRow)] == [7]


def test_rows_behind_a_line_that_is_read_past(tmp_path):
    """Nobody counts its bytes, so the places of later lines are unknown."""
    path = tmp_path / "in.jsonl"
    write_lines(path, [*ROWS[:10], {"prompt": "x" * 5000}, *ROWS[10:]])
    reader = PromptReader(str(path), {}, max_row_bytes=2000)
    expected = {row.index: repr(row) for row in reader}
    reader.sorts_within = 1 << 20
    rows = list(reader.rows(lambda: None))
    assert [row.index for row in rows if isinstance(row, FailedRow)] == [10]
    assert {row.index: repr(row) for row in rows} == expected


INTERVALS = pa.array([pa.MonthDayNano([1, 2, 3])], pa.month_day_nano_interval())
ONE = pa.array([0], pa.int8())
LISTS = pa.ListArray.from_arrays([0, 1], INTERVALS)
MAPS = pa.MapArray.from_arrays([0, 1], ["k"], INTERVALS)
OPAQUE = pa.ExtensionArray.from_storage(pa.opaque(INTERVALS.type, "name", "vendor"), INTERVALS)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (INTERVALS, (1, 2, 3)),
        (pa.ListArray.from_arrays([0, 1], INTERVALS), [(1, 2, 3)]),
        (pa.StructArray.from_arrays([INTERVALS], ["a"]), {"a": (1, 2, 3)}),
        (pa.UnionArray.from_sparse(ONE, [INTERVALS]), (1, 2, 3)),
        (pa.UnionArray.from_sparse(ONE, [pa.array(["a"])]), "a"),
        (pa.UnionArray.from_sparse(ONE, [LISTS]), [(1, 2, 3)]),
        (pa.UnionArray.from_sparse(ONE, [pa.StructArray.from_arrays([LISTS], ["a"])]), {"a": [(1, 2, 3)]}),
        (pa.UnionArray.from_sparse(ONE, [MAPS]), {"k": (1, 2, 3)}),
        (pa.UnionArray.from_sparse(ONE, [pa.UnionArray.from_sparse(ONE, [OPAQUE])]), (1, 2, 3)),
        (OPAQUE, (1, 2, 3)),
    ],
)
def test_values_of_any_type_wait(tmp_path, column, value):
    """PyArrow's intervals cannot be pickled, and a union of one type was taken for a list: both were tracebacks."""
    table = pa.table({"prompt": ["a"], "carried": column})
    with pa.ipc.new_file(tmp_path / "in.arrow", table.schema) as file:
        file.write(table)
    reader = PromptReader(str(tmp_path / "in.arrow"), {})
    reader.sorts_within = 1 << 20
    assert [row.metadata["carried"] for row in reader.rows(lambda: None)] == [value]


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    """A folder of thousands of files would need as many descriptors. Rows of others are held."""
    monkeypatch.setattr(read_again, "_MAX_FILES", 2)
    for part in range(7):
        write_lines(tmp_path / f"{part}.jsonl", ROWS[part * 9 : part * 9 + 9])
    reader = PromptReader(str(tmp_path), {})
    reader.sorts_within = 1 << 20
    records = [record for group in reader.records() for record in group]
    assert [record.number for record in records] == BY_DOCUMENT
    assert [json.loads(record.content) for record in records] == [ROWS[i] for i in BY_DOCUMENT]


@pytest.mark.parametrize(
    ("columns", "content"),
    [
        (Columns(), b'{"id":1,"prompt":"Hello"}'),
        (Columns(), {"id": 2, "prompt": "Hello", "messages": None}),
        (Columns(prompt="q"), b'{"prompt":"other","q":"Hello"}'),
        (Columns(prompt="q"), TextValues({"q": "Hello", "prompt": "other"})),
        (Columns(template="He{x}"), b'{"x":"llo"}'),
        (Columns(template="He{x}"), {"x": "llo"}),
        (Columns(), BadValues({"prompt": "Hello"}, None)),
    ],
)
def test_a_prompt_is_found_before_its_row_is_parsed(columns, content):
    """An id in front of it would make all beginnings differ."""
    assert Beginnings(False, columns)(content).strip(b'"') == b"Hello"


def test_a_chat_begins_with_its_tools():
    """Chat templates have them first, and requests of a batch have them in their body."""
    line = b'{"messages":[{"role":"user"}],"tools":[1],"seed":2}'
    assert Beginnings(False, Columns())(line) == b'[1][{"role":"user"}]'
    assert Beginnings(True, Columns())(b'{"custom_id":"a","body":%s}' % line) == b'[1][{"role":"user"}]'
    assert Beginnings(False, Columns())({"messages": [{"role": "user"}]}) == b'[{"role":"user"}]'


def test_rows_of_an_adapter_begin_with_it():
    """What one computes of a beginning is no other's: their rows took turns."""
    assert Beginnings(False, Columns())(b'{"prompt":"a","lora":"sql","model":"m"}') == b'"sql"'.ljust(64) + b'"a"'
    assert (
        Beginnings(True, Columns())(b'{"custom_id":"a","body":{"prompt":"a","model":"sql"}}')
        == b'"sql"'.ljust(64) + b'"a"'
    )
    assert Beginnings(False, Columns())({"prompt": "a", "lora": "sql"}) == b"sql".ljust(64) + b"a"


@pytest.mark.parametrize("name", ["{}", "an adapter whose name is longer than what is compared at once, number {}"])
def test_rows_of_an_adapter_follow_each_other(name):
    """With fewer slots than adapters, each was brought again for every few rows."""
    lines = [{"prompt": "ab"[i % 2] * 99 + str(i), "lora": name.format("xyz"[i % 3])} for i in range(12)]
    records = [Record(i, "", json.dumps(line).encode(), 200) for i, line in enumerate(lines)]
    groups = in_whole_order(iter([records]), Beginnings(False, Columns()), list, 1 << 30)
    found = [row.number for group in groups for row in group]
    assert [number % 3 for number in found] == sorted(number % 3 for number in found)
    assert sorted(found) == list(range(12))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"prompt":"\xff"', b'{"body":[]}', b"[" * 2000, {}, {"prompt": None}]
)
def test_a_row_without_a_prompt_has_no_beginning(content):
    """It fails by itself, later."""
    for columns in (Columns(), Columns(prompt="q"), Columns(template="{q}")):
        assert [Beginnings(is_batch, columns)(content) for is_batch in (False, True)] == [b"", b""]
