"""``rosebatch generate`` into a folder of Parquet files, and from one."""

import json
import shutil
from unittest.mock import Mock

import fsspec
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset

from tests.helpers.command_errors import failed_rows, require_error

USAGE = 2
LINES = [{"prompt": f"row {i}", "max_tokens": 2, "late": None if i < 3 else "s"} for i in range(5)]
LINES[4] = {"prompt": ""}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_of_parts(generate, tmp_path):
    """Together the parts equal the single file, with one schema even if a column is null in the first parts."""
    assert generate(LINES, "-o", tmp_path / "one.parquet").code == 3
    result = generate(LINES, "-o", f"{tmp_path}/answers/", "--rows-per-file", 2)
    assert (result.code, result.out, result.err) == (3, "", failed_rows())
    assert names(tmp_path) == [".answers.run", ".one.parquet.run", "answers", "in.jsonl", "one.parquet"]
    parts = sorted((tmp_path / "answers").iterdir())
    assert [part.name for part in parts] == [f"part-0000{number}.parquet" for number in range(3)]
    expected = pq.read_table(tmp_path / "one.parquet")
    assert [pq.read_table(part).equals(expected.slice(2 * n, 2)) for n, part in enumerate(parts)] == [True] * 3
    assert dataset.dataset(tmp_path / "answers").to_table().equals(expected)


@pytest.mark.parametrize("name", ["answers/", "answers"])
def test_a_folder_that_is_there(generate, tmp_path, name):
    """Like a file it is replaced, with and without the slash; by default one part takes a million rows."""
    folder = tmp_path / "answers"
    folder.mkdir()
    for lines, limit in ((LINES, ["--rows-per-file", 1]), (LINES[:2], [])):
        assert generate(lines, "-o", f"{tmp_path}/{name}", *limit).code in (0, 3)
    assert names(folder) == ["part-00000.parquet"]
    assert names(tmp_path) == [".answers.run", "answers", "in.jsonl"]
    assert dataset.dataset(folder).to_table().column("index").to_pylist() == [0, 1]


def test_no_rows(generate, tmp_path):
    """A folder without a file would have no schema and could not be read."""
    assert generate([], "-o", f"{tmp_path}/answers/").code == 0
    table = pq.read_table(tmp_path / "answers" / "part-00000.parquet")
    assert (table.num_rows, table.column_names) == (0, ["index", "text", "finish_reason", "usage", "error"])


def test_parts_as_the_input_of_another_run(generate, cli, model_folder, tmp_path):
    """All parts must have the first one's columns. The folder cannot be the output too: its rows would be lost."""
    lines = [{**line, "question": line["prompt"]} for line in LINES]
    generate(lines, "-o", f"{tmp_path}/answers/", "--rows-per-file", 2, "--return-token-ids")
    flags = ["--model", model_folder, "--quiet", "--max-tokens", 1, "--result-column", "again"]
    flags += ["--prompt-column", "question"]
    for source in ("answers", "answers/", "answers/*.parquet"):
        result = cli("generate", tmp_path / source, *flags)
        rows = [json.loads(line) for line in result.out.split("\n")[:-1]]
        assert [row["again"]["index"] for row in rows] == [row["index"] for row in rows] == [0, 1, 2, 3, 4]
        assert [row["question"] for row in rows] == [line["prompt"] for line in LINES]
        assert [row["again"].get("error", {}).get("code") for row in rows] == [None] * 4 + ["empty_prompt"]
    before = {part: part.read_bytes() for part in (tmp_path / "answers").iterdir()}
    result = cli("generate", tmp_path / "answers", "-o", tmp_path / "answers", "--rows-per-file", 3, *flags)
    require_error(result, USAGE, "part-00000.parquet lies in the output")
    assert {part: part.read_bytes() for part in (tmp_path / "answers").iterdir()} == before
    result = cli("generate", tmp_path / "answers", "-o", f"{tmp_path}/again/", "--rows-per-file", 3, *flags)
    assert result.code == 3
    table = dataset.dataset(tmp_path / "again").to_table()
    assert names(tmp_path / "again") == ["part-00000.parquet", "part-00001.parquet"]
    assert table.column("question").to_pylist() == [line["prompt"] for line in LINES]
    assert table.column("late").to_pylist() == [line.get("late") for line in LINES]


def test_a_folder_with_something_else_in_it(generate, tmp_path):
    """Replacing it would delete the user's own files: refused before any work, nothing is touched."""
    for name in ("answers", "answers.tmp", "answers.old"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "part-00000.parquet").write_text("old")
        (folder / "thesis.tex").write_text("mine")
        told = f"{name}: holds thesis.tex, but a results folder may only hold part-NUMBER.parquet files"
        require_error(generate(LINES, "-o", f"{tmp_path}/answers/"), USAGE, told)
        assert names(tmp_path) == [name, "in.jsonl"]
        assert names(folder) == ["part-00000.parquet", "thesis.tex"]
        shutil.rmtree(folder)


