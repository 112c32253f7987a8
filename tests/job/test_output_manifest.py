"""A finished output that is known again, and outputs of the formats that inputs have."""

import csv
import errno
import gzip
import json
import os
import re
import uuid
from functools import partial
from unittest.mock import Mock

import fsspec
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError, UserError
from rosebatch.io import placement
from rosebatch.io.parquet_types import as_json
from rosebatch.job.config import JobConfig
from rosebatch.job.merge import merge_shards
from tests.helpers.json_lines import read_lines, write_lines
from tests.job.fake_model import FakeModel

ROWS = [{"prompt": f"row {number}", "max_tokens": 2, "x": number} for number in range(5)] + [{"prompt": "", "x": 5}]


_DAY = r"19(69|70)-[0-9-]{5}"


@pytest.fixture
def run(job, tmp_path):
    """Runs the job; returns its result, and how many steps the model took."""
    write_lines(tmp_path / "in.jsonl", ROWS)

    def run(output="out.jsonl", given="in.jsonl", **options):
        steps = []
        target = f"{tmp_path / output}/" if output == "answers" else output if "://" in output else tmp_path / output
        options = {"model": FakeModel(before_step=steps.append), "resume": True} | options
        return job.run_file(tmp_path / given, target, **options)[0], len(steps)

    return run


def contents(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_a_disk_that_is_full_once_the_output_is_there(run, tmp_path, monkeypatch):
    """The message named a file that nobody asked for, and a temporary one stayed."""
    synced = placement.sync

    def full(path):
        if path.name == ".out.jsonl.tmp":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(path)

    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"No space left .*out.jsonl is whole"),
    ):
        patch.setattr(placement, "sync", full)
        run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.part"]
    assert run()[1] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.jsonl.run", "in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("output", "options"),
    [("out.jsonl", {}), ("out.jsonl.gz", {}), ("out.parquet", {}), ("answers", {}), ("answers", {"rows_per_file": 2})],
)
def test_a_finished_output_is_not_computed_again(run, tmp_path, capsys, output, options):
    """A pipeline that always passes --resume started over; the exit code is that of the run."""
    run = partial(run, **options)
    first, steps = run(output)
    assert steps > 0
    before = contents(tmp_path)
    assert tmp_path / f".{output}.run" in before
    again, steps = run(output, quiet=False)
    assert (steps, again.num_failed, again.report) == (0, first.num_failed, {})
    name = f"{output}/" if output == "answers" else output
    assert capsys.readouterr().err.endswith(f"{name} is already finished: 6 rows, 1 failed, nothing to do\n")
    assert contents(tmp_path) == before


def test_a_report_that_is_not_written_is_told(run, tmp_path, capsys):
    """--report was left out, and nothing said so."""
    run()
    run(report=[tmp_path / "report.json"], quiet=False)
    told = capsys.readouterr().err
    assert told.endswith(" is already finished: 6 rows, 1 failed, nothing to do; no report is written\n")
    assert not (tmp_path / "report.json").exists()


def test_without_a_manifest_it_starts_over(run, tmp_path, capsys, monkeypatch):
    """An output of an older version, or a copy of one, is replaced as before; now a line says so."""
    run()
    monkeypatch.setattr("rosebatch.job.run.print_report", Mock())
    (tmp_path / ".out.jsonl.run").unlink()
    os.utime(tmp_path / "out.jsonl", (0, 0))
    _, steps = run(quiet=False)
    assert steps > 0
    told = rf"out\.jsonl exists \(of {_DAY} [0-9:]{{8}}\), and is replaced at the end of this run\n"
    assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize("output", ["out.jsonl", "answers"])
def test_a_run_that_replaces_an_output_says_so(run, tmp_path, capsys, monkeypatch, output):
    """Hours of results were replaced without a word."""
    monkeypatch.setattr("rosebatch.job.run.print_report", Mock())
    run(output, quiet=False)
    assert "replaced" not in capsys.readouterr().err
    os.utime(tmp_path / output, (0, 0))
    assert run(output, resume=False, quiet=False)[1] > 0
    told = rf"exists \(6 rows of {_DAY} [0-9:]{{8}}\), and is replaced at the end of this run; --resume would keep it"
    assert re.search(told, capsys.readouterr().err)
    run(output, resume=False)
    assert capsys.readouterr().err == ""


