"""The rows of the examples, and those of the README."""

import json
import re
import subprocess

import jsonschema
import pytest
from openai.types.responses import Response

from rosebatch.cli.app import main
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import Row
from rosebatch.io.tasks.embed import Embed
from rosebatch.io.tasks.score import Score
from tests.examples.folder import ENVIRONMENT, FOLDER, TINY
from tests.helpers.checkout import ROOT
from tests.helpers.forked_jobs import python
from tests.helpers.json_lines import read_lines
from tests.helpers.marks import needs_demo_model


@pytest.mark.parametrize(
    ("name", "is_batch"),
    [
        ("prompts.jsonl", False),
        ("openai_batch.jsonl", True),
        ("responses.jsonl", True),
        ("regression.jsonl", False),
        ("structured_output.jsonl", False),
        ("tools.jsonl", False),
    ],
)
def test_every_example_is_a_good_row(name, is_batch):
    """The first thing that anyone tries must not fail."""
    reader = PromptReader(str(FOLDER / name), {})
    assert reader.is_batch is is_batch
    rows = list(reader)
    assert len(rows) >= 3
    assert [row for row in rows if not isinstance(row, Row)] == []


def test_the_examples_show_each_kind_of_row():
    """A chat, a plain prompt, a stop string, sampling of its own, and a field that is carried."""
    rows = list(PromptReader(str(FOLDER / "prompts.jsonl"), {}))
    assert any(row.messages for row in rows)
    assert any(row.prompt for row in rows)
    assert any(row.sampling.stop for row in rows)
    assert any(row.sampling.seed is not None and not row.sampling.greedy for row in rows)
    assert any(set(row.metadata) - {"id"} for row in rows)
    assert len({row.metadata["id"] for row in rows}) == len(rows)


@pytest.mark.thorough
@needs_demo_model
def test_the_rows_of_the_readme(tmp_path):
    """Its answer was that of fp32; where the demo model runs in bfloat16, pasted rows got another one."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text(re.search(r'```\n((?:{"[^\n]*\n){3})```', page)[1])
    command = [python(), "-m", "rosebatch", "generate", str(tmp_path / "prompts.jsonl"), "-q", "--max-tokens", "8"]
    for dtype in ("float32", "bfloat16"):
        answers = subprocess.check_output([*command, "--dtype", dtype], env=ENVIRONMENT, text=True).splitlines()
        assert answers[1] == re.search(r'```\n({"id":"france".*)\n```', page)[1]


@pytest.mark.thorough
@needs_demo_model
def test_structured_output():
    """Every answer has the form that its row asks for."""
    source = FOLDER / "structured_output.jsonl"
    command = [python(), "-m", "rosebatch", "generate", str(source), "--device", "cpu", "--quiet"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["person", "review", "cities", "date", "sky"]
    assert {row["finish_reason"] for row in rows.values()} == {"stop"}
    assert set(json.loads(rows["person"]["text"])) == {"name", "born", "city"}
    assert json.loads(rows["review"]["text"])["mood"] in ("positive", "neutral", "negative")
    assert len(json.loads(rows["cities"]["text"])["cities"]) == 3
    assert re.fullmatch("1945-[0-9]{2}-[0-9]{2}", rows["date"]["text"])
    assert rows["sky"]["text"] in ("red", "green", "blue")


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_tools(chat_model, tmp_path, seed):
    """Forced calls match their schemas whatever the model is, and reasoning keeps to its budget."""
    source, target = FOLDER / "tools.jsonl", tmp_path / "out.jsonl"
    command = ["generate", str(source), "-o", str(target), "--model", str(chat_model), "--device", "cpu", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--seed", str(seed), "--temperature", "1"])
    assert ended.value.code == 0
    rows = {row["id"]: row for row in map(json.loads, target.read_text().splitlines())}
    asked = {row["id"]: row for row in map(json.loads, source.read_text().splitlines())}
    for name in ("any-call", "one-tool"):
        schemas = {each["function"]["name"]: each["function"]["parameters"] for each in asked[name]["tools"]}
        assert rows[name]["finish_reason"] == "tool_calls"
        for call in rows[name]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    assert rows["thinks"]["text"] in ("yes", "no")
    assert "text" in rows["after-a-call"]


def test_responses(chat_model, tmp_path):
    """Every answer is one that the client reads; a form and a call that were asked for are there."""
    source, target = FOLDER / "responses.jsonl", tmp_path / "out.jsonl"
    command = ["generate", str(source), "-o", str(target), "--model", str(chat_model), "--device", "cpu", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--seed", "1"])
    assert ended.value.code == 0
    lines = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    bodies = {name: Response.model_validate(line["response"]["body"], strict=True) for name, line in lines.items()}
    assert list(bodies) == ["text", "items", "form", "call"]
    assert json.loads(bodies["form"].output_text)["answer"] in ("yes", "no")
    call = bodies["call"].output[-1]
    assert (call.type, call.name, json.loads(call.arguments)["city"] in ("Paris", "Rome")) == (
        "function_call",
        "weather",
        True,
    )


@pytest.mark.parametrize(
    ("task", "name", "field", "shape"),
    [
        (Embed(), "embeddings", "embedding", "tiny-llama"),
        (Embed(), "embeddings", "embedding", "all-minilm-l6"),
        (Score(), "scores", "scores", "tiny-llama"),
    ],
)
def test_the_examples_of_what_generates_nothing(tmp_path, task, name, field, shape):
    """The first vectors and scores that anyone makes must not fail."""
    rows = list(PromptReader(str(FOLDER / f"{name}.jsonl"), {}, task=task))
    assert [type(row) for row in rows] == [Row] * 3
    target = tmp_path / "vectors.jsonl"
    model = TINY.with_stem(shape)
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu", "--quiet", "-o", str(target)]
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    with pytest.raises(SystemExit) as end:
        main([task.name, str(source), *flags])
    assert end.value.code == 0
    assert json.loads(target.read_text())[field]


@pytest.mark.parametrize(
    ("command", "name", "field"),
    [
        ("classify", "classes", "label"),
        ("classify", "entities", "tokens"),
        ("score", "pairs", "relevance"),
        ("embed", "embeddings", "embedding"),
    ],
)
def test_the_examples_of_encoders(with_head, tmp_path, command, name, field):
    """All of their rows are served."""
    target = tmp_path / "out.jsonl"
    flags = ["--model", str(with_head(name)), "--device", "cpu", "--quiet"]
    with pytest.raises(SystemExit) as end:
        main([command, str(FOLDER / f"{name}.jsonl"), "-o", str(target), *flags])
    assert end.value.code == 0
    rows = read_lines(target)
    assert len(rows) == 3
    assert all(row[field] for row in rows)
    if name == "entities":
        given = read_lines(FOLDER / "entities.jsonl")
        for row, own in zip(rows, given, strict=True):
            # The tokenizer has a token for each letter.
            assert [own["prompt"][t["start"] : t["end"]] for t in row["tokens"]] == list(own["prompt"])
