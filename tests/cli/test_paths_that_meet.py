"""No file of a run is another one of it, however each is spelled: results must not cost a file of the user."""

import json
import os
import shutil
from unittest.mock import Mock

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.command_errors import require_error

ROW = '{"prompt_token_ids":[1,2],"max_tokens":1}\n'
REQUEST = '{"custom_id":"a","body":{"prompt":[1,2],"max_tokens":1}}\n'


def contents(folder):
    """All that a folder holds: names, links and bytes."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "args",
    [
        ["in.jsonl", "-o", "in.jsonl"],
        ["in.jsonl", "-o", "./sub/../in.jsonl"],
        ["in.jsonl", "-o", "link.jsonl"],
        ["link.jsonl", "-o", "in.jsonl"],
        ["in.jsonl", "-o", "hard.jsonl"],
        ["in.jsonl", "-o", "links/loop/in.jsonl"],
        ["in.jsonl", "-o", "file://{cwd}/in.jsonl"],
        ["file://{cwd}/in.jsonl", "-o", "in.jsonl"],
        ["in.jsonl", "-o", "out.jsonl", "--errors", "in.jsonl"],
        ["in.jsonl", "-o", "out.jsonl", "--errors", "link.jsonl"],
        ["in.jsonl", "-o", "out.jsonl", "--errors", "out.jsonl"],
        ["in.jsonl", "-o", "out.jsonl", "--errors", "OUT.jsonl"],
        ["in.jsonl", "-o", "out.jsonl", "--errors", "out.jsonl.part"],
        ["in.jsonl", "-o", "out.jsonl", "--errors", "out.jsonl.tmp"],
        ["in.jsonl", "-o", "out.jsonl.tmp", "--errors", "out.jsonl"],
        ["in.jsonl", "--report", "in.jsonl"],
        ["in.jsonl", "-o", "out.jsonl", "--report", "link.jsonl"],
        ["in.jsonl", "-o", "out.jsonl", "--report", "out.jsonl"],
        ["in.jsonl", "-o", "out.jsonl", "--report", "out.jsonl.part"],
        ["in.jsonl", "-o", "out.jsonl", "--errors", "e.jsonl", "--report", "sub/../e.jsonl"],
        ["q.jsonl.tmp", "-o", "q.jsonl"],
        ["q.jsonl.part", "-o", "q.jsonl"],
        ["x.errors.jsonl", "-o", "x.jsonl"],
        ["batch.jsonl", "-o", "out.jsonl", "--report", "out.errors.jsonl"],
        ["sub/*.jsonl", "-o", "sub/a.jsonl"],
        ["sub", "-o", "sub/a.jsonl"],
        ["parts/part-00000.parquet", "-o", "parts/"],
        ["in.jsonl", "-o", "answers/", "--report", "answers/report.json"],
        ["in.jsonl", "-o", "schema.json", "--json-schema", "schema.json"],
        ["in.jsonl", "-o", "out.jsonl", "--errors", "chat.jinja", "--chat-template", "./chat.jinja"],
        ["in.jsonl", "-o", "out.jsonl", "--report", "{model}"],
        ["parts.old/part-00000.parquet", "-o", "parts/"],
        ["parts.tmp/part-00000.parquet", "-o", "parts/"],
    ],
    ids=" ".join,
)
def test_one_file_under_two_names(toy, toy_toml, tmp_path, args):
    """Most of these deleted or replaced the user's own file, exit code 0; others mixed two results."""
    for folder in ("sub", "links", "answers", "parts", "parts.old", "parts.tmp"):
        (tmp_path / folder).mkdir()
    texts = dict.fromkeys(("in.jsonl", "q.jsonl.tmp", "q.jsonl.part", "sub/a.jsonl"), ROW)
    texts |= {"batch.jsonl": REQUEST, "x.errors.jsonl": REQUEST, "schema.json": "{}", "chat.jinja": "{{ messages }}"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    os.link(tmp_path / "in.jsonl", tmp_path / "hard.jsonl")
    (tmp_path / "links" / "loop").symlink_to("..")
    for folder in tmp_path.glob("parts*"):
        pq.write_table(pa.table({"prompt_token_ids": [[1, 2]], "max_tokens": [1]}), folder / "part-00000.parquet")
    before = contents(tmp_path)
    result = toy(*(arg.format(cwd=tmp_path, model=toy_toml) for arg in args))
    require_error(result, 2)
    assert "is the same file as" in result.err or "which is replaced: choose another folder" in result.err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("args", ["$IN >> $IN", pytest.param("- -o $IN < $IN", marks=pytest.mark.thorough)])
def test_stdin_that_is_the_output(process, toy_toml, tmp_path, args):
    """The shell's redirections count too: a run that reads what it writes never ends."""
    source = tmp_path / "in.jsonl"
    source.write_text(ROW)
    command = "$FORK -m rosebatch generate --model $MODEL --load-format dummy -q"
    result = process(f"{command} {args}", MODEL=toy_toml, IN=source)
    assert result.returncode == 2, result.stderr
    assert "is the same file as" in result.stderr
    assert source.read_text() == ROW


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        ("data", ["-o", "data/out.jsonl"]),
        ("data/", ["-o", "link/out.jsonl"]),
        ("link", ["-o", "data/out.jsonl"]),
        ("data/*.jsonl", ["-o", "data/out.jsonl"]),
        ("./d*/a*.jsonl", ["-o", "data/answers.jsonl"]),
        ("**/*.jsonl", ["-o", "data/deep/out.jsonl"]),
        ("data/**", ["-o", "data/out.jsonl"]),
        ("data/*", ["-o", "out.jsonl", "--report", "data/report.json"]),
        ("data", ["-o", "out.jsonl", "--errors", "data/errors.jsonl"]),
        ("data", ["-o", "out.jsonl", "--report", "data/report.json"]),
        ("data", ["-o", "data/deep/out.jsonl"]),
        ("data", ["-o", "data/answers/"]),
        ("memory://{own}/data", ["-o", "memory://{own}/data/out.jsonl"]),
        ("memory://{own}/data/*.jsonl", ["-o", "memory:///{own}/data/out.jsonl"]),
    ],
)
def test_an_output_that_the_next_run_would_read(toy, tmp_path, source, flags):
    """Run twice, the command answered its own answers."""
    own = tmp_path.name
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "a.jsonl").write_text(ROW)
    (tmp_path / "link").symlink_to("data")
    with fsspec.open(f"memory://{own}/data/a.jsonl", "w") as file:
        file.write(ROW)
    before = contents(tmp_path)
    result = toy(source.format(own=own), *(flag.format(own=own) for flag in flags))
    require_error(result, 2, "would be found by the next run of")
    assert contents(tmp_path) == before


