"""CSV and Arrow as tables, tables on stdin, and folders of several formats."""

import datetime
import gzip
import io
import struct
import sys
from collections import Counter
from importlib import import_module

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rosebatch.core.errors import FlagError, UserError
from rosebatch.io.columns import Columns
from rosebatch.io.json_hints import TO_UTF8
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow

TABLE = pa.table(
    {
        "prompt": [f"p{number}" for number in range(2000)],
        "id": pa.array(range(2000), pa.int32()),
        "day": pa.array([datetime.date(2024, 1, 1 + number % 28) for number in range(2000)]),
        "label": pa.array([f"l{number % 3}" for number in range(2000)]).dictionary_encode(),
    }
)


def read(source, **options):
    return list(PromptReader(str(source), {}, **options))


def write_arrow(path, *, stream=False):
    with path.open("wb") as file, (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=900)


@pytest.mark.parametrize("form", ["file", "stream", "feather"])
def test_arrow(tmp_path, form):
    """Types are kept as those of Parquet are, over several batches."""
    path = tmp_path / ("in.feather" if form == "feather" else "in.arrow")
    if form == "feather":
        feather.write_feather(TABLE, str(path), compression="zstd")
    else:
        write_arrow(path, stream=form == "stream")
    reader = PromptReader(str(path), {})
    assert (reader.count(), reader.schema.field("day").type) == (2000, pa.date32())
    assert reader.schema.field("label").type == pa.string()
    rows = list(reader)
    assert [dict(row.metadata) for row in rows] == TABLE.to_pylist()
    assert rows[1999].where == "row 2000"


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_two_columns_of_one_name(tmp_path, ending):
    """Reading the rows ended in a KeyError."""
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["prompt", "v", "v"])
    if ending == "parquet":
        pq.write_table(table, tmp_path / "in.parquet")
    else:
        feather.write_feather(table, str(tmp_path / "in.arrow"))
    with pytest.raises(UserError, match=rf"in\.{ending}: has two columns 'v'$"):
        read(tmp_path / f"in.{ending}")


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"ARROW1\0\0" + bytes(100), b"prompt\na\n"])
def test_an_unreadable_arrow_file(tmp_path, content):
    """Found at once, with the file's name."""
    (tmp_path / "in.arrow").write_bytes(content)
    with pytest.raises(UserError, match=r"in\.arrow: unreadable Arrow file"):
        read(tmp_path / "in.arrow")


def test_a_truncated_arrow_file(tmp_path):
    """The end of the file names its batches, so it cannot be missing."""
    write_arrow(tmp_path / "in.arrow")
    (tmp_path / "in.arrow").write_bytes((tmp_path / "in.arrow").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"in\.arrow: unreadable Arrow file"):
        read(tmp_path / "in.arrow")


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
@pytest.mark.parametrize(
    "offsets", [[0, 11, 22, 2**30], [0, 22, 11, 33], [0, -11, 22, 33]], ids=["past", "back", "negative"]
)
@pytest.mark.parametrize(
    "values",
    [
        pa.array([b"a" * 11] * 3),
        pa.array(["a" * 11] * 3),
        pa.array([[1] * 11] * 3, pa.list_(pa.int8())),
        pa.array([[(str(key), 1) for key in range(11)]] * 3, pa.map_(pa.string(), pa.int8())),
        pa.array([{"a": "a" * 11}] * 3),
    ],
    ids=["binary", "string", "list", "map", "struct"],
)
def test_offsets_outside_of_an_arrow_file(tmp_path, values, offsets, stream):
    """The process's own memory was read as the row's bytes, and carried to the results; or a signal ended the job."""
    sink = io.BytesIO()
    table = pa.table({"prompt": ["a"] * 3, "x": values})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    right, wrong = (struct.pack("<4i", *numbers) for numbers in ([0, 11, 22, 33], offsets))
    assert sink.getvalue().count(right) == 1
    path = tmp_path / "in.arrow"
    path.write_bytes(sink.getvalue().replace(right, wrong))
    with pytest.raises(UserError, match=r"in\.arrow: unreadable Arrow file \([^\n]*\)$"):
        read(path)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.list_(pa.list_(pa.string()))), pa.map_(pa.string(), pa.list_(pa.string()))]
)
def test_each_number_of_an_arrow_file(tmp_path, kind):
    """Offsets of lists that no row has are not validated, and PyArrow followed them: a signal ended the job."""
    sink = io.BytesIO()
    table = pa.table({"prompt": ["a"], "x": pa.nulls(1, kind)})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        begin = sink.tell()
        writer.write_table(table)
        end = sink.tell()
    path, found = tmp_path / "in.arrow", Counter()
    for place in range(begin, end, 4):
        content = bytearray(sink.getvalue())
        struct.pack_into("<i", content, place, 2**30)
        path.write_bytes(content)
        try:
            found[len(read(path))] += 1
        except UserError as error:
            assert "\n" not in str(error)
            found["refused"] += 1
    assert found.keys() == {1, "refused"}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_a_text_that_is_not_utf8_in_an_arrow_file(tmp_path, kind):
    """Its row fails alone."""
    binary = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}[kind]
    column = pa.array([b"good", b"bad \xff, and longer than a view holds"], binary).view(kind)
    path = tmp_path / "in.arrow"
    feather.write_feather(pa.table({"prompt": ["a", "b"], "x": column}), str(path), compression="uncompressed")
    good, bad = read(path)
    assert good.metadata["x"] == "good"
    assert isinstance(bad, FailedRow) and bad.error.code == "invalid_value"


