"""Inputs of many files, and of file systems other than the local one."""

import errno
import gzip
import hashlib
import io
import os
import re
import socket
import threading
import uuid

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.files import digest, file_name, is_table, open_file, upload
from rosebatch.io.find_files import find_files
from rosebatch.io.piped import Copied
from rosebatch.io.reader import PromptReader


@pytest.fixture
def remote():
    """The root of a file system in memory that no other test uses."""
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture(params=["local", "remote"])
def folder(request, tmp_path, remote):
    """A folder with two input files and three files that must not be read."""
    root = str(tmp_path / "data") if request.param == "local" else remote
    with fsspec.open_files([f"{root}/{name}" for name in ("b.jsonl", "a.jsonl")], "wb", auto_mkdir=True) as files:
        for name, file in zip("ba", files, strict=True):
            file.write(f'{{"prompt":"{name}1"}}\n\n{{"prompt":"{name}2"}}\n'.encode())
    for name in ("_hidden.jsonl", ".part.jsonl", "readme.txt"):
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(b"none of ours")
    return root


def prompts(source):
    return [(row.index, row.where, row.prompt) for row in PromptReader(source, {})]


@pytest.mark.parametrize("pattern", ["", "/", "/*.jsonl", "/[ab].jsonl"])
def test_files_of_a_folder_in_the_order_of_their_names(folder, pattern):
    """All files are one input: rows count through, places name the file, hidden files are not read."""
    if pattern == "/*.jsonl":
        fsspec.filesystem(folder.partition("://")[0] if "://" in folder else "file").rm(f"{folder}/_hidden.jsonl")
    reader = PromptReader(folder + pattern, {})
    assert [path.rpartition("/")[2] for path in reader.paths] == ["a.jsonl", "b.jsonl"]
    assert reader.count() == (None if "://" in folder else 4)
    a, b = reader.paths
    expected = [(0, f"{a} line 1", "a1"), (1, f"{a} line 3", "a2"), (2, f"{b} line 1", "b1"), (3, f"{b} line 3", "b2")]
    assert prompts(folder + pattern) == expected


def test_a_single_file(folder):
    """Places do not name the only file, wherever it is."""
    assert prompts(f"{folder}/a.jsonl") == [(0, "line 1", "a1"), (1, "line 3", "a2")]


def test_ids_are_unique_over_all_files(tmp_path):
    """Two files with the same id must not give two results of that id."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt":"x","id":1}\n')
    assert list(PromptReader(str(tmp_path), {}))[1].error.code == "duplicate_id"


def test_parquet_files_are_one_table(tmp_path, remote):
    """The columns and rows of all files count, in the order of the files' names."""
    for root in (str(tmp_path / "data"), remote):
        for name, numbers in (("2.parquet", [2, 3]), ("1.parquet", [0, 1])):
            with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
                pq.write_table(pa.table({"prompt": [f"p{n}" for n in numbers], "n": numbers}), file)
        reader = PromptReader(root, {})
        assert (reader.count(), reader.schema.names) == (4, ["prompt", "n"])
        assert [row.metadata["n"] for row in reader] == [row["n"] for row, _ in reader.carried()] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "source", "message"),
    [
        (["a.txt"], "", "no files found; a folder needs .jsonl, .json, .csv, .parquet or .arrow files"),
        (["a.txt"], "/*.jsonl", "no files found; .*, a pattern must match some"),
        ([], "/none.jsonl", "no such file or folder"),
    ],
)
def test_sources_that_name_nothing(tmp_path, make, source, message):
    """The message says what would be accepted."""
    for name in make:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=re.escape(str(tmp_path) + source) + f": {message}"):
        find_files(str(tmp_path) + source)


@pytest.mark.parametrize("pattern", ["pipe.jsonl", "*.jsonl", ""])
def test_a_named_pipe(tmp_path, pattern):
    """The input is opened several times: the first look at a pipe took its rows, and the run found none."""
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    content = b'{"prompt":"a"}\n{"prompt":"b"}\n'
    writer = threading.Thread(target=pipe.write_bytes, args=[content])
    writer.start()
    reader = PromptReader(str(tmp_path / pattern), {})
    writer.join()
    assert not reader.is_batch
    assert [row.prompt for row in reader] == [row.prompt for row in reader] == ["a", "b"]
    assert (reader.count(), reader.digest()) == (2, hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("size", [0, 1, 2**20 + 7])
def test_a_pipe_is_copied_once(tmp_path, size):
    """Readers of the copy have places of their own: rows are read on a thread."""
    os.mkfifo(tmp_path / "pipe")
    content = os.urandom(size)
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[content])
    writer.start()
    copied = Copied(str(tmp_path / "pipe"))
    writer.join()
    with copied.open() as one, copied.open() as two:
        assert one.read(10) == content[:10]
        assert two.read() == content
        assert (one.read(), one.seek(-1, os.SEEK_END)) == (content[10:], size - 1) if size else one.read() == b""


