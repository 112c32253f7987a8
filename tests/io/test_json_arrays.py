"""Files named .json: an array of rows, or lines after all."""

import gzip
import io
import itertools
import json
import random
import sys
import tracemalloc

import pytest

from rosebatch.core.errors import UserError
from rosebatch.io import json_texts
from rosebatch.io.json_texts import lines_or_items
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow

ROWS = [
    {"prompt": 'b]},{"\\', "x": [1, {"y": [[], {}]}], "\\": "\\\\"},
    {"prompt": "é\n\u2028", "n": 1.5e10, "deep": {"a": {"b": "]"}}},
    {"prompt": "", "t": '\\"'},
]


def items(content, limit=1 << 20):
    return list(filter(None, lines_or_items(io.BufferedReader(io.BytesIO(content)), "in.json", limit)))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("read_bytes", [1, 2, 3, 7, 64, 1 << 18])
def test_items(monkeypatch, indent, read_bytes):
    """A string or a mark may end at any byte of what is read at once."""
    monkeypatch.setattr(json_texts, "_READ_BYTES", read_bytes)
    text = "\ufeff \n" + json.dumps(ROWS, indent=indent, ensure_ascii=False) + " \n"
    assert list(map(json.loads, items(text.encode()))) == ROWS


def test_random_arrays(monkeypatch):
    """Each item comes back byte for byte."""
    draw = random.Random(5)
    for _ in range(300):
        monkeypatch.setattr(json_texts, "_READ_BYTES", draw.randint(1, 40))
        strings = ["".join(draw.choices('\\"[]{},:a é', k=draw.randint(0, 9))) for _ in range(4)]
        rows = [
            {strings[0]: strings[1], "x": draw.choice([[], {}, strings[2:], 1, None])}
            for _ in range(draw.randint(0, 4))
        ]
        texts = [json.dumps(row, ensure_ascii=draw.random() < 0.5).encode() for row in rows]
        assert items(b"[" + b" ,\n".join(texts) + b"]") == texts


@pytest.mark.parametrize("name", ["in.json", "in.json.gz", "stdin", "in.txt"])
def test_a_file(tmp_path, monkeypatch, name):
    """Broken items fail alone, with their place; JSON's comma at the end is taken."""
    content = b'[{"prompt": "a", "id": 1},\n{bad},\n{"prompt": "c"},\n5,]'
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    named = name.startswith("in.json")
    reader = PromptReader("-" if name == "stdin" else str(path), {}, "auto" if named else "json")
    rows = list(reader)
    assert [row.prompt for row in rows if not isinstance(row, FailedRow)] == ["a", "c"]
    failed = [(row.where, row.error.code) for row in rows if isinstance(row, FailedRow)]
    assert failed == [("row 2", "invalid_json"), ("row 4", "invalid_line")]
    assert (reader.kind, reader.count()) == ("json", None if name == "stdin" else 4)


class Repeated:
    """A file whose array is on one line and never whole in memory."""

    def __init__(self, first, part, times, last):
        self.parts = iter([b"[", first, *itertools.repeat(part, times), last])

    def peek(self, size):
        return b"["

    def read(self, size):
        return next(self.parts, b"")


def test_memory_holds_one_item():
    """An array is mostly one line, which may be larger than memory."""
    item = json.dumps({"prompt": "]" * 30_000}).encode()
    tracemalloc.start()
    try:
        assert sum(map(len, lines_or_items(Repeated(item, b"," + item, 499, b"]"), "in.json", 1 << 20))) == 500 * len(
            item
        )
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("read_bytes", [1, 5, 1 << 18])
@pytest.mark.parametrize("long", ['{"prompt": "%s"}' % ('\\\\\\"' * 20), '{"x": [%s]}' % ('{"a": 1},' * 9), " 1" * 40])
def test_an_item_that_is_too_long(monkeypatch, read_bytes, long):
    """It is an error, and is read past: the items behind it are whole."""
    monkeypatch.setattr(json_texts, "_READ_BYTES", read_bytes)
    first, bad, last = items(f'[{{"prompt": "a"}}, {long}, {{"prompt": "]"}}]'.encode(), limit=30)
    assert (first, last) == (b'{"prompt": "a"}', b'{"prompt": "]"}')
    assert bad.error.code == "row_too_long"


def test_memory_holds_no_item_that_is_too_long(monkeypatch):
    """Neither a long string, list nor number: each is 240 KB or more here."""
    monkeypatch.setattr(json_texts, "_READ_BYTES", 1 << 15)
    strings = (b'{"a": "', b'\\"xyz' * 10**4, b'"}]')
    for first, part, last in (strings, (b'{"a": [', b"[]," * 10**4, b"1]}]"), (b"1", b"1" * 10**5, b"]")):
        tracemalloc.start()
        try:
            (bad,) = lines_or_items(Repeated(first, part, 8, last), "in.json", 10**4)
            assert bad.error.code == "row_too_long"
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()


def test_only_marks_between_items_are_steps_of_python():
    """Each comma and bracket inside of them was one: an item of 300 MB took a minute."""
    marks = json_texts._Marks()
    inner = b'{"a": [' + b'[1, "]"], ' * 1000 + b"1]}"
    assert [place for place, _ in marks.of(inner + b", " + inner)] == [
        *(0, len(inner) - 1, len(inner)),
        *(len(inner) + 2, 2 * len(inner) + 1),
    ]


