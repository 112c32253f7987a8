"""A row of a table is bounded by what it takes as values of its own, however few bytes of the file make it."""

import csv
import io
import tracemalloc
from itertools import product
from random import Random
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import UserError
from rosebatch.io import csv_table, parquet_pages, parquet_parts, parsed_size, tables
from rosebatch.io.columns import Columns
from rosebatch.io.parquet_pages import longest_value, pages
from rosebatch.io.reader import PromptReader
from rosebatch.io.row_sizes import row_sizes

LIMIT = 1 << 20
LONG = "x" * (LIMIT + 1)
ERROR = f"the row has more than {LIMIT} bytes with column prompt; --max-row-bytes sets another limit"
# Of all rows of a group that is not read: a short one must not be told that it is long itself.
GROUP_ERROR = ERROR.replace("the row", "the row, or another of its row group,")
CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.dictionary(pa.int32(), pa.string()))]))


def read(path):
    """Of each row, its id and its prompt or error."""
    rows = PromptReader(str(path), {}, max_row_bytes=LIMIT)
    return [(row.metadata.get("id"), row.prompt if hasattr(row, "prompt") else row.error.message) for row in rows]


def write_arrow(table, path):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def write_stream(table, path):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "parquet": lambda table, path: pq.write_table(table, path, compression="zstd"),
    "plain": lambda table, path: pq.write_table(table, path, compression="none", use_dictionary=False),
    "arrow": write_arrow,
    "stream": write_stream,
}


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_long_row_between_others(tmp_path, form, shared):
    """All rows of a batch were decoded together; a value of a dictionary took its bytes once for each row."""
    prompts = pa.array(["a", LONG, "b", LONG, "c"])
    table = pa.table({"prompt": prompts.dictionary_encode() if shared else prompts, "id": range(5)})
    WRITERS[form](table, tmp_path / f"in.{'parquet' if form in ('parquet', 'plain') else 'arrow'}")
    (path,) = tmp_path.iterdir()
    assert read(path) == [(0, "a"), (1, ERROR), (2, "b"), (3, ERROR), (4, "c")]


@pytest.mark.parametrize("columns", [None, ("id",)])
def test_a_long_row_of_csv(tmp_path, columns):
    """CSV had no limit. The row costs itself alone, and columns that are left out do not count."""
    rows = [f"1,a,{LONG}", f"2,{LONG},b", f"{LONG},{LONG},", "4,d,", f"5,{LONG}\xff"]
    (tmp_path / "in.csv").write_text("\n".join(["id,prompt,pad", *rows]), "latin-1")
    reader = PromptReader(str(tmp_path / "in.csv"), {}, max_row_bytes=LIMIT, columns=Columns(carried=columns))
    found = [(row.metadata.get("id"), getattr(row, "prompt", None) or row.error.message) for row in reader]
    padded = "a" if columns else ERROR.replace("prompt", "pad")
    # What is no text is not kept, so there is room for the rest.
    mixed = "expected 3 cells, as the first row has, got 2"
    assert found == [("1", padded), ("2", ERROR), (None, ERROR.replace("prompt", "id")), ("4", "d"), ("5", mixed)]


def test_a_cell_whose_values_take_more_than_its_bytes(tmp_path, monkeypatch):
    """24 MB of empty lists in a cell took 1.4 GB."""
    monkeypatch.setattr(parsed_size, "SHORT_LINE", 1000)
    monkeypatch.setattr(parsed_size, "VALUE_BYTES", 50_000)
    lists = "[" + "[]," * 600 + "0]"
    (tmp_path / "in.csv").write_text(f'id,prompt,stop,x\n1,a,,\n2,b,"{lists}",\n3,c,,"{lists}"\n')
    error = "column stop: its values would take more than 50000 bytes in memory"
    assert read(tmp_path / "in.csv") == [("1", "a"), ("2", error), ("3", "c")]


