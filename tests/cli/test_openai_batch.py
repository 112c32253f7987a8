"""An OpenAI batch from a file to files."""

import json

import fsspec
import openai.types
import pytest

from tests.helpers.command_errors import failed_rows, require_error
from tests.helpers.json_lines import read_lines, write_lines
from tests.io.test_openai_batch import DOCUMENTED
from tests.job.lines import codes

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def batch(tmp_path):
    """Two requests that can be served and three that cannot."""
    requests = [
        ("chat", "chat/completions", {"messages": HELLO, "seed": 1}),
        ("bad", "moderations", {"input": "x"}),
        ("text", "completions", {"prompt": "Hello", "temperature": 0}),
        ("chat", "chat/completions", {"messages": HELLO}),
    ]
    common = {"model": "gpt-of-another-house", "max_tokens": 5}
    lines = [
        {"custom_id": name, "method": "POST", "url": f"/v1/{kind}", "body": body | common}
        for name, kind, body in requests
    ]
    path = write_lines(tmp_path / "in.jsonl", lines)
    path.write_text(path.read_text() + "{broken\n")
    return path


def test_output_and_error_file(cli, batch, model_folder, tmp_path):
    """Answers and failures are in separate files, in the order of the requests; exit code 3 reports failures."""
    result = cli("generate", batch, "-o", tmp_path / "out.jsonl", "--model", model_folder, "--quiet")
    assert (result.code, result.out, result.err) == (3, "", failed_rows(3))
    answers = read_lines(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in answers] == ["chat", "text"]
    chat = openai.types.chat.ChatCompletion.model_validate(answers[0]["response"]["body"], strict=True)
    text = openai.types.Completion.model_validate(answers[1]["response"]["body"], strict=True)
    assert chat.usage.completion_tokens == text.usage.completion_tokens == 5
    assert chat.model == text.model == model_folder.name
    failures = read_lines(tmp_path / "out.errors.jsonl")
    assert [line["custom_id"] for line in failures] == ["bad", "chat", None]
    assert codes(failures) == ["unsupported_url", "duplicate_id", "invalid_json"]
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", ".out.jsonl.run", "out.errors.jsonl"}


def test_without_failures_there_is_no_error_file(cli, batch, model_folder, tmp_path):
    """An earlier run's error file would be taken for this run's."""
    batch.write_text(batch.read_text().splitlines()[0] + "\n")
    (tmp_path / "out.errors.jsonl").write_text("of an earlier run\n")
    result = cli("generate", batch, "-o", tmp_path / "out.jsonl", "--model", model_folder, "--quiet")
    assert result.code == 0
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_documented_requests(cli, model_folder, tmp_path):
    """Every request from the API's and vLLM's documentation is served, and the client parses the answers."""
    lines = [
        {**line, "custom_id": f"{source}, {line['custom_id']}"}
        for source, requests in DOCUMENTED.items()
        for line in requests
    ]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = cli("generate", source, "-o", target, "--model", model_folder, "--quiet")
    assert (result.code, result.err) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {".out.jsonl.run", "in.jsonl", "out.jsonl"}
    answers = read_lines(target)
    assert [line["custom_id"] for line in answers] == [line["custom_id"] for line in lines]
    for line, answer in zip(lines, answers, strict=True):
        kind = openai.types.Completion if "prompt" in line["body"] else openai.types.chat.ChatCompletion
        body = kind.model_validate(answer["response"]["body"], strict=True)
        prompts = line["body"]["prompt"] if isinstance(line["body"].get("prompt"), list) else [""]
        assert len(body.choices) == len(prompts) * line["body"].get("n", 1)
        assert 1 <= body.usage.completion_tokens <= len(body.choices) * line["body"].get("max_tokens", 256)
        for choice in body.choices:
            assert (choice.logprobs is not None) == bool(line["body"].get("logprobs"))
            if line["body"].get("response_format") and choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.message.content), dict)
            if line["body"].get("structured_outputs", {}).get("choice"):
                assert choice.message.content in line["body"]["structured_outputs"]["choice"]


def test_to_stdout(cli, batch, model_folder):
    """All lines are in one stream, in order."""
    result = cli("generate", batch, "--model", model_folder, "--quiet")
    assert result.code == 3
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [line["response"]["status_code"] for line in lines] == [200, 400, 200, 400, 400]


def test_the_same_bytes_each_time(cli, batch, model_folder, tmp_path, monkeypatch):
    """Only the time may differ between runs, and it can be set."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in ("one", "two"):
        cli("generate", batch, "-o", tmp_path / f"{name}.jsonl", "--model", model_folder, "--quiet", "--seed", 7)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert read_lines(tmp_path / "one.jsonl")[0]["response"]["body"]["created"] == 1700000000


def test_errors_of_plain_rows(cli, model_folder, tmp_path):
    """--errors gives error rows of plain JSONL a file of their own."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 1}, {"id": "no prompt"}])
    flags = ["-o", tmp_path / "out.jsonl", "--errors", tmp_path / "bad.jsonl", "--model", model_folder, "--quiet"]
    assert cli("generate", source, *flags).code == 3
    assert [row["index"] for row in read_lines(tmp_path / "out.jsonl")] == [0]
    assert [row["id"] for row in read_lines(tmp_path / "bad.jsonl")] == ["no prompt"]


def test_to_another_file_system(cli, batch, model_folder, tmp_path, monkeypatch):
    """Both files go there, and nothing stays here."""
    monkeypatch.chdir(tmp_path)
    root = f"memory://{tmp_path.name}"
    assert cli("generate", batch, "-o", f"{root}/out.jsonl", "--model", model_folder, "--quiet").code == 3
    for name, ids in (("out.jsonl", ["chat", "text"]), ("out.errors.jsonl", ["bad", "chat", None])):
        with fsspec.open(f"{root}/{name}", "rb") as file:
            assert [json.loads(line)["custom_id"] for line in file] == ids
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    "flags", [["-o", "out.parquet"], ["--errors", "bad.jsonl"], ["-o", "out.jsonl", "--errors", "out.jsonl"]]
)
def test_impossible_outputs(cli, batch, model_folder, tmp_path, monkeypatch, flags):
    """Answers fit no table; errors beside stdout have no folder; one file cannot be both outputs."""
    monkeypatch.chdir(tmp_path)
    require_error(cli("generate", batch, "--model", model_folder, "--quiet", *flags), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
