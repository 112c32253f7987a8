"""``--shard`` and ``rosebatch merge``: several runs that know nothing of each other, and one output."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.command_errors import require_error
from tests.helpers.json_lines import write_lines


@pytest.fixture
def run(cli, model_folder, tmp_path):
    """Runs a shard of ``in.jsonl`` to ``out.jsonl``, or of other files."""

    def call(shard, *flags, source="in.jsonl", target="out.jsonl"):
        own = [] if shard is None else ["--shard", shard]
        paths = [tmp_path / source, "-o", tmp_path / target]
        return cli("generate", *paths, "--model", model_folder, "--quiet", "--max-tokens", 4, *own, *flags)

    return call


@pytest.fixture
def source(tmp_path):
    """200 rows, two of them bad."""
    rows: list[dict[str, Any]] = [{"id": i, "prompt": f"row {i}", "temperature": i % 2} for i in range(200)]
    rows[70]["prompt"] = ""
    rows[150]["id"] = 3
    return write_lines(tmp_path / "in.jsonl", rows)


def test_shards_give_the_bytes_of_one_run(run, cli, source, tmp_path):
    """Random numbers, ids and the order of rows belong to the whole input. The last shard has no row at all."""
    assert run(None).code == 3
    expected = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    assert [run(f"{number}/5").code for number in (2, 1, 5, 3, 4)] == [3, 0, 0, 3, 0]
    assert not (tmp_path / "out.jsonl").exists()
    result = cli("merge", source, "-o", tmp_path / "out.jsonl")
    assert (result.code, result.err) == (3, "200 rows, 2 failed\n")
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.jsonl.run", "in.jsonl", "out.jsonl"]


def test_errors_of_all_shards(run, cli, source, tmp_path):
    """They were left among the results, or only those of the last shard were kept."""
    assert run(None, "--errors", tmp_path / "bad.jsonl").code == 3
    expected = [(tmp_path / name).read_bytes() for name in ("out.jsonl", "bad.jsonl")]
    for number in (1, 2):
        assert run(f"{number}/2", "--errors", tmp_path / "bad.jsonl").code == 3
    assert cli("merge", source, "-o", tmp_path / "out.jsonl", "--errors", tmp_path / "bad.jsonl").code == 3
    assert [(tmp_path / name).read_bytes() for name in ("out.jsonl", "bad.jsonl")] == expected


def test_tables(run, cli, tmp_path):
    """Columns of the input are carried, from rows of all shards."""
    table = pa.table({"prompt": [f"row {i}" for i in range(150)], "when": pa.array(range(150), pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "in.parquet")
    files = {"source": "in.parquet", "target": "out.parquet"}
    assert run(None, "--result-column", "answer", **files).code == 0
    expected = (tmp_path / "out.parquet").read_bytes()
    for number in (1, 2):
        assert run(f"{number}/2", "--result-column", "answer", **files).code == 0
    assert cli("merge", tmp_path / "in.parquet", "-o", tmp_path / "out.parquet").code == 0
    assert (tmp_path / "out.parquet").read_bytes() == expected


def test_what_cannot_be_merged(run, cli, source, tmp_path):
    """An output with rows missing, or of two models, looks like any other."""

    def merge():
        result = cli("merge", source, "-o", tmp_path / "out.jsonl")
        assert result.code in (1, 2)
        assert not (tmp_path / "out.jsonl").exists()
        return result.err.removeprefix("rosebatch: error: ").strip().replace(f"{tmp_path}/", "")

    assert merge() == "out.jsonl: has no shards beside it, files such as out.jsonl.1-of-8.part"
    run("2/4")
    run("4/4")
    assert merge() == "out.jsonl: shards 1, 3 of 4 are missing"
    run("1/2")
    assert merge() == "out.jsonl: has shards of different runs: of 2 and of 4"
    (tmp_path / "out.jsonl.1-of-2.part").unlink()
    run("1/4")
    run("3/4", "--top-k", 3)
    parts = "out.jsonl.3-of-4.part and out.jsonl.1-of-4.part"
    assert merge() == f"{parts} are of different runs: --top-k was not given, is 3"
    part = tmp_path / "out.jsonl.3-of-4.part"
    part.unlink()
    run("3/4")
    content = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(content[:-2]))
    lost = sorted(json.loads(line)[0] + 1 for line in content[-2:])
    assert merge() == f"{part.name}: rows {lost[0]}, {lost[1]} are missing; run shard 3/4 again with --resume"
    assert run("3/4", "--resume").code == 3
    before = source.read_bytes()
    source.write_bytes(before + b'{"prompt":"x"}\n')
    assert merge() == "in.jsonl: is not the input of the shards, or has changed since"
    source.write_bytes(before)
    assert cli("merge", source, "-o", tmp_path / "out.jsonl").code == 3


def test_shards_and_other_flags(run, source, tmp_path, cli, model_folder):
    """A shard has no output of its own, and its part file is another one's than that of all rows."""
    result = cli("generate", source, "--model", model_folder, "--shard", "1/2")
    require_error(result, 2, "--shard needs an input file and an output file")
    require_error(run("0/2"), 2)
    assert run("1/2").code == 3
    require_error(run("1/2"), 2, "holds results of an earlier run")
    assert run("1/2", "--resume").code == 3
    assert run(None).code == 3