def test_outputs_that_only_look_like_input(toy, tmp_path):
    """Refusing more than what is read would refuse good commands."""
    (tmp_path / "data" / "results").mkdir(parents=True)
    (tmp_path / "data" / "_results").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(ROW)
    for source, target in (
        ("data", "data/_results/out.jsonl"),
        ("data", "data/_out.jsonl"),
        ("data/*.jsonl", "data/.out.jsonl"),
        ("data/[a-c].jsonl", "data/d.jsonl"),
        ("data/a.jsonl", "data/out.jsonl"),
    ):
        assert toy(source, "-o", target, "--report", "data/results/report.json").code == 0
        (tmp_path / target).unlink()


def test_a_url_that_cannot_be_written(toy, tmp_path, monkeypatch):
    """It was found after the run; and what finds it leaves nothing there."""
    (tmp_path / "in.jsonl").write_text(REQUEST)
    url = f"memory://{tmp_path.name}"
    assert toy("in.jsonl", "-o", f"{url}/out.jsonl").code == 0
    file_system = fsspec.filesystem("memory")
    assert file_system.ls(url, detail=False) == [f"/{tmp_path.name}/out.jsonl"]
    refuse = Mock(side_effect=PermissionError(13, "Access Denied"))
    monkeypatch.setattr(type(file_system), "pipe_file", refuse)
    told = f"rosebatch: error: {url}/other.jsonl: cannot be written (Access Denied)\n"
    require_error(toy("in.jsonl", "-o", f"{url}/other.jsonl"), 2, told)
    assert toy("in.jsonl", "-o", "out.jsonl", "--errors", f"{url}/errors.jsonl").code == 2
    assert contents(tmp_path) == {"in.jsonl": REQUEST.encode()}


