"""Pipes, devices and open descriptors as input and output; and streams that the caller closed."""

import json
import os
import stat
import threading
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.command_errors import require_error
from tests.helpers.waiting import PATIENCE_SECONDS

LINES = ['{"prompt_token_ids":[1],"max_tokens":9}', "{", '{"prompt_token_ids":[2],"max_tokens":1}']
USAGE = 2


@pytest.fixture
def source(tmp_path):
    """Three rows. The first ends last, and one fails."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(line + "\n" for line in LINES))
    return path


@pytest.fixture
def fifo(tmp_path):
    """A named pipe, whose contents are in the list once the run is over."""
    os.mkfifo(tmp_path / "fifo")
    read = []
    thread = threading.Thread(target=lambda: read.append((tmp_path / "fifo").read_text()))
    thread.start()
    yield lambda: (thread.join(PATIENCE_SECONDS), read[0])[1]
    if thread.is_alive():
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK))
        thread.join(PATIENCE_SECONDS)


def indices(text):
    return [json.loads(line)["index"] for line in text.splitlines()]


@pytest.mark.parametrize("name", ["fifo", "link"])
def test_a_named_pipe_as_the_output(toy, source, fifo, tmp_path, name):
    """The pipe was replaced by a file, exit code 0, and its reader waited for ever."""
    (tmp_path / "link").symlink_to("fifo")
    assert toy(source, "-o", name).code == 3
    assert indices(fifo()) == [0, 1, 2]
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "in.jsonl", "link"]


def test_devices_as_outputs(toy, source, tmp_path):
    """As root a device of the system was replaced by a file. Here a device of our own, or the null device."""
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)  # noqa: PTH116
    except PermissionError:
        device.symlink_to(os.devnull)
    before = (device.lstat(), os.stat(os.devnull))  # noqa: PTH116
    for flags in (["-o", device], ["-o", "out.jsonl", "--errors", device], ["--report", device]):
        assert toy(source, *flags).code == 3
    after = (device.lstat(), os.stat(os.devnull))  # noqa: PTH116
    assert [(each.st_ino, each.st_mode) for each in after] == [(each.st_ino, each.st_mode) for each in before]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.jsonl.run", "in.jsonl", "null", "out.jsonl"]


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_descriptor_as_the_output(toy, source, tmp_path, kind):
    """A file behind it keeps what was written before: other parts of a script share the descriptor."""
    read_end, write_end = os.pipe() if kind == "pipe" else (None, os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT))
    os.write(write_end, b'{"index":-1}\n')
    assert toy(source, "-o", f"/dev/fd/{write_end}").code == 3
    os.close(write_end)
    text = (tmp_path / "out").read_bytes() if read_end is None else os.read(read_end, 4096)
    assert indices(text) == [-1, 0, 1, 2]
    assert not list(tmp_path.glob("*.part"))


def test_error_rows_in_a_stream_of_their_own(toy, source, fifo, tmp_path):
    """``--errors`` replaced the pipe too. Beside a file they come at the end, so that --resume gives each once."""
    assert toy(source, "-o", "out.jsonl", "--errors", "fifo", "--resume").code == 3
    assert (indices(fifo()), indices((tmp_path / "out.jsonl").read_text())) == ([1], [0, 2])


def test_results_and_error_rows_in_two_streams(toy, source, fifo):
    """Both go where they belong, in order."""
    result = toy(source, "-o", "-", "--errors", "fifo")
    assert result.code == 3
    assert (indices(fifo()), indices(result.out)) == ([1], [0, 2])


@pytest.mark.parametrize("flags", [["--resume"], ["--force-resume"], ["--errors", "e.jsonl"], ["--rows-per-file", 5]])
def test_what_a_stream_cannot_have(toy, source, tmp_path, flags):
    """Nothing can be resumed there; asking for it must not be ignored, nor block."""
    for name in ("fifo.parquet", "fifo.csv"):
        os.mkfifo(tmp_path / name)
        assert "Parquet, Arrow and CSV need a file" in toy(source, "-o", name).err
    for name in ("/dev/null", "/dev/stdout", "fifo.parquet"):
        require_error(toy(source, "-o", name, *flags), USAGE, "needs an output")


def test_a_link_as_the_output(toy, source, tmp_path):
    """The link was replaced, and the file behind it kept the old results."""
    disk = tmp_path / "disk"
    disk.mkdir()
    for number, exists in enumerate((True, False)):
        target, link = disk / f"{number}.jsonl", tmp_path / f"link{number}.jsonl"
        errors, errors_link = disk / f"e{number}.jsonl", tmp_path / f"e{number}.jsonl"
        link.symlink_to(target)
        errors_link.symlink_to(errors)
        if exists:
            target.write_text("old")
            errors.write_text("old")
        assert toy(source, "-o", link, "--errors", errors_link).code == 3
        assert link.is_symlink() and errors_link.is_symlink()
        assert (indices(target.read_text()), indices(errors.read_text())) == ([0, 2], [1])
    assert len(list(disk.iterdir())) == 6


def test_the_mode_of_an_output_that_is_replaced(toy, source, tmp_path):
    """A private file must not become readable for all by a second run."""
    names = ["out.jsonl", "bad.jsonl"]
    for name in names:
        (tmp_path / name).touch(0o600)
    assert toy(source, "-o", "out.jsonl", "--errors", "bad.jsonl").code == 3
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names] == [0o600] * 2
    (tmp_path / "answers").mkdir(0o700)
    assert toy(source, "-o", "answers/").code == 3
    assert stat.S_IMODE((tmp_path / "answers").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["none/e.jsonl", "x" * 252, "folder", "socket", "e" * 246 + ".jsonl"])
def test_a_file_of_errors_that_cannot_be_written(toy, source, tmp_path, name):
    """It was found at the end of the run."""
    import socket

    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        before = sorted(path.name for path in tmp_path.iterdir())
        for flags in (["-o", "out.jsonl", "--errors", name], *([["-o", name]] if name != "folder" else [])):
            result = toy(source, *flags)
            assert result.code in (1, USAGE)
            assert f"{name}: " in result.err
            assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_file_system_that_is_unknown(toy, source):
    """Found before the run, not when its results are to be uploaded."""
    require_error(toy(source, "-o", "nosuchsystem://a/b.jsonl"), 2, "nosuchsystem")


@contextmanager
def pipe_of(content):
    """The path of a pipe with this content."""
    read_end, write_end = os.pipe()
    os.write(write_end, content)
    os.close(write_end)
    try:
        yield f"/dev/fd/{read_end}"
    finally:
        os.close(read_end)


def test_a_parquet_file_through_a_pipe(toy, tmp_path):
    """It needs its end first: the pipe is copied. Without the flag its first bytes tell what it is."""
    pq.write_table(pa.table({"prompt_token_ids": [[1], [2]], "max_tokens": [1, 1]}), tmp_path / "in.parquet")
    for flags in (["--input-format", "parquet"], []):
        with pipe_of((tmp_path / "in.parquet").read_bytes()) as path:
            assert indices(toy(path, *flags).out) == [0, 1]


def test_a_pipe_resumes_like_a_file(toy, source, tmp_path, monkeypatch):
    """Its contents are compared, as those of a file are."""

    def run(content):
        with pipe_of(content) as path:
            return toy(path, "-o", "out.jsonl", "--resume")

    with monkeypatch.context() as patch:
        patch.setattr("rosebatch.job.open_output.replace_file", lambda whole, path: 1 / 0)
        assert run(source.read_bytes()).code == 1
    assert "the content of the input differs" in run(source.read_bytes() + b"{}\n").err
    assert run(source.read_bytes()).code == 3
    assert indices((tmp_path / "out.jsonl").read_text()) == [0, 1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "<(cat $IN)",
        pytest.param("/dev/stdin < <(cat $IN)", marks=pytest.mark.thorough),
        pytest.param('/dev/fd/0 <<< "$(cat $IN)"', marks=pytest.mark.thorough),
    ],
)
def test_pipes_of_the_shell(process, toy_toml, source, name):
    """All rows were lost, exit code 0."""
    command = f"$PY -m rosebatch generate {name} --model $MODEL --load-format dummy -q"
    result = process(command, MODEL=toy_toml, IN=source)
    assert (result.returncode, indices(result.stdout)) == (3, [0, 1, 2])


def test_closed_streams(process, toy_toml, source, tmp_path):
    """The part file became descriptor 2, and what libraries print to stderr was written into it."""
    code = (
        "import os, sys, rosebatch.cli.app as app\n"
        "def main():\n"
        "    file = open(os.environ['OUT'], 'w')\n"
        "    assert file.fileno() > 2\n"
        "    os.write(2, b'panic')\n"
        "    sys.stderr.write('message')\n"
        "    sys.exit(7)\n"
        "app.main = main\n"
        "app.run()"
    )
    result = process('$PY -c "$CODE" <&- >&- 2>&-', CODE=code, OUT=tmp_path / "out")
    assert result.returncode == 7
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize(("args", "code"), [("$IN >&-", 1), pytest.param("- <&-", 2, marks=pytest.mark.thorough)])
def test_results_for_a_closed_stream(process, toy_toml, source, args, code):
    """They must not vanish with exit code 0, and a closed stdin is not an empty one."""
    command = "$PY -m rosebatch generate --model $MODEL --load-format dummy -q"
    result = process(f"{command} {args}", MODEL=toy_toml, IN=source)
    assert result.returncode == code
    assert result.stderr.count("\n") == 1
    stream = "stdout" if code == 1 else "stdin"
    assert f"rosebatch: error: {stream}: Bad file descriptor" in result.stderr
