"""``--resume``, what it refuses, and how a signal ends a run."""

import datetime
import json
import signal
from itertools import count

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import UserError
from rosebatch.engine.engine import Engine
from rosebatch.io.output import FileOutput
from tests.helpers.checkout import environment, python_path
from tests.helpers.command_errors import failed_rows, require_error
from tests.helpers.forked_jobs import ForkedJob
from tests.helpers.json_lines import write_lines
from tests.helpers.slow_steps import count_lines, part_of, slow_steps
from tests.helpers.waiting import until

FLAGS = ["--device", "cpu", "--quiet", "--temperature", 1, "--max-num-seqs", 4]


ROWS = 40


@pytest.fixture
def source(tmp_path):
    """Rows with different lengths, so that they do not all end at once."""
    return write(tmp_path, ROWS)


def write(folder, rows):
    lines = [{"prompt": f"row {i}", "max_tokens": 2 + i * 7 % 17, "id": f"id {i}"} for i in range(rows)]
    lines[5] = {"prompt": ""}
    return write_lines(folder / "in.jsonl", lines)


@pytest.fixture
def end_early(model_folder, tmp_path):
    """Runs the command in its own process and sends it a signal once it has some results."""

    def run(source, target, number):
        slow_steps(tmp_path, target, 10)
        command = ["generate", source, "-o", target, "--model", model_folder, *FLAGS]
        job = ForkedJob(list(map(str, command)), environment(PYTHONPATH=python_path(tmp_path)), tmp_path)
        part = part_of(target)

        def has_rows():
            assert job.poll() is None
            return count_lines(part) > 10

        until(has_rows)
        job.send_signal(number)
        return job.wait(), (tmp_path / "stderr").read_text(), count_lines(part) - 1

    return run


@pytest.fixture
def break_off(cli, model_folder, monkeypatch):
    """Runs the command in this process, and ends it in the middle."""

    def run(source, target):
        steps, step = count(), Engine.step

        def step_or_end(self):
            if next(steps) == 50:
                raise UserError("broken off")
            return step(self)

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", step_or_end)
            assert "broken off" in cli("generate", source, "-o", target, "--model", model_folder, *FLAGS).err
        assert target.with_name(f"{target.name}.part").read_bytes().count(b"\n") > 9

    return run


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough)]
)
def test_a_signal_and_then_resume(cli, source, end_early, model_folder, tmp_path, number, code):
    """Finished rows are kept, the message says how to continue, and the output equals that of an unbroken run."""
    target, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    exit_code, message, rows = end_early(source, target, number)
    assert exit_code == code
    name = signal.Signals(number).name
    expected = f"ended by {name}: {rows} rows are saved in {target}.part; rerun with --resume to continue"
    assert message == f"rosebatch: error: {expected}\n"
    assert not target.exists()
    command = ["generate", source, "--model", model_folder, *FLAGS]
    report = tmp_path / "report.json"
    result = cli(*command, "-o", target, "--resume", "--report", report)
    assert (result.code, result.out, result.err) == (3, "", failed_rows()), "a row that failed in the first run counts"
    counts = json.loads(report.read_text())
    assert (counts["resumed"], counts["requests"]) == (rows, ROWS - rows)
    assert cli(*command, "-o", whole, "--resume").code == 3, "where there is nothing to resume, it starts"
    assert target.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_a_parquet_input_resumes_with_its_own_types(cli, break_off, model_folder, tmp_path):
    """Carried columns come from the input, because the part file would turn them into JSON."""
    columns = {"prompt": [f"row {i}" for i in range(ROWS)], "max_tokens": [2 + i * 7 % 17 for i in range(ROWS)]}
    table = pa.table({**columns, "day": [datetime.date(2024, 2, 29)] * ROWS, "raw": [b"\xff"] * ROWS})
    source, target, whole = tmp_path / "in.parquet", tmp_path / "out.parquet", tmp_path / "whole.parquet"
    pq.write_table(table, source)
    break_off(source, target)
    command = ["generate", source, "--model", model_folder, *FLAGS]
    assert cli(*command, "-o", target, "--resume").code == 0
    assert cli(*command, "-o", whole).code == 0
    written = pq.read_table(target)
    assert written.equals(pq.read_table(whole))
    assert written.select(["day", "raw"]) == table.select(["day", "raw"])


