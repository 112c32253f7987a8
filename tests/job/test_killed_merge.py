"""A merge that is killed can be repeated, wherever that was: the same command gives what an unbroken one gives."""

import shutil
import signal
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError, UserError
from rosebatch.io.part_lines import decode_manifest, encode_manifest
from rosebatch.job.config import JobConfig
from rosebatch.job.merge import merge_shards
from rosebatch.job.merge_note import mark_merged
from tests.helpers.faults import CALLS, Faults, call_with_faults
from tests.helpers.forks import FORKS
from tests.helpers.json_lines import write_lines

ROWS = [{"prompt": f"row {number}", "max_tokens": 1} for number in range(150)]
ROWS[70] = {"prompt": ""}
# Outputs, whether their error rows have a file of their own, and whether there are any.
FORMS = {
    "out.jsonl": ("out.jsonl", "bad.jsonl", ROWS),
    "no errors": ("out.jsonl", "bad.jsonl", ROWS[:70]),
    "folder": ("answers/", None, ROWS),
}

# Calls at which each merge is killed in the fast tier, too.
FAST = ("rename", "unlink")


@pytest.fixture
def shards(job, tmp_path, request):
    """A folder with an input, two shards, and older outputs; and the merge of it in any other folder."""
    output, errors, rows = FORMS[request.param]
    folder = tmp_path / "shards"
    folder.mkdir()
    write_lines(folder / "in.jsonl", rows)
    for number in (1, 2):
        given = None if errors is None else str(folder / errors)
        job.run_file(folder / "in.jsonl", f"{folder}/{output}", shard=f"{number}/2", errors=given)
    if output == "answers/":
        (folder / "answers").mkdir()
    (folder / ("answers/part-00000.parquet" if errors is None else output)).write_bytes(b"old")
    (folder / (errors or "other")).write_bytes(b"old")
    return folder, output, errors


def merge(folder, output, errors):
    """The merge of the shards in a folder."""
    given = None if errors is None else str(folder / errors)
    return merge_shards(JobConfig(input=str(folder / "in.jsonl"), output=f"{folder}/{output}", errors=given))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("shards", FORMS, indirect=True)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.thorough) for kind in sorted(CALLS)]
)
def test_a_killed_merge_is_repeated(shards, tmp_path, kind):
    """Leftovers were called foreign, an output was new beside old errors, and a deleted shard was missed."""
    source, *names = shards
    whole = tmp_path / "whole"
    shutil.copytree(source, whole)
    faults = Faults(kind, -1, None)
    counts = call_with_faults(faults, merge, whole, *names)
    expected = contents(whole)
    assert not [name for name in expected if ".part" in name and "answers" not in name]
    for number in range(faults.count):
        folder = tmp_path / f"{number}"
        shutil.copytree(source, folder)
        killed = FORKS.Process(target=call_with_faults, args=(Faults(kind, number, None), merge, folder, *names))
        killed.start()
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
        assert merge(folder, *names) == counts
        assert contents(folder) == expected