@pytest.mark.parametrize("end", ["\n", pytest.param("\r\n", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "cell",
    [
        "x" * 4 * LIMIT,
        'a"' + "x" * 4 * LIMIT,
        '"' + "x\n1,2\n" * (LIMIT // 2) + '"',
        '"' + '""' * 2 * LIMIT + '"',
        '"x' + '""' * 2 * LIMIT + '\n,"",""\n"',
        '"' + "x" * 4 * LIMIT + '","y\ny"',
    ],
    ids=["plain", "a quote", "lines", "quotes", "both", "two cells"],
)
def test_a_row_of_csv_that_memory_has_no_room_for(tmp_path, cell, end):
    """It was in memory three times before its limit was looked at; rows behind it keep their places."""
    lines = ["id,prompt", '1,"a', 'a"', f"2,{cell}", "3,b", '4,"b"c', ""]
    (tmp_path / "in.csv").write_bytes(end.join(lines).encode())
    breaks = cell.count("\n")
    found = read(tmp_path / "in.csv")
    error = f"the row has more than {LIMIT} bytes; --max-row-bytes sets another limit"
    assert found[:3] == [("1", f"a{end}a"), (None, error), ("3", "b")]
    assert found[3][1].startswith(f"no CSV in line {6 + breaks}: ")
    assert len(found) == 4


def test_a_long_row_whose_quote_is_never_closed(tmp_path):
    """Rows that it swallowed would be left out."""
    (tmp_path / "in.csv").write_text('id,prompt\n1,a\n2,"' + "x,y\n" * (LIMIT // 2))
    with pytest.raises(UserError, match=r"a quote of the row in line 3 is never closed"):
        read(tmp_path / "in.csv")


@pytest.mark.parametrize("column", ["prompt", "other"])
def test_a_page_that_memory_has_no_room_for(tmp_path, monkeypatch, column):
    """31 KB of a file are a text of 1 GB. It is not decompressed: rows of its group fail, with their other columns."""
    monkeypatch.setattr(parquet_parts, "_MAX_PAGE_BYTES", 2 * LIMIT)
    texts = ["a", "b", "x" * 3 * LIMIT, "c"]
    plain = {"prompt": ["a", "b", "c", "d"], "id": range(4)}
    pq.write_table(pa.table(plain | {column: texts}), tmp_path / "in.parquet", row_group_size=2, compression="zstd")
    message = GROUP_ERROR.replace("prompt", column)
    assert read(tmp_path / "in.parquet") == [(0, "a"), (1, "b"), (2, message), (3, message)]


def test_a_large_page_of_honest_texts(tmp_path, monkeypatch):
    """300 texts of 1 MB are one page, as PyArrow writes them: each row failed as one that is too long."""
    monkeypatch.setattr(parquet_parts, "_MAX_PAGE_BYTES", 2 * LIMIT)
    texts = [Random(seed).randbytes(LIMIT // 2 - 100).hex() for seed in range(4)]
    table = pa.table({"prompt": texts, "id": range(4)})
    pq.write_table(table, tmp_path / "in.parquet", compression="zstd", use_dictionary=False)
    assert read(tmp_path / "in.parquet") == list(enumerate(texts))


def test_a_row_of_very_many_values(tmp_path):
    """Runs of one value take no bytes in a file."""
    table = pa.table({"prompt": ["a", "b"], "id": [0, 1], "x": [[None] * LIMIT, [None]]})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=1)
    assert read(tmp_path / "in.parquet") == [(0, GROUP_ERROR.replace("prompt", "x")), (1, "b")]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "values",
    [
        pa.array([True] * (LIMIT // 8)),
        pa.StructArray.from_arrays([pa.array([True] * (LIMIT // 64))], ["a"]),
        pa.array([[]] * (LIMIT // 16), pa.list_(pa.int8())),
        pa.array([[("k", True)]] * (LIMIT // 64), pa.map_(pa.string(), pa.bool_())),
    ],
    ids=["bools", "structs", "lists", "maps"],
)
def test_a_row_of_values_that_take_less_in_arrow(tmp_path, form, values):
    """A megabyte of structs of one bit took 400 MB: batches of as few bytes as a row may have were not looked at."""
    ends = pa.array([0, 1, len(values) - 1, len(values)], pa.int32())
    table = pa.table({"prompt": ["a", "b", "c"], "id": range(3), "x": pa.ListArray.from_arrays(ends, values)})
    WRITERS[form](table, tmp_path / f"in.{form}")
    assert read(tmp_path / f"in.{form}") == [(0, "a"), (1, ERROR.replace("prompt", "x")), (2, "c")]


def test_full_dictionary_of_short_texts(tmp_path):
    """Fewer rows were decoded at once where texts fill a dictionary, and each batch takes time."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"{number} " + "x" * 200 for number in range(8000)]}), path)
    with path.open("rb") as raw, pq.ParquetFile(path) as file:
        assert next(pages(raw, file.metadata.row_group(0).column(0))).size > LIMIT
        assert list(parquet_parts.parts(raw, file, ["prompt"], LIMIT)) == [([0], 256, [], [])]


def test_each_column_is_looked_at_once(tmp_path, monkeypatch):
    """For each of 20,000, the schema was made anew and all were compared with its name: no row came in 80 s."""
    names = ["prompt", *(f"x{number}" for number in range(300)), "a.b"]
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({name: ["a"] for name in names} | {"a": [{"b": 1}]}), path)
    looked = []
    monkeypatch.setattr(parquet_parts, "_size", lambda chunk: looked.append(chunk.path_in_schema) or 0)
    with path.open("rb") as raw, pq.ParquetFile(path) as file:
        assert list(parquet_parts.parts(raw, file, [*names, "a"], LIMIT)) == [([0], 256, (), ())]
    assert sorted(set(looked)) == sorted(names)
    assert len(looked) <= len(names) + 3


CODECS = ["none", "snappy", "gzip", "brotli", "zstd", "lz4"]


@pytest.mark.parametrize("codec", CODECS)
def test_longest_text_of_a_dictionary(tmp_path, codec):
    """It is found without PyArrow, which holds a dictionary five times."""
    path = tmp_path / "in.parquet"
    texts = pa.array(["ab", "c" * 5000, "", "d" * 7, "é" * 10])
    pq.write_table(pa.table({"x": texts}), path, compression=codec)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    with path.open("rb") as raw:
        assert longest_value(raw, chunk, next(pages(raw, chunk))) == 5000


def test_a_dictionary_of_very_many_texts_is_not_searched(tmp_path, monkeypatch):
    """A page of 128 MiB may have 30 million."""
    monkeypatch.setattr(parquet_pages, "_MAX_VALUES", 50)
    for name in ("_MAX_LONG_PAGE_BYTES", "_MAX_SHARED_BYTES"):
        monkeypatch.setattr(parquet_parts, name, 1000)
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": list(map(str, range(1000)))}), path)
    with path.open("rb") as raw, pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(0).column(0)
        page = next(pages(raw, chunk))
        assert longest_value(raw, chunk, page) == page.size > 1000
        # Then it is read as it is, and no reason to refuse it.
        monkeypatch.setattr(parquet_parts, "_SMALL_BYTES", 0)
        assert list(parquet_parts.parts(raw, file, ["prompt"], 100)) == [([0], 1000, [], ["prompt"])]


@pytest.mark.thorough
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("size", "most"), [(3 * LIMIT, 8), (LIMIT // 2, 24)])
def test_memory_of_rows_that_share_a_text(tmp_path, monkeypatch, stored, size, most):
    """2.7 KB of a file were 200 rows of one text of 64 MiB: 2 GB, or 340 MB where the file has Arrow's type."""
    monkeypatch.setattr(parquet_parts, "_MAX_LONG_PAGE_BYTES", 2 * LIMIT)
    monkeypatch.setattr(parquet_parts, "_MAX_SHARED_BYTES", 2 * LIMIT)
    prompts = pa.array(["x" * size] * 200).dictionary_encode()
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": prompts, "id": range(200)}), path, compression="zstd", store_schema=stored)
    del prompts
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        found = [what for _, what in read(path)]
    finally:
        pa.set_memory_pool(before)
    assert found == [GROUP_ERROR if size > LIMIT else "x" * size] * 200
    assert pool.max_memory() < most * LIMIT


@pytest.mark.parametrize("distinct", [1, 300])
@pytest.mark.parametrize("stored", [False, True])
def test_long_texts_of_a_dictionary_are_copied_once(tmp_path, monkeypatch, stored, distinct):
    """PyArrow copied them for each of a hundred batches. Behind a full dictionary, the rest of a chunk has none."""
    monkeypatch.setattr(parquet_parts, "_MAX_SHARED_BYTES", 1000)
    monkeypatch.setattr(parquet_parts, "_SMALL_BYTES", 0)
    texts = [str(number % distinct) * 4 + "x" * 1000 for number in range(600)]
    path = tmp_path / "in.parquet"
    table = pa.table({"prompt": pa.array(texts).dictionary_encode() if stored else texts, "id": range(600)})
    pq.write_table(table, path, write_batch_size=10, dictionary_pagesize_limit=100_000)
    with path.open("rb") as raw, pq.ParquetFile(path) as file:
        (part,) = parquet_parts.parts(raw, file, ["prompt", "id"], LIMIT)
    assert part.shared == ["prompt"]
    assert part.rows_at_once > 256
    assert read(path) == list(enumerate(texts))


def test_dictionaries_that_memory_has_no_room_for(tmp_path, monkeypatch):
    """Three columns of one text of 20 MB each took 300 MB. None of them is in the error rows: there are many."""
    monkeypatch.setattr(parquet_parts, "_MAX_SHARED_BYTES", 1000)
    monkeypatch.setattr(parquet_parts, "_MAX_PACKED_BYTES", LIMIT)
    text = pa.array(["x" * (LIMIT // 3)] * 9).dictionary_encode()
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(9), "prompt": text, "a": text, "b": text}), path, compression="zstd")
    assert read(path) == [(number, GROUP_ERROR.replace("prompt", "prompt, a, b")) for number in range(9)]
    # Texts that have their bytes in the file, too, are no trap.
    monkeypatch.setattr(parquet_parts, "_MAX_PACKED_BYTES", 1000)
    pq.write_table(pa.table({"id": range(9), "prompt": text}), path, compression="none")
    assert [what for _, what in read(path)] == text.to_pylist()


@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0"}, {"use_dictionary": False}])
def test_headers_of_pages(tmp_path, options):
    """The sizes of a chunk's pages are those of the chunk, less their headers."""
    texts = [f"{number} " + "x" * 500 for number in range(5000)]
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": texts}), path, data_page_size=10_000, compression="none", **options)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    with path.open("rb") as raw:
        found = list(pages(raw, chunk))
    assert [page.is_dictionary for page in found[:2]] == [chunk.has_dictionary_page, False]
    assert 0 < chunk.total_uncompressed_size - sum(page.size for page in found) < 3000 * len(found)
    assert len(found) > 3


@pytest.mark.parametrize(
    ("array", "sizes"),
    [
        (pa.array(["ab", None, "c" * 10]), [2, 0, 10]),
        (pa.array(["ab", None, "c" * 20], pa.string_view()), [2, 0, 20]),
        (pa.array(["ab", None, "ab"]).dictionary_encode(), [2, 0, 2]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["q" * 7, "r"])), [7, 7, 1]),
        (pa.array([{"a": "xx"}, None, {"a": "yyyy"}]), [66, 64, 68]),
        (pa.array([["ab", "c"], None, ["d" * 9]]), [35, 16, 33]),
        (pa.array([["ab", "c"], None, ["d" * 9]], pa.list_view(pa.string())), [35, 16, 33]),
        (pa.array([["ab", "c"], None, ["d", "e"]], pa.list_(pa.string(), 2)), [35, 16, 34]),
        (pa.array([[("k", "vv")], None, []], pa.map_(pa.string(), pa.string())), [83, 32, 32]),
        (pa.array([[{"role": "u", "content": "c" * 30}], None, []], CHAT), [119, 16, 16]),
    ],
    ids=lambda value: str(value.type)[:40] if isinstance(value, pa.Array) else "",
)
def test_sizes_of_rows(array, sizes):
    """Texts by their bytes, however they are shared; each object and item of a list has some of its own."""
    assert row_sizes(array).tolist() == sizes
    assert row_sizes(array[1:]).tolist() == sizes[1:]
    assert row_sizes(array[:0]).tolist() == []


@pytest.mark.parametrize("offsets", [[], [pa.array([0, 1, 2], pa.int32())]], ids=["sparse", "dense"])
def test_sizes_of_unions_in_objects(offsets):
    """PyArrow ends the process if it is to hide a value of a union under an object that is null: by a signal."""
    make = pa.UnionArray.from_dense if offsets else pa.UnionArray.from_sparse
    values = make(pa.array([0, 0, 0], pa.int8()), *offsets, [pa.array([1, 2, 3])])
    objects = pa.StructArray.from_arrays([values, ["a", "b", "c"]], ["u", "t"], mask=pa.array([False, True, False]))
    rows = tables._batch_rows(pa.record_batch([objects], ["x"]), lambda name: True, LIMIT)
    found = [{"x": {"u": 1, "t": "a"}}, {"x": None}, {"x": {"u": 3, "t": "c"}}]
    assert [content for content, _ in rows] == found


@pytest.mark.parametrize("offsets", [b"", (1 << 30).to_bytes(4, "little")])
def test_sizes_of_lists_that_no_row_has(offsets):
    """Their offsets may be missing or of any value, and PyArrow followed them: a signal ended the job."""
    texts = pa.array([], pa.list_(pa.string()))
    lists = pa.Array.from_buffers(pa.list_(texts.type), 0, [None, pa.py_buffer(offsets)], children=[texts])
    array = pa.Array.from_buffers(
        pa.list_(lists.type), 2, [pa.py_buffer(b"\0"), pa.py_buffer(bytes(12))], 2, 0, [lists]
    )
    array.validate(full=True)
    assert row_sizes(array).tolist() == [16, 16]
    rows = tables._batch_rows(pa.record_batch([array], ["x"]), lambda name: True, LIMIT)
    assert [content for content, _ in rows] == [{"x": None}, {"x": None}]


def test_a_piece_of_a_row_in_quotes():
    """It ends in what it would if one looked at each quote."""
    for piece in map("".join, product('a",', repeat=7)):
        quoted, opener = True, -1
        for place, letter in enumerate(piece):
            if letter == '"':
                quoted, opener = (False, place + 1) if quoted else (place == opener or piece[place - 1] == ",", opener)
        assert csv_table._quoted(piece, ",", quoted=True, opens=False)[0] == quoted


@pytest.mark.parametrize(
    ("line", "cells"),
    [
        ("2" + "," * 40, 41),
        ("2," + "ab," * 40, 42),
        ('2,x"' + "ab," * 40 + "c", 42),
        ('2,"\n"' + ",ab" * 40, 41),
        ("2," + '"a",' * 40, 42),
        ('2,"a,","b"' + ",ab" * 40, 43),
        ('2,"' + "ab," * 40 + '"', None),
        ('2,"' + 'a"",' * 40 + '"', None),
        ('2,"\n' + "ab," * 40 + '"', None),
    ],
)
def test_a_row_of_very_many_cells(tmp_path, monkeypatch, line, cells):
    """30 MB of commas were as many cells: 500 MB. In quotes, they are text."""
    monkeypatch.setattr(csv_table, "_FEW_CELLS", 20)
    (tmp_path / "in.csv").write_text(f"id,prompt\n1,a\n{line}\n3,c\n")
    error = f"expected 2 cells, as the first row has, got {cells}"
    found = read(tmp_path / "in.csv")
    assert [found[0], found[2]] == [("1", "a"), ("3", "c")]
    assert found[1] == ((None, error) if cells else ("2", next(csv.reader(io.StringIO(line)))[1]))


def test_very_many_columns(tmp_path, monkeypatch):
    """Names are texts, too: ten million of them took gigabytes. Rows may have as many cells as there are names."""
    monkeypatch.setattr(csv_table, "_FEW_CELLS", 20)
    names = ",".join(f"c{number}" for number in range(30))
    (tmp_path / "in.csv").write_text(f"id,prompt,{names}\n1,a{30 * ',x'}\n")
    with pytest.raises(UserError, match=r"in.csv: the names of its columns: it has 32, more than 20$"):
        read(tmp_path / "in.csv")


def test_more_columns_than_any_table_has(tmp_path):
    """A million names, of 7 MB, took a gigabyte before the first row was read."""
    (tmp_path / "in.csv").write_text(f"prompt{',a' * 65_536}\n")
    with pytest.raises(UserError, match=r"the names of its columns: it has 65537, more than 65536$"):
        read(tmp_path / "in.csv")


@pytest.mark.parametrize("limit", [20, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_of_many_lines(tmp_path, monkeypatch, limit, end):
    """Lines that are put together are the same rows, at the same places, also where one is read past."""
    cells = [
        "a",
        *(f'"{end.join(["b"] * lines)}"' for lines in (1, 2, 3, 8, 30)),
        '"x"y',
        "c",
        '"d""' + end * 2 + '"',
        "e",
    ]
    (tmp_path / "in.csv").write_bytes(
        end.join(["id,prompt", *(f"{n},{cell}" for n, cell in enumerate(cells))]).encode()
    )

    def rows():
        found = PromptReader(str(tmp_path / "in.csv"), {}, max_row_bytes=limit)
        return [(row.where, getattr(row, "prompt", None), str(getattr(row, "error", ""))) for row in found]

    whole = rows()
    monkeypatch.setattr(csv_table, "_LINES_TOGETHER", 2)
    monkeypatch.setattr(csv_table, "_SKIPPED_CHARACTERS", 2)
    assert len(whole) == len(cells)
    if limit == 1000:
        assert rows() == whole
    else:
        # Whether a row is parsed before it is refused, and its column named, goes by what is read past at once.
        for row, other in zip(rows(), whole, strict=True):
            assert [row[0], row[1], row[2][:12]] == [other[0], other[1], other[2][:12]]
    (tmp_path / "in.csv").write_bytes(b'id,prompt\n1,a\n2,"b\n' + b"c\n" * 100)
    with pytest.raises(UserError, match="a quote of the row in line 3 is never closed"):
        rows()


def test_memory_of_a_long_cell():
    """Cells of 30 MB took 120 each while they were read, and afterwards."""
    table = csv_table.CsvTable(io.BytesIO(b"id,prompt\n1," + b"x" * 4_000_000 + b"\n2,b\n"), "in.csv", ",", 1 << 23)
    tracemalloc.start()
    try:
        (long, size), (other, _) = table.rows()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (long.values, size, other.values) == (
        {"id": "1", "prompt": "x" * 4_000_000},
        len(b"idprompt1") + 4_000_000,
        {"id": "2", "prompt": "b"},
    )
    # The pieces of the line, the line and the cell.
    assert peak < 15 << 20


@pytest.mark.thorough
def test_memory_of_many_short_lines():
    """A row of 68 MB in lines of three characters took 1.6 GB before it was read past."""
    table = csv_table.CsvTable(io.BytesIO(b'id,prompt\n1,"' + b'""\n' * 2_000_000), "in.csv", ",", 1 << 20)
    tracemalloc.start()
    try:
        error = next(table.rows())[0].error
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.code == "row_too_long"
    # Three million characters as text, and some 2 million in the cell; each line took 60.
    assert peak < 30 << 20


def test_quotes_inside_of_a_cell_are_no_steps_of_python(monkeypatch):
    """A row with a hundred million of them took 27 s to be read past; one of 7 million cells in quotes, 15 s."""
    steps, end = [], csv_table._end_of_texts
    monkeypatch.setattr(csv_table, "_end_of_texts", lambda *given: steps.append(given) or end(*given))
    assert csv_table._quoted("a" + '""' * 1000 + '",', ",", quoted=True, opens=False) == (False, True)
    assert len(steps) == 1
    assert csv_table._quoted('"a",' * 1000 + '"a",b,' * 1000, ",", quoted=False, opens=True) == (False, True)
    assert len(steps) == 2


def test_of_very_many_cells_in_quotes_few_are_looked_at(tmp_path, monkeypatch):
    """A look at each of 7 million took 6 s, where a few more than the columns are enough."""
    monkeypatch.setattr(csv_table, "_FEW_CELLS", 20)
    table = csv_table.CsvTable(io.BytesIO(b"id,prompt\n"), "in.csv", ",", 1000)
    seen, cells = [], table._in_quotes

    def finditer(line):
        return (seen.append(each) or each for each in cells.finditer(line))

    table._in_quotes = SimpleNamespace(finditer=finditer)
    assert table._cells('"a",' * 1000, quoted=False) == 1001
    assert len(seen) == 22


def test_a_csv_row_has_the_names_of_its_columns():
    """Twenty rows of 24 MB of names were held at once, as if they had a few cells: results carry the names."""
    table = csv_table.CsvTable(io.BytesIO("id,prömpt\n1,ab\n".encode()), "in.csv", ",", 1000)
    assert [size for _, size in table.rows()] == [len("idprömpt".encode()) + len("1ab")]
