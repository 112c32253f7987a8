"""An input that is replaced while the run reads it: results of two inputs must not end in one output."""

import json
import os
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError, UserError
from rosebatch.io import files
from tests.helpers.json_lines import read_lines
from tests.job.fake_model import FakeModel

LINES = [json.dumps({"prompt": f"row {i}", "max_tokens": 5}) for i in range(20)]


def jsonl(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def parquet(path, lines):
    pq.write_table(pa.Table.from_pylist([json.loads(line) for line in lines]), path)
    return path


@pytest.fixture
def run(job, tmp_path):
    """Runs the job and does something in the middle."""

    def run(source, between=lambda: None, **options):
        steps = 0

        def before_step(plan):
            nonlocal steps
            steps += 1
            if steps == 5:
                between()

        target = tmp_path / "out.jsonl"
        job.run_file(source, target, model=FakeModel(before_step=before_step), limits={"seqs": 2}, **options)
        return target.read_text().splitlines()

    return run


@pytest.mark.parametrize(("name", "write"), [("in.jsonl", jsonl), ("in.parquet", parquet)])
def test_an_input_that_changes_during_the_run(run, tmp_path, name, write):
    """The output had rows of the old and of the new contents, under the old input's digest."""
    source, target, part = write(tmp_path / name, LINES), tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    before = run(source)
    target.unlink()
    other = [line.replace("row 1", "row 7") for line in LINES]
    told = f"^{source}: changed during the run, which needs the old contents: put them back: .* saved in {part}"
    with pytest.raises(UserError, match=told):
        run(source, lambda: write(source, other))
    assert not target.exists()
    assert 4 < part.read_bytes().count(b"\n") <= 21
    with pytest.raises(FlagError, match="the content of the input differs"):
        run(source, resume=True)
    write(source, LINES)
    assert run(source, resume=True) == before
    assert not part.exists()


def test_a_changed_input_that_is_accepted(run, tmp_path):
    """Who knows that the change is harmless need not compute all rows again."""
    source = jsonl(tmp_path / "in.jsonl", LINES)
    with pytest.raises(UserError, match="changed during the run"):
        run(source, lambda: jsonl(source, [*LINES[:-1], LINES[-1] + " "]))
    with pytest.raises(FlagError, match=r"the content of the input differs.*--force-resume to go on"):
        run(source, resume=True)
    assert len(run(source, force_resume=True)) == 20


@pytest.mark.parametrize("replace", [True, False])
def test_an_input_that_is_deleted_or_replaced_by_the_same(run, tmp_path, replace):
    """Another inode with the same contents is no change; a missing file cannot be compared."""
    source = jsonl(tmp_path / "in.jsonl", LINES)

    def between():
        source.unlink()
        if replace:
            jsonl(source, LINES)

    if replace:
        assert len(run(source, between)) == 20
    else:
        with pytest.raises(UserError, match="No such file or directory"):
            run(source, between)
        assert (tmp_path / "out.jsonl.part").exists()


@pytest.mark.parametrize(("age", "reads"), [(60, 1), (0, 2)])
def test_an_unchanged_input_is_hashed_once(run, tmp_path, monkeypatch, age, reads):
    """The plain case costs one stat; only a file written just before the run is read again."""
    monkeypatch.setattr("rosebatch.host.file_state._TICK_NS", -(10**9) if age else 10**12)
    digest = Mock(side_effect=files.digest_of)
    monkeypatch.setattr("rosebatch.io.input_files.digest_of", digest)
    assert len(run(jsonl(tmp_path / "in.jsonl", LINES))) == 20
    assert digest.call_count == reads


def test_times_that_are_set_back(run, tmp_path, monkeypatch):
    """An edit that keeps inode, size and mtime is still a change."""
    monkeypatch.setattr("rosebatch.host.file_state._TICK_NS", -(10**9))
    source = jsonl(tmp_path / "in.jsonl", LINES)
    status = source.stat()

    def between():
        jsonl(source, [line.replace("row 1", "row 7") for line in LINES])
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(UserError, match="changed during the run"):
        run(source, between)


@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize(("name", "write"), [("in.jsonl", jsonl), ("in.parquet", parquet)])
@pytest.mark.parametrize("num_rows", [7, 31])
def test_an_input_of_another_length_that_is_accepted(job, tmp_path, target, name, write, num_rows):
    """A shorter one left extra rows in JSONL, and ended Parquet with a traceback after the whole run."""
    source, target = tmp_path / name, tmp_path / target

    def stop(plan):
        if len(part.read_bytes().splitlines()) > 15:
            raise UserError("the power failed")

    part = tmp_path / f"{target.name}.part"
    write(source, LINES)
    with pytest.raises(UserError, match="the power failed"):
        job.run_file(source, target, model=FakeModel(before_step=stop), limits={"seqs": 2})
    kept = len(part.read_bytes().splitlines()) - 1
    assert 7 < kept < 20
    write(source, (LINES * 2)[:num_rows])
    result, _ = job.run_file(source, target, limits={"seqs": 2}, force_resume=True)
    rows = pq.read_table(target).to_pylist() if target.suffix == ".parquet" else read_lines(target)
    assert [row["index"] for row in rows] == list(range(num_rows))
    assert (result.report["completed"], result.report["resumed"]) == (max(0, num_rows - kept), min(num_rows, kept))


def test_a_forced_run_is_interrupted_and_resumed(job, tmp_path):
    """--resume compared with the run before the forced one: it refused to go on, or passed its rows for that run's."""
    source, target, part = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"

    def run(limit=99, **options):
        def stop(plan):
            if part.exists() and part.read_bytes().count(b"\n") > limit:
                raise UserError("the power failed")

        return job.run_file(source, target, model=FakeModel(before_step=stop), limits={"seqs": 2}, **options)[0]

    jsonl(source, LINES)
    with pytest.raises(UserError, match="the power failed"):
        run(5)
    jsonl(source, LINES[:9])
    with pytest.raises(UserError, match="the power failed"):
        run(8, force_resume=True, seed=1)
    told = r"of another run: --seed was 1, is not given\. Give what it had, or --force-resume"
    with pytest.raises(FlagError, match=told):
        run(resume=True)
    report = run(resume=True, seed=1).report
    assert (report["resumed"] > 4, report["resumed_exactly"]) == (True, False)
    assert [row["index"] for row in read_lines(target)] == list(range(9))
    assert run(resume=True, seed=1).report == {}


def begin(job, source, target, finished):
    """Runs the whole job, or breaks it off after its first rows."""
    if finished:
        job.run_file(source, target)
    else:
        with pytest.raises(IndexError):
            job.run_file(source, target, model=FakeModel(before_step=lambda plan, left=[1] * 9: left.pop()))
        assert target.with_name("out.jsonl.part").read_bytes().count(b"\n") > 1


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_that_is_renamed(job, tmp_path, finished):
    """Its key is a column of its rows: a run with another one went on, or its output was "already finished"."""
    source, target = tmp_path / "in", tmp_path / "out.jsonl"
    for day in "12":
        (source / f"day={day}").mkdir(parents=True)
        jsonl(source / f"day={day}/a.jsonl", LINES)
    begin(job, source, target, finished)
    (source / "day=2").rename(source / "day=3")
    with pytest.raises(FlagError, match="the content of the input differs"):
        job.run_file(source, target, resume=True)
    (source / "day=3").rename(source / "day=2")
    job.run_file(source, target, resume=True)
    assert [row["day"] for row in read_lines(target)] == [1] * 20 + [2] * 20


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_a_batch_that_is_renamed(job, tmp_path, finished):
    """Requests of a batch take no keys, so the rows are the same: the run was refused."""
    source, target = tmp_path / "in", tmp_path / "out.jsonl"
    (source / "day=1").mkdir(parents=True)
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    jsonl(source / "day=1/a.jsonl", [json.dumps({**line, "custom_id": f"{number}"}) for number in range(20)])
    begin(job, source, target, finished)
    (source / "day=1").rename(source / "day=2")
    job.run_file(source, target, resume=True)
    assert [row["custom_id"] for row in read_lines(target)] == [f"{number}" for number in range(20)]