@pytest.mark.parametrize(("name", "kind"), [("in.parquet.gz", "auto"), ("in.gz", "auto"), ("in.gz", "parquet")])
def test_a_compressed_parquet_file(tmp_path, name, kind):
    """It is read from its end, so it would have to be decompressed first. The message says so."""
    buffer = io.BytesIO()
    pq.write_table(TABLE, buffer)
    (tmp_path / name).write_bytes(gzip.compress(buffer.getvalue()))
    with pytest.raises(UserError, match=rf"{name}: is Parquet that is compressed as a whole; .* decompress it"):
        read(tmp_path / name, input_format=kind)


@pytest.mark.parametrize("name", ["in.csv", "in.tsv", "in.csv.gz"])
def test_csv(tmp_path, name):
    """Cells are texts, as the file has them; cells of a request's other fields are JSON."""
    text = (
        "\ufeffprompt,max_tokens,stop,temperature,ignore_eos,id,zip\r\n"
        '"two\nlines, and ""more""",5,END,0.5,True,007,01234\r\n'
        '\r\nb,4.0,"[""x"", ""y""]",,,,\r\n'
        "c,many,,,,,\r\n"
    )
    if name == "in.tsv":
        text = text.replace(",and", ";and").replace('"[""x"", ""y""]"', '"[""x""; ""y""]"').replace(",", "\t")
        text = text.replace(";", ",")
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    reader = PromptReader(str(tmp_path / name), {})
    one, two, three = reader
    assert reader.count() == 3
    assert one.prompt.startswith("two\nlines") and one.prompt.endswith('and "more"')
    assert (one.sampling.max_tokens, one.sampling.stop, one.sampling.temperature) == (5, ("END",), 0.5)
    assert (one.sampling.ignore_eos, one.id, one.metadata["zip"], one.metadata["max_tokens"]) == (
        True,
        "007",
        "01234",
        "5",
    )
    assert (two.sampling.max_tokens, two.sampling.stop, two.id, two.metadata["zip"]) == (4, ("x", "y"), None, None)
    assert isinstance(three, FailedRow)
    assert (three.error.code, three.where) == ("invalid_field", "row 3")


def test_chats_of_a_csv_file(tmp_path):
    """The cell holds JSON; the result carries it as it is."""
    (tmp_path / "in.csv").write_text('messages\n"[{""role"": ""user"", ""content"": ""hi""}]"\n')
    (row,) = read(tmp_path / "in.csv")
    assert row.messages == [{"role": "user", "content": "hi"}]
    assert row.metadata == {"messages": '[{"role": "user", "content": "hi"}]'}


def test_bad_rows_of_a_csv_file_fail_alone(tmp_path):
    """One row with a comma too many, or of another encoding, cost all others; with both, its error had no JSON."""
    (tmp_path / "in.csv").write_bytes(b"prompt,x\na,1\nb\nc,1,2\n\xff,3\nd,4\n\xff,5,6\n")
    rows = read(tmp_path / "in.csv")
    assert [row.prompt for row in rows if not isinstance(row, FailedRow)] == ["a", "d"]
    assert [(row.where, row.error.code, row.error.message) for row in rows if isinstance(row, FailedRow)] == [
        ("row 2", "invalid_value", "expected 2 cells, as the first row has, got 1"),
        ("row 3", "invalid_value", "expected 2 cells, as the first row has, got 3"),
        ("row 4", "invalid_value", f"column prompt has text that is not UTF-8{TO_UTF8}"),
        ("row 6", "invalid_value", "expected 2 cells, as the first row has, got 3"),
    ]
    assert [row.metadata for row in rows[3:]] == [{"x": "3"}, {"prompt": "d", "x": "4"}, {"x": "5"}]