def test_devices_may_be_shared(toy, tmp_path):
    """``/dev/null`` is no file that could be lost."""
    (tmp_path / "in.jsonl").write_text(ROW)
    assert toy("in.jsonl", "-o", "/dev/null", "--errors", "/dev/null", "--report", "/dev/null").code == 0


def test_a_local_file_of_the_name_of_a_remote_one(toy, tmp_path):
    """Deleting the errors of an earlier run at a URL deleted a file of that name in the working directory."""
    (tmp_path / "in.jsonl").write_text(REQUEST)
    (tmp_path / "answers.errors.jsonl").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    for root in (f"memory://{tmp_path.name}", f"file://{tmp_path}/elsewhere"):
        with fsspec.open(f"{root}/answers.errors.jsonl", "w") as file:
            file.write("of an earlier run")
        assert toy("in.jsonl", "-o", f"{root}/answers.jsonl").code == 0
        with fsspec.open(f"{root}/answers.jsonl") as file:
            assert json.loads(file.read())["custom_id"] == "a"
        assert not fsspec.filesystem(root.partition("://")[0]).exists(f"{root}/answers.errors.jsonl")
        assert (tmp_path / "answers.errors.jsonl").read_text() == "mine"


@pytest.mark.parametrize("resume", [[], ["--resume"], ["--force-resume"]])
@pytest.mark.parametrize("content", ["one line", "one line\n", '{"a": 1}\n', '{"a": 1}\n{"b": 2}\n'])
def test_a_foreign_part_file(toy, tmp_path, content, resume):
    """A file of one line was emptied without a word; of two lines, --resume cut the second off."""
    (tmp_path / "in.jsonl").write_text(ROW)
    (tmp_path / "out.jsonl.part").write_text(content)
    told = "out.jsonl.part: is no part file of rosebatch"
    require_error(toy("in.jsonl", "-o", "out.jsonl", *resume), 2, told)
    assert (tmp_path / "out.jsonl.part").read_text() == content


@pytest.mark.parametrize("torn", ["", '["rosebatch', '["rosebatch part",2,{"created"'])
def test_a_part_file_torn_in_its_first_line(toy, tmp_path, torn):
    """A crash while the file was made must not stop the next run."""
    (tmp_path / "in.jsonl").write_text(ROW)
    (tmp_path / "out.jsonl.part").write_text(torn)
    assert toy("in.jsonl", "-o", "out.jsonl", "--resume").code == 0


@pytest.mark.parametrize("name", ["out.jsonl.part", "out.jsonl.tmp", "bad.jsonl.tmp", "answers.old", "answers.tmp"])
def test_something_foreign_in_the_place_of_a_temporary_file(toy, tmp_path, name):
    """A link to a folder lost the folder's parts; a backup named ``answers.old`` was deleted, and so was a ``.tmp``."""
    (tmp_path / "in.jsonl").write_text(ROW)
    backup = tmp_path / "backup"
    backup.mkdir()
    (backup / "part-00000.parquet").write_text("mine")
    flags = ["-o", "answers/"] if name.startswith("answers") else ["-o", "out.jsonl", "--errors", "bad.jsonl"]
    makers = [
        lambda at: at.symlink_to("backup"),
        lambda at: at.symlink_to("in.jsonl"),
        os.mkfifo,
        lambda at: shutil.copytree(backup, at),
        lambda at: at.write_text("mine"),
    ]
    for make in makers:
        make(tmp_path / name)
        before = contents(tmp_path)
        require_error(toy("in.jsonl", *flags), 2, name)
        assert contents(tmp_path) == before
        if (tmp_path / name).is_dir() and not (tmp_path / name).is_symlink():
            shutil.rmtree(tmp_path / name)
        else:
            (tmp_path / name).unlink()