def test_a_pipe_larger_than_the_temporary_folder(tmp_path, monkeypatch):
    """The message says what is full and what mends it."""
    os.mkfifo(tmp_path / "pipe")
    both_ends = os.open(tmp_path / "pipe", os.O_RDWR)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rosebatch.io.piped.shutil.copyfileobj", full)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(UserError, match=rf"pipe: .*No space left on device\); set TMPDIR .*{tmp_path}"):
        Copied(str(tmp_path / "pipe"))
    os.close(both_ends)


@pytest.mark.parametrize("name", ["b.jsonl.lz4", "b.orc", "b.xlsx", "b.parquet.zst"])
def test_data_of_a_folder_that_would_be_skipped(folder, name):
    """Its rows were missing from the results, exit code 0."""
    with fsspec.open(f"{folder}/{name}", "wb") as file:
        file.write(b"data")
    with pytest.raises(UserError, match=rf"{name} would not be read; convert .*, or give a pattern such as "):
        find_files(folder)
    assert len(find_files(f"{folder}/[ab].jsonl")) == 2


@pytest.mark.parametrize("name", ["b.jsonl", "year=2024/b.parquet", "b.CSV", "deep/er/b.jsonl.gz"])
def test_data_in_a_folder_of_the_folder(folder, name):
    """Other tools read all that is below a folder; here the rows were missing from the results, exit code 0."""
    with fsspec.open(f"{folder}/inner/{name}", "wb", auto_mkdir=True) as file:
        file.write(b"data")
    with pytest.raises(UserError, match=r": inner/ would not be read; give '.*/\*\.jsonl' or '.*/\*\*/\*\.jsonl'$"):
        find_files(folder)
    assert len(find_files(f"{folder}/[ab].jsonl")) == 2


@pytest.mark.parametrize("name", ["inner/tokenizer.json", "inner/a.png", "_temporary/b.jsonl", "inner/.cache/b.jsonl"])
def test_folders_of_the_folder_without_data(folder, name):
    """A model or pictures beside the prompts are no rows."""
    with fsspec.open(f"{folder}/{name}", "wb", auto_mkdir=True) as file:
        file.write(b"data")
    assert len(find_files(folder)) == 2


def test_many_files_that_would_be_skipped(tmp_path):
    """The message names the first ones and counts the others."""
    for number in range(8):
        (tmp_path / f"{number}.orc").touch()
    with pytest.raises(UserError, match=r"0.orc, 1.orc, 2.orc, 3.orc, 4.orc and 3 more would not be read"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("in.jsonl", b"\x04\x22\x4d\x18\x64\x40", "lz4"),
        ("in.xlsx", b"PK\x03\x04\x14\x00\x06\x00\x08\x00", "a zip archive or a spreadsheet"),
        ("in.orc", b"ORC", r"\.orc"),
    ],
)
@pytest.mark.parametrize("pattern", ["{}", "in.*"])
def test_files_that_hold_no_lines(tmp_path, name, content, kind, pattern):
    """A spreadsheet gave an empty result, others an error row for each of their lines of gibberish."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} is {kind}: only JSON, CSV, Parquet and Arrow are read"):
        PromptReader(str(tmp_path / pattern.format(name)), {})


@pytest.mark.parametrize(
    ("name", "content", "kind", "needed"),
    [
        ("in.jsonl", b"PAR1\x15\x04", "Parquet", "parquet"),
        ("in.jsonl.gz", gzip.compress(b"ARROW1\0\0", mtime=0), "Arrow", "arrow"),
        ("in.csv", b"PAR1\x15\x04", "Parquet", "parquet"),
        ("in.parquet", b"ARROW1\0\0", "Arrow", "arrow"),
        ("in.parquet", b'\n{"prompt":"a"}\n', "JSON", "jsonl"),
        ("in.arrow", b'[{"prompt":"a"}]', "JSON", "json"),
    ],
)
@pytest.mark.parametrize("pattern", ["{}", "in.*"])
def test_files_of_another_kind_than_their_names(tmp_path, name, content, kind, needed, pattern):
    """Parquet under the name of CSV was to be converted from Windows' code page, and JSON was unreadable Parquet."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} is {kind}, which needs --input-format {needed}$"):
        PromptReader(str(tmp_path / pattern.format(name)), {})