@pytest.mark.parametrize(
    ("broken", "line", "behind"),
    [
        (b'2,"a"b\n', 4, "d"),
        (b'2,"a\nb"c,"d\n', 5, "d"),
        (b'2,"a\r\nb" \r\n', 5, "d"),
    ],
    ids=["one line", "two lines", "crlf"],
)
def test_a_row_that_is_no_csv(tmp_path, broken, line, behind):
    """One quote refused the whole file, without its place. The line counts line breaks inside of cells."""
    (tmp_path / "in.csv").write_bytes(b'id,prompt\n1,"two\nlines"\n' + broken + b"3,d\n")
    reader = PromptReader(str(tmp_path / "in.csv"), {})
    first, bad, last = reader
    assert (reader.count(), first.prompt, last.prompt, last.id) == (3, "two\nlines", behind, "3")
    assert (bad.where, bad.error.code, bad.metadata) == ("row 2", "invalid_value", {})
    assert bad.error.message.startswith(f"no CSV in line {line}: ")


UTF16 = "\ufeffid,prompt\n1,r\u00e9sum\u00e9 \U0001f339\n"


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("packed", [False, True])
def test_utf16(tmp_path, monkeypatch, order, packed):
    """Spreadsheets and PowerShell write it: the header failed as "surrogates not allowed", each line as no JSON."""
    # Longer than what is read at once.
    texts = [f"\u20ac{number}" + "\U0001f339" * 99 for number in range(2, 4000)]
    long = UTF16 + "".join(f"{number},{text}\n" for number, text in enumerate(texts, 2))
    for name, text in (("in.csv", long), ("in.jsonl", '\ufeff{"id": "1", "prompt": "r\u00e9sum\u00e9 \U0001f339"}\n')):
        content = text.encode(order)
        (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
        rows = read(tmp_path / name)
        assert (rows[0].id, rows[0].prompt) == ("1", "r\u00e9sum\u00e9 \U0001f339")
        assert [row.prompt for row in rows[1:]] == (texts if name == "in.csv" else [])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / name).read_bytes())))
        kind = "csv" if name == "in.csv" else "auto"
        assert [row.prompt for row in PromptReader("-", {}, kind)] == [row.prompt for row in rows]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.json", "in.csv", "in", "in.jsonl.gz", "stdin"])
def test_text_in_encodings_that_are_not_read(tmp_path, monkeypatch, encoding, name):
    """It was called no text, damaged JSON, or a table with other columns; nothing said what to do."""
    text = "prompt\na\n" if "csv" in name else '[{"prompt":"é"}]' if name.endswith("json") else '{"prompt":"é"}\n' * 2
    content = text.encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    source = "-" if name == "stdin" else path
    if name == "stdin":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    iconv = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    with pytest.raises(UserError, match=f"{name}: is text in {iconv}, but UTF-8 is read.* iconv -f {iconv} -t UTF-8$"):
        read(source)


def test_damaged_utf16(tmp_path):
    """A half character at the end, or half of a pair."""
    for content in (UTF16.encode("utf-16-le")[:-1], UTF16.encode("utf-16-le") + b"\x00\xd8,\0"):
        (tmp_path / "in.csv").write_bytes(content)
        with pytest.raises(UserError, match=r"in\.csv: unreadable CSV file \(damaged UTF-16: "):
            read(tmp_path / "in.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, but the first row"),
        (b"\n\r\n", "is empty, but the first row"),
        (b"id,pr\xe9nom,prompt\n1,x,a\n", "the names of its columns are not UTF-8; convert it, .*iconv -f cp1252"),
        (b"prompt,x,x\na,1,2\n", "has two columns 'x'"),
        (b'prompt\n"a\nb\nc', "a quote of the row in line 2 is never closed$"),
        (b'prompt\n"a\nb"\n\n"c\n', "a quote of the row in line 5 is never closed$"),
    ],
)
def test_an_unreadable_csv_file(tmp_path, content, message):
    """A quote that nothing closes swallowed the rest of the file as one prompt."""
    (tmp_path / "in.csv").write_bytes(content)
    with pytest.raises(UserError, match=rf"in\.csv: {message}"):
        read(tmp_path / "in.csv")