def test_a_run_with_stop_strings_is_known_again(run):
    """They are a tuple, and a list in the manifest: --resume refused every run with --stop as another one."""
    options = {"sampling": {"stop": ("zzzz",), "stop_token_ids": (3,)}}
    assert run(**options)[1] > 0
    assert run(**options)[1] == 0


def test_another_run(run):
    """The message names the difference, as that of a part file does."""
    run()
    told = r"out.jsonl is finished, but of another run: --seed was not given, is 3\. Leave out --resume"
    with pytest.raises(FlagError, match=told):
        run(seed=3)
    assert run(seed=3, resume=False)[1] > 0
    assert run(seed=3)[1] == 0


def test_other_files_in_a_folder(run, tmp_path):
    """--rows-per-file was ignored where the folder was finished: its files had other numbers of rows."""
    run("answers", rows_per_file=2)
    with pytest.raises(FlagError, match=r"of another run: --rows-per-file was 2, is 4\. Leave out --resume"):
        run("answers", rows_per_file=4)
    assert run("answers", rows_per_file=4, resume=False)[1] > 0
    assert len(list((tmp_path / "answers").iterdir())) == 2


def test_another_input(run, tmp_path):
    """More rows are another input."""
    run()
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"prompt":"more"}\n')
    with pytest.raises(FlagError, match="of another run: the content of the input differs"):
        run()


@pytest.mark.parametrize("name", ["out.jsonl", "failed.jsonl"])
def test_an_output_that_has_changed(run, tmp_path, name):
    """A row that somebody added or lost would pass for ours."""
    run(errors=str(tmp_path / "failed.jsonl"))
    assert run(errors=str(tmp_path / "failed.jsonl"))[1] == 0
    (tmp_path / name).write_text("x")
    with pytest.raises(FlagError, match=r"changed.*Leave out --resume"):
        run(errors=str(tmp_path / "failed.jsonl"))


def test_errors_that_are_gone(run, tmp_path):
    """They are a part of the output."""
    run(errors=str(tmp_path / "failed.jsonl"))
    (tmp_path / "failed.jsonl").unlink()
    with pytest.raises(FlagError, match=r"failed\.jsonl: the error rows are missing"):
        run(errors=str(tmp_path / "failed.jsonl"))


@pytest.mark.parametrize("now", [None, "failed.jsonl", "memory://failed.jsonl"])
@pytest.mark.parametrize("before", [None, "failed.jsonl", "memory://failed.jsonl", "pipe"])
def test_error_rows_that_went_elsewhere(run, tmp_path, before, now):
    """They were nowhere to be found, and --resume said that there was nothing to do."""
    os.mkfifo(tmp_path / "pipe")
    # A reader, so that the run need not wait for one.
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    def named(errors):
        return errors if errors is None or "://" in errors else str(tmp_path / errors)

    run(errors=named(before))
    if before == now:
        assert run(errors=named(now))[1] == 0
    else:
        with pytest.raises(FlagError, match="the error rows are missing, went elsewhere or have changed"):
            run(errors=named(now))
    os.close(reader)


def test_error_rows_at_a_url(run, tmp_path):
    """The manifest looked for them in the working directory: each run failed at its end, also with --resume."""
    url = f"memory://{uuid.uuid4().hex}/failed.jsonl"
    assert run(errors=url)[0].num_failed == 1
    assert run(errors=url)[1] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", ".out.jsonl.run"}


def test_error_rows_of_two_runs_at_urls(run, tmp_path, monkeypatch):
    """Both were made in the working directory under one name, and each run could send the other's rows."""
    monkeypatch.chdir(tmp_path)
    other = placement.beside(tmp_path / "failed.jsonl")
    other.write_text("another run's")
    url = f"memory://{uuid.uuid4().hex}/failed.jsonl"
    run(errors=url)
    with fsspec.open(url) as file:
        assert len(file.read().splitlines()) == 1
    assert other.read_text() == "another run's"


@pytest.mark.parametrize("begun", [None, "yesterday", 10**30])
def test_a_damaged_manifest(run, tmp_path, capsys, monkeypatch, begun):
    """A time that is none was unexpected, please report it."""
    monkeypatch.setattr("rosebatch.job.run.print_report", Mock())
    run()
    manifest = tmp_path / ".out.jsonl.run"
    found = json.loads(manifest.read_bytes())
    found["run"]["created"] = begun
    manifest.write_text(json.dumps(found))
    os.utime(tmp_path / "out.jsonl", (0, 0))
    assert run(resume=False, quiet=False)[1] > 0
    assert re.search(rf"exists \(6 rows of {_DAY} ", capsys.readouterr().err)