def test_parts_of_another_tool(generate, tmp_path):
    """Spark's tables have similar names: they must not be taken for our results and replaced."""
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "part-00000-1c9e0f7a.snappy.parquet").write_text("theirs")
    told = "answers: holds part-00000-1c9e0f7a.snappy.parquet"
    require_error(generate(LINES, "-o", f"{folder}/"), USAGE, told)
    assert names(folder) == ["part-00000-1c9e0f7a.snappy.parquet"]


def test_a_file_of_the_name_of_the_folder(generate, tmp_path):
    """The slash asks for a folder: the file must not be overwritten."""
    (tmp_path / "answers").write_text("mine")
    require_error(generate(LINES, "-o", f"{tmp_path}/answers/"), USAGE, "answers: is a file; choose another folder")
    assert (tmp_path / "answers").read_text() == "mine"


def test_a_link_to_a_folder(generate, tmp_path):
    """The folder is replaced at its own place, where there is room; the link stays."""
    (tmp_path / "disk" / "answers").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "answers")
    assert generate(LINES[:1], "-o", f"{tmp_path}/link/").code == 0
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "disk") == [".answers.run", "answers"]
    assert names(tmp_path / "link") == ["part-00000.parquet"]


@pytest.mark.parametrize("target", ["-", None, "out.jsonl", "out.parquet", "answers"])
def test_rows_per_file_without_a_folder(generate, tmp_path, target):
    """The flag must not be ignored: the user would get one file of all rows."""
    output = [] if target is None else ["-o", target if target == "-" else tmp_path / target]
    result = generate(LINES, *output, "--rows-per-file", 5)
    require_error(result, USAGE, "--rows-per-file needs an output folder: -o FOLDER/")
    assert names(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("flags", [["--rows-per-file", 0], ["--errors", "errors.jsonl"]])
def test_what_a_folder_cannot_have(generate, tmp_path, flags):
    """Files of no rows, and error rows in another file, are refused."""
    require_error(generate(LINES, "-o", f"{tmp_path}/answers/", *flags), USAGE)
    assert names(tmp_path) == ["in.jsonl"]


def test_a_batch_is_written_as_jsonl(generate, tmp_path):
    """Answers of the API are not a table."""
    body = {"model": "m", "prompt": "a"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    told = "answers: an OpenAI batch, or an output beside --errors, is written as JSONL"
    require_error(generate([line], "-o", f"{tmp_path}/answers/"), USAGE, told)


@pytest.mark.parametrize("target", ["/", "..", "https://host/answers/", "memory://"])
def test_folders_that_cannot_be_written(generate, tmp_path, monkeypatch, target):
    """Nothing can be renamed there: found before any work, not after hours of it."""
    monkeypatch.chdir(tmp_path)
    require_error(generate(LINES, "-o", target), USAGE)
    assert names(tmp_path) == ["in.jsonl"]


def test_resume(generate, tmp_path, monkeypatch):
    """The part file is beside the folder; its rows are not run again, and the result is the same."""
    flags = ["-o", f"{tmp_path}/answers/", "--rows-per-file", 2]
    generate(LINES, *flags)
    expected = dataset.dataset(tmp_path / "answers").to_table()
    before = names(tmp_path / "answers")
    with monkeypatch.context() as patch:
        fail = Mock(side_effect=OSError(5, "Input/output error"))
        patch.setattr("rosebatch.job.open_output.replace_folder", fail)
        told = f"5 rows are saved in {tmp_path}/answers.part; rerun with --resume to continue"
        require_error(generate(LINES, *flags), 1, told)
    assert names(tmp_path) == [".answers.run", "answers", "answers.part", "in.jsonl"]
    require_error(generate(LINES, *flags), USAGE)
    assert names(tmp_path / "answers") == before
    with monkeypatch.context() as patch:
        patch.setattr("rosebatch.job.run._serve", Mock(side_effect=AssertionError))
        assert generate(LINES, *flags, "--resume").code == 3
    assert names(tmp_path) == [".answers.run", "answers", "in.jsonl"]
    assert dataset.dataset(tmp_path / "answers").to_table().equals(expected)


def test_a_folder_elsewhere(generate, tmp_path, monkeypatch):
    """Parts of a longer earlier output must not stay: a reader would take them for this one's."""
    monkeypatch.chdir(tmp_path)
    with fsspec.open("memory://bucket/answers/part-other.parquet", "wb") as file:
        file.write(b"another's")
    for size, parts in ((1, 5), (3, 2)):
        result = generate(LINES, "-o", "memory://bucket/answers/", "--rows-per-file", size, "--resume")
        assert (result.code, names(tmp_path)) == (3, ["in.jsonl"])
        found = [path.rpartition("/")[2] for path in fsspec.filesystem("memory").ls("/bucket/answers", detail=False)]
        assert sorted(found) == [*(f"part-0000{number}.parquet" for number in range(parts)), "part-other.parquet"]
    with fsspec.open("memory://bucket/answers/part-00001.parquet", "rb") as file:
        assert pq.read_table(file).column("index").to_pylist() == [3, 4]
