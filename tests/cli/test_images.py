"""Images by the command line: a folder, a pattern, a column of a table; resumed, in shards, by workers, checked."""

import json
from itertools import count

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import UserError
from rosebatch.engine.engine import Engine
from tests.helpers.command_errors import require_error
from tests.helpers.seeing import seeing_model
from tests.io.images.picture_files import picture, saved

FILES = {f"{n:02}.png": saved("PNG", picture("RGB", (8 + n, 20))) for n in range(12)}


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    seeing_model("Qwen3VLForConditionalGeneration", folder)
    return folder


@pytest.fixture
def scans(tmp_path, monkeypatch):
    """Twelve pictures, one of them broken."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "scans"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "05.png").write_bytes(b"none")
    return folder


@pytest.fixture
def run(cli, seeing):
    def call(source, *flags, command="generate"):
        own = ["--device", "cpu", "--max-num-seqs", 4, "--max-tokens", 6, "--prompt", "Describe"]
        return cli(command, source, "--model", seeing, *own, *flags)

    return call


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_a_pattern_and_a_column_answer_alike(run, cli, seeing, scans, tmp_path):
    """Each is a chat with the image before the text."""
    assert run("scans", "-q", "-o", "folder.jsonl").code == 3
    assert run("scans/*.png", "-q", "-o", "pattern.jsonl").code == 3
    assert (tmp_path / "folder.jsonl").read_bytes() == (tmp_path / "pattern.jsonl").read_bytes()
    found = rows(tmp_path / "folder.jsonl")
    assert [each["id"] for each in found] == [f"scans/{name}" for name in FILES]
    assert found[5]["error"]["code"] == "invalid_image"
    assert found[5]["error"]["message"].startswith("scans/05.png: messages[0].content[0]: it is no JPEG")
    assert len({each["text"] for each in found if "error" not in each}) > 1

    images = [{"bytes": content, "path": name} for name, content in FILES.items() if name != "05.png"]
    pq.write_table(pa.table({"image": images, "key": list(range(11))}), tmp_path / "in.parquet")
    assert run("in.parquet", "-q", "--image-column", "image", "-o", "out.parquet").code == 0
    table = pq.read_table(tmp_path / "out.parquet")
    assert "image" not in table.column_names
    assert table["text"].to_pylist() == [each["text"] for each in found if "error" not in each]

    content = [{"type": "image", "image": "scans/00.png"}, {"type": "text", "text": "Describe"}]
    row = {"messages": [{"role": "user", "content": content}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    chat = ["--media-root", ".", "--max-tokens", 6, "-o", "chat.jsonl"]
    assert cli("generate", "in.jsonl", "-q", "--device", "cpu", "--model", seeing, *chat).code == 0
    assert rows(tmp_path / "chat.jsonl")[0]["text"] == found[0]["text"]


def test_a_run_is_resumed(run, scans, tmp_path, monkeypatch):
    """The list of files is the input: with another one, the run is refused."""
    assert run("scans", "-q", "-o", "whole.jsonl").code == 3
    expected = (tmp_path / "whole.jsonl").read_bytes()
    steps, step = count(), Engine.step

    def step_or_end(self):
        if next(steps) == 12:
            raise UserError("broken off")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step_or_end)
        assert "broken off" in run("scans", "-q", "-o", "out.jsonl").err
    assert (tmp_path / "out.jsonl.part").read_bytes().count(b"\n") > 2
    (scans / "12.png").write_bytes(FILES["00.png"])
    require_error(run("scans", "-q", "-o", "out.jsonl", "--resume"), 2, "the content of the input differs")
    (scans / "12.png").unlink()
    require_error(
        run("scans", "-q", "-o", "out.jsonl", "--resume", "--prompt", "Who?"), 2, "--prompt was Describe, is Who?"
    )
    assert run("scans", "-q", "-o", "out.jsonl", "--resume").code == 3
    assert (tmp_path / "out.jsonl").read_bytes() == expected


@pytest.mark.thorough
def test_shards_and_workers(run, cli, scans, tmp_path):
    """They read the list of files themselves."""
    assert run("scans", "-q", "-o", "whole.jsonl").code == 3
    expected = (tmp_path / "whole.jsonl").read_bytes()
    assert [run("scans", "-q", "-o", "out.jsonl", "--shard", f"{n}/2").code for n in (1, 2)] == [3, 0]
    assert cli("merge", "scans", "-o", "out.jsonl").code == 3
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    assert run("scans", "-q", "-o", "two.jsonl", "-dp", 2).code == 3
    assert (tmp_path / "two.jsonl").read_bytes() == expected


def test_check(run, scans):
    """It loads the images, and names the file that is broken."""
    result = run("scans", command="check")
    assert result.code == 3
    assert "scans/05.png: invalid_image: messages[0].content[0]: it is no JPEG" in result.out
    assert "11 can be served, 1 cannot" in result.out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["scans", "--media-root", "."], "--media-root has no meaning where --prompt asks about files"),
        (["scans", "--id-column", "id"], "--id-column has no meaning where --prompt asks about files"),
        (["scans", "--input-format", "jsonl"], "--input-format has no meaning where --prompt asks about files"),
        (["scans", "--prompt-column", "q"], "--prompt and --prompt-column exclude each other"),
        (["scans/*", "-o", "scans/out.jsonl"], "would be found by the next run of scans/*"),
        (["-"], "--prompt asks about images in files of this machine"),
    ],
)
def test_wrong_commands(run, scans, flags, told):
    """They end before the model is loaded."""
    require_error(run(*flags), 2, told)


def test_files_of_images_are_embedded(run, cli, seeing, scans, tmp_path):
    """``check --embed`` said that they are served; the command had no --prompt, which its error asked for."""
    (scans / "05.png").unlink()
    own = ["-q", "--device", "cpu", "--model", seeing]
    assert cli("embed", "scans", *own, "--prompt", "Describe", "-o", "folder.jsonl").code == 0
    images = [content for name, content in FILES.items() if name != "05.png"]
    pq.write_table(pa.table({"image": images}), tmp_path / "in.parquet")
    given = ["--image-column", "image", "--prompt", "Describe", "-o", "table.jsonl"]
    assert cli("embed", "in.parquet", *own, *given).code == 0
    folder, table = ([each["embedding"] for each in rows(tmp_path / f"{name}.jsonl")] for name in ("folder", "table"))
    assert folder == table and len({str(each) for each in folder}) == 11
    assert "11 can be served, 0 cannot" in cli("check", "scans", *own[1:], "--prompt", "Describe", "--embed").out


def test_a_task_of_texts(cli, seeing, scans):
    """All rows were bad, each for itself."""
    result = cli("check", "scans", "--prompt", "Describe", "--score", "--model", seeing, "--device", "cpu")
    require_error(result, 2, "--prompt has no meaning for score: its rows are texts")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of images, a table of them, and one with the name of a column."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "scans").mkdir()
    (folder / "scans/0.png").write_bytes(FILES["00.png"])
    pq.write_table(pa.table({"image": [FILES["00.png"]], "prompt": ["a"]}), folder / "in.parquet")
    (folder / "in.jsonl").write_text('{"image": "a.png", "prompt": "a"}\n')
    return folder


@pytest.mark.parametrize("command", ["generate", "embed", "check"])
@pytest.mark.parametrize(
    "given",
    [["scans", "--prompt", "D"], ["in.parquet", "--image-column", "image"], ["in.jsonl", "--image-column", "image"]],
)
def test_a_model_that_does_not_see(cli, model_folder, pictures, monkeypatch, command, given):
    """Each row failed, once the model was loaded, because "only text parts are supported in message content"."""
    monkeypatch.chdir(pictures)
    result = cli(command, *given, "--model", model_folder, "--device", "cpu", *["-q"][: command != "check"])
    where = f"{given[1]}: {model_folder.name}: the model takes no images: its architecture, LlamaForCausalLM,"
    require_error(result, 2, where)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--load-format", "dummy"], "the model takes no images: --load-format dummy makes weights of its text part"),
        (["--limit-images", "0"], "--limit-images 0 allows no row an image"),
    ],
)
def test_flags_with_which_no_image_is_seen(cli, seeing, pictures, monkeypatch, flags, told):
    """Each row failed, and none of the errors named the flag."""
    monkeypatch.chdir(pictures)
    own = ["--device", "cpu", "--model", seeing, "--prompt", "D", *flags]
    require_error(cli("generate", "scans", *own), 2, told)


def test_images_without_a_prompt(cli, scans):
    """The way out is named. With a column of images it was --prompt, which was given."""
    way = "need rosebatch generate or embed with --prompt 'What is this?', and no --image-column"
    for flags in ([], ["--image-column", "image", "--prompt", "D"]):
        require_error(cli("generate", "scans/00.png", *flags), 2, f"00.png is a PNG image: images and PDFs {way}")
        require_error(cli("embed", "scans", *flags), 2, f"images {way}")
    require_error(cli("score", "scans"), 2, f"images {way}")