def test_an_empty_folder_is_not_replaced(run, tmp_path, capsys, monkeypatch):
    """It was said to exist, and to be replaced, as if it held results."""
    monkeypatch.setattr("rosebatch.job.run.print_report", Mock())
    (tmp_path / "answers").mkdir()
    run("answers", quiet=False)
    assert "replaced" not in capsys.readouterr().err


def edit_manifest(path, changes):
    """Change the fields of a manifest; ``...`` leaves one out."""
    found = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))


def test_a_manifest_of_a_later_version(run, tmp_path):
    """It may have further fields, also of the run: they are a difference, and no traceback."""
    run()
    path = tmp_path / ".out.jsonl.run"
    edit_manifest(path, {"later": {"x": [1]}})
    assert run()[1] == 0
    edit_manifest(path, {"run": json.loads(path.read_bytes())["run"] | {"later": {"deep": [1]}, "columns": 3}})
    told = r"of another run: --columns was 3, is not given; --deep was \[1\], is not given; .*--keep-prompt"
    with pytest.raises(FlagError, match=told):
        run()


@pytest.mark.parametrize("changes", [{"failed": ...}, {"run": ...}, {"output": {"sha": "x"}}, {"rows": "6"}])
def test_a_manifest_of_another_version(run, tmp_path, capsys, monkeypatch, changes):
    """One with fewer fields, or fields of other types, was called a foreign file: not even a new run could start."""
    monkeypatch.setattr("rosebatch.job.run.print_report", Mock())
    run()
    edit_manifest(tmp_path / ".out.jsonl.run", changes)
    told = r"out\.jsonl is finished, but another version of rosebatch wrote .*\.out\.jsonl\.run\. Leave out --resume"
    with pytest.raises(FlagError, match=told):
        run()
    assert run(resume=False, quiet=False)[1] > 0
    assert "out.jsonl exists (of " in capsys.readouterr().err
    assert run()[1] == 0


def test_an_output_of_two_runs_is_finished_too(run, tmp_path, capsys):
    """It had no manifest: the next --resume computed all of it again. The line says that it is of several runs."""
    left = [None]
    with pytest.raises(IndexError):
        run(model=FakeModel(before_step=lambda plan: left.pop()), limits={"seqs": 2})
    assert run(seed=3, force_resume=True, limits={"seqs": 2})[0].report["resumed"] > 0
    assert run(seed=3, quiet=False)[1] == 0
    told = "6 rows, 1 failed, nothing to do; --force-resume made it of several runs\n"
    assert capsys.readouterr().err.endswith(told)
    with pytest.raises(FlagError, match=r"--seed was 3, is not given"):
        run()


def test_a_foreign_file_of_that_name(run, tmp_path):
    """It is nobody's to replace."""
    (tmp_path / ".out.jsonl.run").write_text('{"mine": 1}')
    with pytest.raises(FlagError, match=r"\.out\.jsonl\.run: is no manifest of rosebatch"):
        run()


def long_name(size):
    return "o" * (size - 6) + ".jsonl"


@pytest.mark.parametrize("size", [246, 250])
def test_a_name_with_just_enough_room(run, tmp_path, size):
    """All rows were computed, then the run failed with a bare OSError over the manifest."""
    name = long_name(size)
    result, _ = run(name)
    assert (result.num_failed, {path.name for path in tmp_path.iterdir()}) == (1, {"in.jsonl", name, f".{name}.run"})
    assert run(name)[1] == 0


def test_a_name_that_is_too_long(run, tmp_path):
    """It failed at the end of the run, and left its part file: --resume failed too."""
    with pytest.raises(UserError, match=r"jsonl: File name too long"):
        run(long_name(251))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["out.arrow.zst", "out.parquet.gz", "out.jsonl.lz4", "out.ZIP", "out.xlsx"])
@pytest.mark.parametrize("flag", ["output", "errors"])
def test_formats_that_are_not_written(run, tmp_path, name, flag):
    """Lines of JSON in a file called .xlsx or .zip helped nobody."""
    options = {"output": name} if flag == "output" else {"errors": str(tmp_path / name)}
    with pytest.raises(FlagError, match=rf"{name}: is written as JSONL.* \(also .gz, .zst, .bz2, .xz\)"):
        run(**options)