def test_refusals(cli, source, break_off, model_folder, tmp_path):
    """An output that mixes two kinds of results, or loses some, is worse than an error; --force-resume overrules."""
    target = tmp_path / "out.jsonl"
    break_off(source, target)
    part = tmp_path / "out.jsonl.part"
    before = part.read_bytes()
    command = ["generate", source, "-o", target, "--model", model_folder, *FLAGS]
    for more, message in (
        ([], "holds results of an earlier run: rerun with --resume, or delete the file"),
        (["--resume", "--top-k", 5], "is of another run: --top-k was not given, is 5. Give what it had"),
        (["--resume", "--seed", 1, "--dtype", "float16"], "; --seed was not given, is 1"),
    ):
        require_error(cli(*command, *more), 2, message)
        assert part.read_bytes() == before
    source.write_text(source.read_text().replace("row 39", "row XXXIX"))
    assert "the content of the input differs" in cli(*command, "--resume").err
    assert cli(*command, "--force-resume").code == 3
    assert len(target.read_text().splitlines()) == ROWS


@pytest.mark.parametrize("shard", [[], ["--shard", "1/1"]])
def test_a_run_whose_rows_are_all_done(cli, source, model_folder, tmp_path, monkeypatch, shard):
    """A full disk at the very end, or a finished shard, and --resume loaded the model to compute nothing."""
    target = tmp_path / "out.jsonl"
    command = ["generate", source, "-o", target, "--model", model_folder, "--max-tokens", 2, *shard]
    with monkeypatch.context() as patch:
        patch.setattr(FileOutput, "finish", FileOutput.flush)
        assert cli(*command, "--quiet").code == 3
    monkeypatch.setattr("rosebatch.job.local.load", None)
    result = cli(*command, "--resume", "--report", tmp_path / "report.json")
    assert (result.code, target.exists(), (tmp_path / "report.json").exists()) == (3, not shard, False)
    told = f"rosebatch: all rows were done before ({ROWS} rows, 1 failed): nothing is computed; no report is written\n"
    assert result.err.endswith(told)
    if shard:
        assert cli("merge", source, "-o", target).code == 3
    assert len(target.read_text().splitlines()) == ROWS


def test_a_damaged_part_file(cli, source, model_folder, tmp_path, monkeypatch):
    """A flipped bit changed the output without a word. Its row is computed again, and the user hears of the disk."""
    target, whole, part = tmp_path / "out.jsonl", tmp_path / "whole.jsonl", tmp_path / "out.jsonl.part"
    command = ["generate", source, "--model", model_folder, *FLAGS]
    assert cli(*command, "-o", whole).code == 3
    with monkeypatch.context() as patch:
        patch.setattr(FileOutput, "finish", FileOutput.flush)
        assert cli(*command, "-o", target).code == 3
    lines = part.read_bytes().splitlines(keepends=True)
    for damaged in (2, 4):
        lines[damaged] = lines[damaged].replace(b'"text":"', b'"text":"!')
    part.write_bytes(b"".join(lines))
    report = tmp_path / "report.json"
    result = cli(*command, "-o", target, "--resume", "--report", report)
    expected = f"{part}: 2 damaged lines are ignored; rows without a result are computed again"
    assert (result.code, result.err) == (3, f"rosebatch: warning: {expected}\n{failed_rows()}")
    assert json.loads(report.read_text())["resumed"] == ROWS - 2
    assert target.read_bytes() == whole.read_bytes()


def test_a_part_file_of_somebody_else(cli, source, model_folder, tmp_path):
    """A foreign file of one line was truncated."""
    part = tmp_path / "out.jsonl.part"
    part.write_text("mine\n")
    for more in ([], ["--resume"]):
        result = cli("generate", source, "-o", tmp_path / "out.jsonl", "--model", model_folder, *FLAGS, *more)
        require_error(result, 2, "out.jsonl.part: is no part file of rosebatch, but the results need this name")
        assert part.read_text() == "mine\n"


@pytest.mark.parametrize("target", ["out.jsonl", "-"])
def test_a_build_time_that_is_no_number(cli, source, model_folder, tmp_path, monkeypatch, target):
    """It ended as "unexpected, please report it"."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "abc")
    monkeypatch.chdir(tmp_path)
    result = cli("generate", source, "-o", target, "--model", model_folder, *FLAGS)
    told = "SOURCE_DATE_EPOCH=abc: must be whole seconds since 1970, such as 1700000000"
    require_error(result, 2, f"rosebatch: error: {told}\n")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(("source_name", "flags", "message"), [("-", ["-o", "x"], "input file"), ("", [], "-o FILE")])
def test_resume_needs_files(cli, source, model_folder, tmp_path, monkeypatch, source_name, flags, message):
    """A stream cannot be read again by a later process."""
    monkeypatch.chdir(tmp_path)
    require_error(cli("generate", source_name or source, "--model", model_folder, "--resume", *flags), 2, message)
    assert not list(tmp_path.glob("*.part"))