@pytest.mark.parametrize("shards", ["out.jsonl"], indirect=True)
def test_shards_of_a_later_run_stay(shards):
    """A note of an earlier merge does not delete part files that came after it."""
    folder, *names = shards
    parts = sorted(folder.glob("*.part"))
    mark_merged(folder / "out.jsonl", 9, 9, parts)
    for path in parts:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    assert merge(folder, *names) == (150, 1)
    assert (folder / "out.jsonl").read_bytes().count(b"\n") == 149
    names = [".out.jsonl.run", "bad.jsonl", "in.jsonl", "out.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.parametrize("shards", ["out.jsonl"], indirect=True)
@pytest.mark.parametrize("note", [b"mine", b"\xff", b'"\xff"', b'{"rosebatch":"merged shards","later":1}'])
def test_a_foreign_note(shards, note):
    """A file of that name is nobody's to replace; one that is no UTF-8 was a traceback."""
    folder, *names = shards
    (folder / "out.jsonl.merged").write_bytes(note)
    with pytest.raises(FlagError, match=r"out\.jsonl\.merged: was not left by a merge"):
        merge(folder, *names)


@pytest.mark.parametrize("shards", ["out.jsonl"], indirect=True)
def test_a_missing_shard_is_still_missed(shards):
    """Without a note of a merge, an older output does not stand for the shards."""
    folder, *names = shards
    (folder / "out.jsonl.1-of-2.part").unlink()
    with pytest.raises(UserError, match="shard 1 of 2 is missing"):
        merge(folder, *names)


@pytest.mark.parametrize("shards", FORMS, indirect=True)
def test_a_merge_that_was_done_before(shards, capsys):
    """Killed at its very end and repeated, it said that there were no shards: a loop of tries never ended."""
    folder, *names = shards
    counts = merge(folder, *names)
    before = contents(folder)
    assert capsys.readouterr().err == ""
    assert merge(folder, *names) == counts
    assert capsys.readouterr().err == f"rosebatch: {folder}/{names[0]} is already merged, nothing to do\n"
    assert contents(folder) == before
    with (folder / "in.jsonl").open("a") as file:
        file.write('{"prompt":"more"}\n')
    with pytest.raises(FlagError, match="has no shards beside it"):
        merge(folder, *names)


def test_a_merge_of_folders_with_keys_that_was_done_before(job, tmp_path, capsys):
    """The input's keys are in its digest: the second merge said that there were no shards."""
    (tmp_path / "in" / "day=1").mkdir(parents=True)
    write_lines(tmp_path / "in" / "day=1" / "a.jsonl", ROWS[:4])
    merge = partial(merge_shards, JobConfig(input=str(tmp_path / "in"), output=str(tmp_path / "out.jsonl")))
    for number in (1, 2):
        job.run_file(tmp_path / "in", tmp_path / "out.jsonl", shard=f"{number}/2")
    assert merge() == merge() == (4, 0)
    assert "is already merged, nothing to do" in capsys.readouterr().err
    (tmp_path / "in" / "day=1").rename(tmp_path / "in" / "day=2")
    with pytest.raises(FlagError, match="has no shards beside it"):
        merge()


@pytest.mark.parametrize("shards", ["out.jsonl"], indirect=True)
@pytest.mark.parametrize("changes", [{"columns": {"later": 1}}, {"columns": None}, {"max_row_bytes": ...}])
def test_shards_of_another_version(shards, changes):
    """A manifest with fewer fields, or others, was a traceback."""
    folder, *names = shards
    for path in folder.glob("*.part"):
        run = decode_manifest(path.read_bytes().splitlines(keepends=True)[0], path) | changes
        path.write_bytes(encode_manifest({name: value for name, value in run.items() if value is not ...}))
    with pytest.raises(UserError, match=r"of-2\.part: another version of rosebatch wrote it; merge with that version"):
        merge(folder, *names)


def test_a_forced_shard_of_a_longer_input(job, tmp_path):
    """The merge wrote rows that the input no longer has."""
    source, target = write_lines(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    for number in (1, 2):
        job.run_file(source, target, shard=f"{number}/2")
    write_lines(source, ROWS[:40])
    for number in (1, 2):
        job.run_file(source, target, shard=f"{number}/2", force_resume=True)
    assert merge_shards(JobConfig(input=str(source), output=str(target))) == (40, 0)
    assert target.read_bytes().count(b"\n") == 40


def test_a_merge_has_the_longest_row_of_its_shards(job, tmp_path):
    """A merge read rows with the default of --max-row-bytes: what they carry differed from an unbroken run."""
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "note": ["x", "y" * 2000, "z"]}), source)
    job.run_file(source, tmp_path / "whole.parquet", sampling={"max_tokens": 1}, max_row_bytes=100)
    for number in (1, 2):
        job.run_file(
            source, tmp_path / "out.parquet", sampling={"max_tokens": 1}, max_row_bytes=100, shard=f"{number}/2"
        )
    merge_shards(JobConfig(input=str(source), output=str(tmp_path / "out.parquet")))
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))