def test_stdin_that_holds_no_lines(monkeypatch):
    """The same for a spreadsheet on stdin."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"PK\x03\x04\x14\x00\n\x00")))
    with pytest.raises(UserError, match="stdin is a zip archive"):
        list(PromptReader("-", {}))


@pytest.mark.parametrize(("name", "kind"), [("in.json", "auto"), ("in.csv", "jsonl"), ("in.jsonl.gz", "auto")])
def test_lines_under_another_name(tmp_path, name, kind):
    """What holds JSONL is read, whatever its name; of a .csv the flag has to say so."""
    (tmp_path / name).write_bytes(b'{"prompt":"a"}\n')
    assert [row.prompt for row in PromptReader(str(tmp_path / name), {}, kind)] == ["a"]


def test_a_name_that_is_not_utf8(tmp_path):
    """An error row could not be written: its message had the name."""
    for name in (b"\xff.jsonl", b"a\x1b[31m\n.jsonl"):
        (tmp_path / os.fsdecode(name)).write_bytes(b'{"prompt":""}\n')
    wheres = [row.where for row in PromptReader(str(tmp_path), {})]
    assert wheres == [f"{tmp_path}/a\\x1b[31m .jsonl line 1", f"{tmp_path}/\\udcff.jsonl line 1"]


class Failing(io.RawIOBase):
    """A file whose file system has failed; such errors of fsspec have no errno."""

    def readable(self):
        return True

    def readinto(self, buffer):
        raise OSError("connection lost")


@pytest.mark.parametrize("read", [list, PromptReader.count, PromptReader.digest])
def test_a_file_that_fails_while_it_is_read(tmp_path, monkeypatch, read):
    """The message was "None" for the whole folder; count() and digest() raised OSError, which is no UserError."""
    (tmp_path / "a.jsonl").touch()
    for module in ("files", "input_files"):
        monkeypatch.setattr(f"rosebatch.io.{module}.open_file", lambda path: Failing())
    with pytest.raises(UserError, match=r"a\.jsonl: connection lost$"):
        read(PromptReader(str(tmp_path), {}))


@pytest.mark.parametrize("url", ["memory://none/none.jsonl", "nosuchsystem://a/b.jsonl"])
def test_urls_that_name_nothing(url):
    """A missing file and an unknown file system both give a UserError that names the URL."""
    with pytest.raises(UserError, match=url):
        PromptReader(url, {})


@pytest.mark.parametrize(
    ("path", "name", "table"),
    [
        ("a/b.jsonl", "b.jsonl", False),
        ("b.PARQUET", "b.PARQUET", True),
        ("s3://bucket/a/b.pq", "b.pq", True),
        ("https://host/a/b.parquet?Signature=a/b.jsonl&Expires=1", "b.parquet", True),
        ("what?.jsonl", "what?.jsonl", False),
    ],
)
def test_the_name_of_a_file(path, name, table):
    """The query of a presigned URL is not part of the name; a question mark in a local name is."""
    assert (file_name(path), is_table(path)) == (name, table)


def test_a_digest_is_of_contents_and_order(tmp_path, folder):
    """A copy of the files is the same input; other contents or another order are not."""
    a, b = find_files(folder)
    copy = tmp_path / "copy"
    with open_file(a) as file:
        copy.write_bytes(file.read())
    assert digest([str(copy)]) == digest([a]) != digest([b])
    assert digest([a, b]) == digest([str(copy), b]) != digest([b, a])


def test_upload(tmp_path, remote):
    """The contents arrive, and the local file is gone afterwards."""
    (tmp_path / "out").write_bytes(b"results")
    upload(tmp_path / "out", f"{remote}/out.jsonl")
    with open_file(f"{remote}/out.jsonl") as file:
        assert file.read() == b"results"
    assert not (tmp_path / "out").exists()


@pytest.fixture(
    params=[(None, "Connection refused"), (b"421 Too many users\r\n", "421 Too many users"), (b"", "EOFError")]
)
def unreachable(request):
    """The URL of a file on an FTP server that does not listen, or answers so, and the reason to be told."""
    answer, told = request.param
    with socket.create_server(("127.0.0.1", 0)) if answer is not None else socket.socket() as server:
        if answer is None:
            server.bind(("127.0.0.1", 0))
        else:
            threading.Thread(target=lambda: _answer(server, answer)).start()
        yield f"ftp://127.0.0.1:{server.getsockname()[1]}/a.jsonl", told


def _answer(server, answer):
    connection, _ = server.accept()
    with connection:
        connection.sendall(answer)


def test_a_file_system_that_cannot_be_reached(unreachable):
    """FTP connects when its file system is made: the error named no file, and was one of the run."""
    url, told = unreachable
    with pytest.raises(UserError, match=rf"^{re.escape(url)}: .*{told}$") as error:
        find_files(url)
    assert error.value.exit_code == 2


def test_an_upload_that_fails(unreachable, tmp_path):
    """What is no OSError ended the run as unexpected, and nothing said where its results are."""
    url, told = unreachable
    (tmp_path / "a").write_bytes(b"results")
    with pytest.raises(OSError, match=told):
        upload(tmp_path / "a", url)
    assert (tmp_path / "a").read_bytes() == b"results"
