"""Input fields of the names of a result's: refused before the run, or kept beside a result in one field of its own."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError
from rosebatch.io.reader import PromptReader
from rosebatch.io.result_names import RESULT_FIELDS
from tests.helpers.json_lines import read_lines, write_lines
from tests.job.fake_model import FakeModel

EARLIER = {"text": "gold", "index": 7, "usage": None, "error": "none"}
EARLIER |= {"finish_reason": 1, "choices": [], "token_ids": 0}


@pytest.fixture
def run(job, tmp_path):
    """Runs rows of a file; gives the results."""

    def run_rows(*rows, source="in.jsonl", target="out.jsonl", **options):
        at = tmp_path / target
        job.run_file(write_lines(tmp_path / source, rows), at, model=FakeModel({"x": b"answer"}), **options)
        return read_lines(at) if at.suffix == ".jsonl" else pq.read_table(at).to_pylist()

    return run_rows


@pytest.mark.parametrize("name", RESULT_FIELDS)
def test_a_field_of_the_name_of_a_result(run, tmp_path, name):
    """It was overwritten or dropped without a word. Nothing is run, and the message says how to keep it."""
    with pytest.raises(FlagError, match=rf"in\.jsonl, line 2: .* too: {name}\. Give --result-column NAME"):
        run({"prompt": "x"}, {"prompt": "x", name: ["old"]})
    assert not (tmp_path / "out.jsonl").exists()
    assert not (tmp_path / "out.jsonl.part").exists()


def test_all_names_are_in_the_message(run):
    """Else each run would find one more."""
    lines = [{"prompt": "x"}, {"prompt": "x", "usage": 1}, {"prompt": "x", "index": 1}, {"prompt": "x", "usage": 2}]
    with pytest.raises(FlagError, match=r"line 3: .*: index, usage\. "):
        run(*lines)


def test_escaped_names_collide_too(run, tmp_path, job):
    """JSON may spell any letter by its number."""
    (tmp_path / "in.jsonl").write_text('\ufeff{"prompt": "x", "te\\u0078t": 1}\n')
    with pytest.raises(FlagError, match="too: text"):
        job.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def test_fields_of_requests_are_no_collision(run):
    """Requests and results both have logprobs, and a name inside of another field is not the row's."""
    lines = [{"prompt": "x", "logprobs": 0, "prompt_logprobs": None}, {"prompt": "x", "a": {"text": "index"}}]
    first, second = run(*lines)
    assert len(first["logprobs"]) == 7
    assert second["a"] == {"text": "index"}


def test_lines_that_are_broken_fail_by_themselves(run, tmp_path, job):
    """Looking for names must not end the job, or find what no row has."""
    lines = [b"{", b"5", b"[]", b'"text"', b'{"prompt": "x", "text', b"\xff", b"[" * 5000, b'{"prompt": "x"}', b""]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    result, _ = job.run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert result.num_failed == 7


def test_a_result_column_keeps_everything(run):
    """One object for the result; the fields of all names beside it, in error rows too."""
    good, bad = run({"prompt": "x", "id": "a", **EARLIER}, {"id": "b", **EARLIER}, result_column="out")
    result = good.pop("out")
    assert good == {"id": "a", **EARLIER}
    assert {**result, "usage": None} == {"index": 0, "text": "answer", "finish_reason": "stop", "usage": None}
    assert bad.pop("out")["error"]["code"] == "missing_prompt"
    assert bad == {"id": "b", **EARLIER}


@pytest.mark.parametrize("name", ["out", "id", "prompt"])
def test_a_result_column_that_the_input_has(run, name):
    """It must not overwrite a field either."""
    with pytest.raises(FlagError, match=f"--result-column {name}: the input has a field of this name"):
        run({"prompt": "x", "id": 1, "out": 1}, result_column=name)