@pytest.mark.parametrize(
    ("form", "kind"),
    [("parquet", "auto"), ("parquet", "parquet"), ("arrow", "auto"), ("arrow", "arrow"), ("csv", "csv")],
)
def test_tables_on_stdin(monkeypatch, form, kind):
    """By first bytes, or by the flag: only that tells CSV."""
    buffer = io.BytesIO()
    if form == "parquet":
        pq.write_table(TABLE, buffer)
    elif form == "arrow":
        with pa.ipc.new_stream(buffer, TABLE.schema) as writer:
            writer.write_table(TABLE)
    else:
        buffer.write(b"prompt\n" + b"".join(b"p%d\n" % number for number in range(2000)))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(buffer.getvalue())))
    reader = PromptReader("-", {}, kind)
    assert [row.prompt for row in reader] == TABLE["prompt"].to_pylist()
    assert "prompt" in reader.schema.names
    assert (reader.count(), reader.can_move, reader.kind) == (None, False, form)


@pytest.mark.parametrize(
    ("kind", "content", "empty"),
    [
        ("csv", b"prompt\np\n", b"prompt\n"),
        ("json", b'[{"prompt":"p"}]', b"[]"),
        ("jsonl", gzip.compress(b'{"prompt":"p"}\n'), gzip.compress(b"")),
        ("auto", b'{"prompt":"p"}\n', b""),
    ],
    ids=["csv", "json", "gz", "auto"],
)
def test_whether_stdin_is_empty(monkeypatch, kind, content, empty):
    """Asked first, before any row is read: a CSV on stdin "had no rows", and none of its rows was served."""
    for data, rows in ((content, ["p"]), (empty, [])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        reader = PromptReader("-", {}, kind)
        assert reader.is_empty == (not rows)
        assert [row.prompt for row in reader] == rows


def test_a_pipe_without_an_extension(tmp_path):
    """By its first bytes, as ``<(command)`` has no name of its own."""
    pq.write_table(TABLE, tmp_path / "data")
    assert len(read(tmp_path / "data")) == 2000


def test_a_folder_of_several_formats(tmp_path):
    """Served in the order of names, each by its own format; rows have the columns of their files."""
    (tmp_path / "1.jsonl").write_text('{"prompt": "one", "a": 1}\n')
    pq.write_table(pa.table({"prompt": ["two"], "b": [2.5]}), tmp_path / "2.parquet")
    (tmp_path / "3.csv").write_text("prompt,c\nthree,3\n")
    (tmp_path / "4.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "four"}\n{"prompt": "five", "id": 1}\n'))
    table = pa.table({"id": [1], "prompt": pa.nulls(1, pa.string())})
    with (tmp_path / "5.arrow").open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    reader = PromptReader(str(tmp_path), {})
    rows = list(reader)
    assert [(row.index, dict(row.metadata)) for row in rows] == [
        (0, {"a": 1}),
        (1, {"prompt": "two", "b": 2.5}),
        (2, {"prompt": "three", "c": "3"}),
        (3, {}),
        (4, {"id": 1}),
        (5, {"id": 1, "prompt": None}),
    ]
    assert rows[1].where.endswith("2.parquet row 1") and rows[4].where.endswith("4.jsonl.gz line 2")
    assert rows[5].error.code == "missing_prompt"
    assert (reader.count(), reader.schema, reader.kind) == (6, None, "auto")


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv"])
def test_columns_in_another_order(tmp_path, ending):
    """A folder was refused, though rows have columns by name. A file may lack all values of a column, and its type."""
    tables = [
        pa.table({"prompt": ["a"], "n": pa.array([1], pa.int32()), "note": ["x"]}),
        pa.table({"note": pa.nulls(1), "prompt": ["b"], "n": pa.array([2], pa.int32())}),
    ]
    for number, table in enumerate(tables):
        path = tmp_path / f"{number}.{ending}"
        if ending == "parquet":
            pq.write_table(table, path)
        elif ending == "arrow":
            feather.write_feather(table, str(path))
        else:
            csv.write_csv(table, path)
    reader = PromptReader(str(tmp_path), {})
    assert [row.metadata for row in reader] == (
        [{"prompt": "a", "n": "1", "note": "x"}, {"prompt": "b", "n": "2", "note": None}]
        if ending == "csv"
        else [*tables[0].to_pylist(), *tables[1].to_pylist()]
    )
    assert reader.schema.names == ["prompt", "n", "note"] and reader.schema.field("note").type == pa.string()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"prompt": ["b"]}, "only .*0.parquet has n$"),
        ({"prompt": ["b"], "n": [1], "m": [1]}, "only .*1.parquet has m$"),
        ({"prompt": ["b"], "n": ["1"]}, "n is int64 there, string here$"),
    ],
)
def test_columns_that_differ(tmp_path, other, message):
    """The message named no column."""
    pq.write_table(pa.table({"n": [1], "prompt": ["a"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table(other), tmp_path / "1.parquet")
    with pytest.raises(UserError, match=f"1.parquet: its columns differ from those of .*0.parquet: {message}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("in.csv", "question,answer\na,b\n", "prompt_token_ids, but question, answer: --prompt-column NAME says which"),
        ("in.csv", "id;prompt\n1;a\n", "but id;prompt: .*; columns are separated by commas, in a .tsv by tabs$"),
    ],
)
def test_a_table_without_prompts(tmp_path, name, text, message):
    """The model was loaded, and every row failed."""
    (tmp_path / name).write_text(text)
    with pytest.raises(FlagError, match=f"{name}: has none of the columns prompt, messages, .*{message}"):
        read(tmp_path / name)


@pytest.mark.parametrize("columns", [Columns.of("prompt", None, None), Columns.of(None, None, None, "{prompt}")])
def test_a_column_of_another_separator(tmp_path, columns):
    """With a column or a template named, nothing told of the semicolons."""
    (tmp_path / "in.csv").write_text("id;prompt\n1;a\n")
    with pytest.raises(FlagError, match=r"in\.csv has no .*column.*, but id;prompt; columns are separated by commas"):
        _ = list(PromptReader(str(tmp_path / "in.csv"), {}, columns=columns))


def test_empty_lines_before_the_names(tmp_path):
    """The file was called empty, though empty lines between rows do not count."""
    (tmp_path / "in.csv").write_text("\n\nprompt\na\n")
    assert [row.prompt for row in read(tmp_path / "in.csv")] == ["a"]


def test_a_batch_beside_a_table(tmp_path):
    """Its answers have a form that rows of a table have not."""
    (tmp_path / "1.jsonl").write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n')
    (tmp_path / "2.csv").write_text("prompt\na\n")
    with pytest.raises(UserError, match="has an OpenAI batch beside tables"):
        _ = PromptReader(str(tmp_path), {}).is_batch


class Hub(MemoryFileSystem):
    """A Hub with one data set."""

    protocol = "hf"
    store = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("hf://").strip("/")

    def unstrip_protocol(self, name):
        return f"hf://{name.strip('/')}"


class Unreachable(Hub):
    """What the Hub's own library raises is no OSError."""

    def find(self, path, **options):
        raise RuntimeError("no route to the Hub\nand a page of details")

    info = find


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "hf", Hub)
    files = Hub(skip_instance_cache=True)
    root = "hf://datasets/org/name"
    for name, content in (
        ("README.md", b"# Data"),
        ("dataset_infos.json", b"{}"),
        (".gitattributes", b""),
        ("data/test/b.csv", b"prompt\nb\n"),
        ("data/train/a.jsonl.gz", gzip.compress(b'{"prompt":"a"}\n')),
        ("_old/x.jsonl", b"{}"),
    ):
        with files.open(f"{root}/{name}", "wb") as file:
            file.write(content)
    yield root
    Hub.store.clear()


@pytest.mark.parametrize(
    ("path", "expected"),
    [("", ["b", "a"]), ("/", ["b", "a"]), ("/data/train", ["a"]), ("/data/*/*.gz", ["a"]), ("/data/test/b.csv", ["b"])],
)
def test_a_data_set_of_the_hub(hub, path, expected):
    """A whole repository, a folder, a glob and a file; its page and its notes are no rows."""
    assert [row.prompt for row in read(hub + path)] == expected


def test_a_hub_that_cannot_be_reached(hub, monkeypatch):
    """One line, whatever the library raises."""
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "hf", Unreachable)
    for path in (hub, f"{hub}/data", f"{hub}/data/a.jsonl"):
        with pytest.raises(UserError) as found:
            read(path)
        assert str(found.value) == f"{path}: no route to the Hub and a page of details"