@pytest.mark.parametrize("name", ["failed.csv", "failed.tsv.gz", "failed.parquet"])
def test_error_rows_are_no_table(run, tmp_path, name):
    """They are lines, whatever the output is."""
    with pytest.raises(FlagError, match=rf"--errors .*{name}: is written as JSONL \(also"):
        run(errors=str(tmp_path / name))


def test_compressed_output_has_the_lines_of_a_plain_one(run, tmp_path):
    """The error rows too; both must be whole."""
    run("out.jsonl", errors=str(tmp_path / "failed.jsonl"))
    run("packed.jsonl.gz", errors=str(tmp_path / "failed.jsonl.gz"))
    assert gzip.decompress((tmp_path / "packed.jsonl.gz").read_bytes()) == (tmp_path / "out.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "failed.jsonl.gz").read_bytes()) == (tmp_path / "failed.jsonl").read_bytes()


def test_compressed_output_at_a_url(run, tmp_path, monkeypatch):
    """It is made in the working directory, then moved."""
    monkeypatch.chdir(tmp_path)
    url = f"memory://{uuid.uuid4().hex}/out.jsonl.gz"
    run(url)
    run("out.jsonl")
    with fsspec.open(url, compression="gzip") as file:
        assert file.read() == (tmp_path / "out.jsonl").read_bytes()


def test_the_errors_of_a_compressed_batch(run, tmp_path):
    """Named like the output, and compressed like it."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
    bad = line | {"custom_id": "b", "body": {}}
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress((json.dumps(line) + "\n" + json.dumps(bad)).encode()))
    run("answers.jsonl.gz", "in.jsonl.gz")
    assert b'"custom_id":"b"' in gzip.decompress((tmp_path / "answers.errors.jsonl.gz").read_bytes())


def test_shards_of_a_compressed_input_with_named_columns(run, tmp_path):
    """The merge reads the input as the shards did: names are in their manifests."""
    rows = [{"q": f"row {number}", "text": 1, "k": number, "max_tokens": 2} for number in range(150)]
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    run("out.parquet")
    options = {"prompt_column": "q", "columns": ["k"], "given": "q.jsonl.gz"}
    for number in (1, 2):
        run("out.parquet", shard=f"{number}/2", **options)
    assert merge_shards(JobConfig(input=str(tmp_path / "q.jsonl.gz"), output=str(tmp_path / "out.parquet"))) == (150, 0)
    # Merged or not, it is of the same run.
    assert run("out.parquet", **options)[1] == 0
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names[0] == "k"
    assert table["k"].to_pylist() == list(range(150))
    run("out.parquet", shard="1/2", **options)
    with pytest.raises(FlagError, match=r"--prompt-column was q, is k"):
        run("out.parquet", shard="1/2", **options | {"prompt_column": "k"})


@pytest.mark.parametrize("flag", ["prompt_column", "id_column", "columns"])
def test_a_batch_has_no_columns(run, tmp_path, flag):
    """Its requests have names of their own."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (tmp_path / "b.jsonl").write_text(json.dumps(line))
    with pytest.raises(FlagError, match="no meaning for an OpenAI batch"):
        run("o.jsonl", "b.jsonl", **{flag: "x"})


def test_a_folder_of_several_formats_to_parquet(run, tmp_path):
    """Carried columns get one type for all rows, as those of JSONL do."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    pq.write_table(pa.table({"prompt": ["a"], "k": pa.array([1], pa.int8())}), folder / "1.parquet")
    (folder / "2.jsonl").write_text('{"prompt":"b","k":2.5}\n')
    (folder / "3.csv").write_text("prompt,z\nc,9\n")
    run("out.parquet", "mixed")
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["k"].to_pylist() == [1.0, 2.5, None]
    assert table["z"].to_pylist() == [None, None, "9"]
    assert table["prompt"].to_pylist() == ["a", None, "c"]


@pytest.mark.parametrize("name", ["out.arrow", "out.feather", "out.ipc"])
def test_arrow_in_and_out(run, tmp_path, name):
    """It has the table of a Parquet file, with the types of the input; with an exit code for failed rows."""
    table = pa.table({"prompt": ["a", "b"], "day": pa.array([1, 2], pa.date32()), "max_tokens": [2, 2]})
    feather.write_feather(table, str(tmp_path / "in.feather"))
    pq.write_table(table, tmp_path / "in.parquet")
    run(name, "in.feather")
    run("out.parquet", "in.parquet")
    found = feather.read_table(str(tmp_path / name))
    assert found.equals(pq.read_table(tmp_path / "out.parquet"))
    assert found.schema.field("day").type == pa.date32()
    assert run(name, "in.feather")[1] == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_csv_has_the_values_of_jsonl(run, tmp_path, kind):
    """Carried columns, several completions and error rows too; in one run, or in shards that are merged."""
    rows = [{"prompt": f"row {number}", "max_tokens": 2, "n": 1 + number % 2, "k": [number]} for number in range(150)]
    rows[7] |= {"prompt": "", "k": None}
    write_lines(tmp_path / "in.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    given = f"in.{kind}"
    run("out.jsonl", given)
    run("whole.csv", given)
    for number in (1, 2):
        run("out.csv", given, shard=f"{number}/2")
    assert merge_shards(JobConfig(input=str(tmp_path / given), output=str(tmp_path / "out.csv"))) == (150, 1)
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    with (tmp_path / "out.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    for line, cells in zip(read_lines(tmp_path / "out.jsonl"), found, strict=True):
        texts = {name: value if isinstance(value, str) else as_json(value) for name, value in line.items()}
        expected = {name: text for name, text in texts.items() if text not in ("null", "")}
        assert {name: cell for name, cell in cells.items() if cell} == expected


def test_a_batch_is_not_written_as_csv(run, tmp_path):
    """Its answers have a form of their own, which other tools read."""
    (tmp_path / "b.jsonl").write_text('{"custom_id":"a","method":"POST","url":"/v1/completions","body":{}}')
    with pytest.raises(FlagError, match=r"o\.csv: an OpenAI batch, .* is written as JSONL"):
        run("o.csv", "b.jsonl")


@pytest.mark.parametrize("output", ["out.parquet", "answers", "out.arrow"])
def test_types_that_the_output_cannot_hold(run, tmp_path, output):
    """All rows were computed first, and the file could not be written then. Bytes of no size, and names that are no
    text, were unexpected errors, as were booleans of a byte; lists of no size were a signal.
    """
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    others = {"e": pa.array([{}], pa.struct([])), "b": pa.array([b""], pa.binary(0)), "s": [{"NAME": 1}]}
    others["l"] = pa.array([None], pa.struct([("a", pa.list_(pa.int8(), 0))]))
    others["t"] = pa.array([None], pa.bool8())
    table = pa.table({"prompt": ["a"], "u": union, "n": [1], **others})
    with pa.BufferOutputStream() as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "in.arrow").write_bytes(sink.getvalue().to_pybytes().replace(b"NAME", b"NAM\xff"))
    refused = ["u (sparse_union<0: int64=0>)", "s (struct<NAM\ufffd: int64>)"]
    if output != "out.arrow":
        refused[1:1] = ["e (struct<>)", "b (fixed_size_binary[0])"]
        refused.append("l (struct<a: fixed_size_list<item: int8>[0]>)")
    refused.append("t (extension<arrow.bool8>)")
    with pytest.raises(FlagError, match=re.escape(f"no type for {', '.join(refused)}: leave them out with --columns")):
        run(output, "in.arrow")
    assert not (tmp_path / f"{output}.part").exists()
    assert run(output, "in.arrow", columns="n")[0].num_failed == 0


def test_a_damaged_input_leaves_no_output(run, tmp_path):
    """What came before the damage would pass for all."""
    content = gzip.compress(b"".join(b'{"prompt":"%d","max_tokens":1}\n' % number for number in range(500)))
    (tmp_path / "in.jsonl.gz").write_bytes(content[:-30])
    with pytest.raises(UserError, match=r"in\.jsonl\.gz: damaged gzip data: it ends too early"):
        run("out.jsonl", "in.jsonl.gz")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("out.txt", True),
        ("out", True),
        ("out.json", True),
        ("out.parqet.gz", True),
        ("out.NDJSON", False),
        ("o.csv", False),
    ],
)
def test_lines_under_another_name(run, tmp_path, capsys, monkeypatch, output, told):
    """A misspelt .parquet was hours of JSONL, without a word."""
    monkeypatch.setattr("rosebatch.job.run.print_report", Mock())
    run(output, quiet=False)
    line = f"rosebatch: {tmp_path / output} is written as JSONL, an object on each line; .parquet, .arrow, .csv or a /"
    assert (line in capsys.readouterr().err) == told
    run("2.jsonl", errors=str(tmp_path / "bad.txt"), quiet=False)
    assert f"{tmp_path / 'bad.txt'} is written as JSONL, an object on each line\n" in capsys.readouterr().err