def test_a_result_column_in_parquet(run, tmp_path, job):
    """A struct of the result's types, beside the input's columns with theirs."""
    table = pa.table({"prompt": ["x", ""], "text": pa.array([1, 2], pa.int8()), "logprobs": [0, None]})
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(FlagError, match=r"in\.parquet: .* too: text\. "):
        job.run_file(tmp_path / "in.parquet", tmp_path / "out.parquet")
    job.run_file(tmp_path / "in.parquet", tmp_path / "out.parquet", result_column="out")
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.select(table.column_names) == table
    assert written.column_names == [*table.column_names, "out"]
    names = [field.name for field in written.schema.field("out").type]
    assert names == ["index", "text", "finish_reason", "usage", "logprobs", "error"]
    good, bad = written.column("out").to_pylist()
    assert (good["index"], good["error"], bad["error"]["code"], bad["text"]) == (0, None, "empty_prompt", None)
    assert len(good["logprobs"]) == good["usage"]["completion_tokens"]


@pytest.mark.parametrize("kind", [pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 1)])
def test_lists_of_any_kind_are_those_of_results(tmp_path, kind):
    """Tables of other libraries have lists of other types."""
    pq.write_table(pa.table({"prompt": ["x"], "logprobs": pa.array([[1]], kind)}), tmp_path / "in.parquet")
    with pytest.raises(FlagError, match="too: logprobs"):
        PromptReader(str(tmp_path / "in.parquet"), {}).require_free_names()


def test_a_result_column_of_jsonl_in_parquet(run):
    """Carried fields get types of their own, whatever their names."""
    rows = {"prompt": "x", "text": 1.5}, {"prompt": "x", "index": "i"}
    first, second = run(*rows, target="out.parquet", result_column="out")
    assert (first["text"], first["index"], first["out"]["text"], first["out"]["index"]) == (1.5, None, "answer", 0)
    assert (second["text"], second["index"], second["out"]["index"]) == (None, "i", 1)


def test_a_folder_of_parquet_with_a_result_column(job, tmp_path):
    """All its files have the same struct."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "text": i, "max_tokens": 1} for i in range(3)])
    job.run_file(source, f"{tmp_path}/out/", result_column="out", rows_per_file=2)
    tables = [pq.read_table(path) for path in sorted((tmp_path / "out").iterdir())]
    assert [table.column("text").to_pylist() for table in tables] == [[0, 1], [2]]
    assert tables[0].schema == tables[1].schema


def test_results_as_the_next_input(run, tmp_path):
    """Answers of answers: each run has a column of its own."""
    first = run({"prompt": "x"}, result_column="one")
    with pytest.raises(FlagError, match="--result-column one: the input has"):
        run(*[{**row, "prompt": "x"} for row in first], result_column="one")
    (second,) = run(*[{**row, "prompt": "x"} for row in first], result_column="two")
    assert second["one"] == second["two"] == first[0]["one"]


def test_rows_of_stdin_fail_one_by_one(tmp_path):
    """They cannot be looked at before the run."""
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", **each} for each in ({}, {"text": "old"}, {"out": 1})])
    rows = list(PromptReader(str(path), {}))
    assert [getattr(row, "error", None) and row.error.code for row in rows] == [None, "name_collision", None]
    assert "--result-column NAME" in rows[1].error.message
    rows = list(PromptReader(str(path), {}, result_column="out"))
    assert [getattr(row, "error", None) and row.error.code for row in rows] == [None, None, "name_collision"]
    assert rows[2].metadata == {}


def test_another_result_column_is_another_run(job, tmp_path):
    """A resumed run would else mix rows of two forms."""
    source, target = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}] * 50), tmp_path / "out.jsonl"
    steps = iter(range(60))

    def stop(plan):
        if next(steps, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run_file(source, target, model=FakeModel(before_step=stop), limits={"seqs": 1}, sampling={"max_tokens": 2})
    with pytest.raises(FlagError, match="--result-column was not given, is out"):
        job.run_file(source, target, resume=True, result_column="out", sampling={"max_tokens": 2})


def test_an_openai_batch_has_no_result_column(job, tmp_path):
    """Its answers have a form of their own, and no field collides."""
    request = {"custom_id": "a", "body": {"prompt": "x", "max_tokens": 1}, "text": "old", "usage": 1}
    source = write_lines(tmp_path / "in.jsonl", [request])
    job.run_file(source, tmp_path / "out.jsonl")
    with pytest.raises(FlagError, match="--result-column has no meaning"):
        job.run_file(source, tmp_path / "out.jsonl", result_column="out")


def test_an_empty_name(run):
    """It would be the name of a column."""
    with pytest.raises(FlagError, match="--result-column needs a name"):
        run({"prompt": "x"}, result_column="")