def test_rows_do_not_wait_for_an_item_that_is_read_past(tmp_path, monkeypatch):
    """It was read past four times: by each that looks at the first items, and again for its row."""
    monkeypatch.setattr(json_texts, "_READ_BYTES", 10)
    read = []

    class Long(Repeated):
        def read(self, size):
            read.append(size)
            return super().read(size)

    found = lines_or_items(Long(b'"', b"x" * 10, 1000, b'"]'), "in.json", 50)
    assert next(found).error.code == "row_too_long"
    assert len(read) < 10
    assert list(found) == []
    text = json.dumps([{"prompt": "a"}, {"prompt": "x" * 1000}, {"prompt": "b"}])
    (tmp_path / "in.json").write_text(text)
    reader = PromptReader(str(tmp_path / "in.json"), {}, max_row_bytes=50)
    assert [isinstance(row, FailedRow) for row in reader] == [False, True, False]
    with reader._contents.texts(str(tmp_path / "in.json"), "json") as texts:
        assert len(list(texts)) == 3
    assert len(reader._contents._first_items(str(tmp_path / "in.json"))) == 1


def test_blanks_are_no_part_of_an_item(monkeypatch):
    """Blanks that fill more than one read do not make the item beside them too long."""
    monkeypatch.setattr(json_texts, "_READ_BYTES", 4)
    assert items(b"[" + b" " * 99 + b"1," + b"\n" * 99 + b"2]", limit=9) == [b"1", b"2"]


@pytest.mark.parametrize("kind", ["auto", "openai"])
def test_an_openai_batch(tmp_path, kind):
    """Recognized by its first item; --input-format openai takes both forms."""
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    (tmp_path / "in.json").write_text(json.dumps([request], indent=1))
    reader = PromptReader(str(tmp_path / "in.json"), {}, kind)
    assert reader.is_batch and [row.prompt for row in reader] == ["x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"prompt": "a"}', "ends inside of its array"),
        (b'[{"prompt": "a"}, {"prompt": "b', "ends inside of its array"),
        (b'[{"prompt": "a"}] x', "goes on behind the end of its array"),
        (b'{\n "prompt": "a"\n}\n', "is neither an array of objects nor one object per line; put [ and ] around"),
    ],
)
def test_a_file_that_is_no_array(tmp_path, content, message):
    """Its rows, or those that are missing, would not be known."""
    (tmp_path / "in.json").write_bytes(content)
    with pytest.raises(UserError, match=r"in\.json: ") as found:
        list(PromptReader(str(tmp_path / "in.json"), {}))
    assert message in str(found.value)


@pytest.mark.parametrize("read_bytes", [1, 3, 1 << 18])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[{},,{}]", "row 2 is missing before the comma at byte 5"),
        (b"\xef\xbb\xbf [ ,{}]", "row 1 is missing before the comma at byte 7"),
        (b"[{} ,\n,]", "row 2 is missing before the comma at byte 7"),
        (b'[{"a": ","} {"b": 1}]', "a comma is missing before byte 13, behind row 1"),
        (b'[{}, [[]] "x"]', "a comma is missing before byte 11, behind row 2"),
        (b'[{"a": "0123456789"},,{}]', "row 2 is missing before the comma at byte 22"),
        (b"[{}][{}]", "goes on behind the end of its array, at byte 5"),
        (b"[{}]" + b" " * 999 + b"\n{}", "goes on behind the end of its array, at byte 1005"),
        (b"[{}]\0", "goes on behind the end of its array, at byte 5"),
    ],
)
def test_damage_between_items(monkeypatch, content, message, read_bytes):
    """Two commas were taken for one, a missing one made an error row of two rows, far behind the end anything went."""
    monkeypatch.setattr(json_texts, "_READ_BYTES", read_bytes)
    with pytest.raises(UserError, match=rf"^in\.json: {message}$"):
        items(content, limit=9)


@pytest.mark.parametrize("content", [b'[{"prompt": "a"}]', b"\xef\xbb\xbf[\n", b'[ {"prompt": "a"},\n'])
@pytest.mark.parametrize("name", ["in.jsonl", "in", "stdin"])
def test_an_array_that_is_taken_for_lines(tmp_path, monkeypatch, content, name):
    """Each of its lines was an error row, and none said what to do."""
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    with pytest.raises(UserError, match=rf"{name}: begins like a JSON array; if it is, give --input-format json"):
        list(PromptReader("-" if name == "stdin" else str(tmp_path / name), {}))


@pytest.mark.parametrize("name", ["in.jsonl", "stdin"])
def test_a_list_costs_only_its_row(tmp_path, monkeypatch, name):
    """It is no array of objects, and the other lines are rows."""
    content = b'[1, 2]\n{"prompt": "a"}\n'
    (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    bad, good = PromptReader("-" if name == "stdin" else str(tmp_path / name), {})
    assert (bad.error.code, good.prompt) == ("invalid_line", "a")


@pytest.mark.parametrize("content", [b"", b" \n", b"[]", b"[ ]\n"])
def test_no_rows(tmp_path, content):
    """No rows are no error."""
    (tmp_path / "in.json").write_bytes(content)
    assert list(PromptReader(str(tmp_path / "in.json"), {})) == []


def test_a_folder_of_data_has_no_descriptions(tmp_path):
    """Files of JSON in a folder are rows; what describes a data set is not."""
    (tmp_path / "train.json").write_text('[{"prompt": "a"}]')
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "more.ndjson").write_text('{"prompt": "b"}\n')
    assert [row.prompt for row in PromptReader(str(tmp_path), {})] == ["b", "a"]


def test_memory_of_a_large_item(tmp_path):
    """While an item of 30 MB was parsed, it was in memory a second time, in the pieces that it was read in."""
    text = b'[{"prompt": "%s"}, 1]' % (b"x" * 4_000_000)
    (tmp_path / "in.json").write_bytes(text)
    with (tmp_path / "in.json").open("rb") as file:
        items = lines_or_items(file, "in.json", 1 << 23)
        tracemalloc.start()
        try:
            item = next(items)
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    assert len(item) == 4_000_014
    assert held < 1.2 * len(item)
