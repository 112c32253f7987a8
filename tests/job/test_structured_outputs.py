"""Rows with grammars beside rows without, over the fake model."""

import json
import random
import re

import jsonschema
import pytest

from tests.job.fake_model import FakeModel
from tests.job.lines import codes, texts, usage

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["friend", "foe"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}


def require_match(text):
    """Checks that a text is JSON of the schema."""
    value = json.loads(text)
    jsonschema.validate(value, SCHEMA)
    assert isinstance(value["age"], int), "5.0 passes for an integer"


def wrapped(schema):
    return {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}


@pytest.mark.parametrize("blocks", [100, 32], ids=["roomy", "preempted"])
def test_every_answer_matches_its_grammar(job, blocks):
    """Rows of four grammars and of none run side by side, with several completions, greedy and sampled."""
    kinds = [
        {"response_format": wrapped(SCHEMA)},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[0-9]{3}-(é|zz)+!"}},
        {"structured_outputs": {"choice": ["yes", "yes, sir", "né"]}},
        {"max_tokens": 9},
    ]
    lines = [
        {"prompt": f"row {i}", "max_tokens": 150, "n": 1 + i % 3, "temperature": i % 2, **kinds[i % 5]}
        for i in range(40)
    ]
    rows, tally, engine = job.run(lines, blocks=blocks)
    assert (engine.stats.preemptions > 0) == (blocks == 32)
    assert (tally.completed, tally.failed) == (40, 0)
    for i, row in enumerate(rows):
        for choice in row.get("choices", [row]):
            assert choice["finish_reason"] == ("stop" if i % 5 < 4 else "length")
            if i % 5 == 0:
                require_match(choice["text"])
            elif i % 5 == 1:
                assert isinstance(json.loads(choice["text"]), dict)
            elif i % 5 == 2:
                assert re.fullmatch("[0-9]{3}-(é|zz)+!", choice["text"])
            elif i % 5 == 3:
                assert choice["text"] in ("yes", "yes, sir", "né")
    assert len({text for row in rows[::5] for text in texts(row)}) > 8
    assert job.results(lines, blocks=blocks) == rows


@pytest.mark.parametrize("scored", [{}, {"logprobs": 1}], ids=["plain", "logprobs"])
@pytest.mark.parametrize("max_tokens", [20, 3])
def test_a_choice_that_parts_at_the_first_token_takes_one_pass(job, scored, max_tokens):
    """Each further token of a label took a step, though no other could come; log-probabilities need these steps."""
    labels = ["positive", "negative", "unclear"]
    lines = [
        {"prompt": f"row {i}", "structured_outputs": {"choice": labels}, "max_tokens": max_tokens, **scored}
        for i in range(30)
    ]
    rows, tally, engine = job.run(lines, return_token_ids=True)
    assert {row["text"] for row in rows} == {label[:max_tokens] for label in labels}
    assert [bytes(row["token_ids"]).decode() for row in rows] == [row["text"] for row in rows]
    assert {row["finish_reason"] for row in rows} == {"stop" if max_tokens == 20 else "length"}
    prompts, sampled = tally.prompt_tokens - tally.cached_tokens, sum(len(row["text"]) for row in rows)
    assert engine.stats.computed_tokens == prompts + (sampled - len(rows) if scored else 0)
    assert tally.output_tokens == sampled


def test_a_grammar_of_all_rows(job):
    """A grammar given by a flag applies to rows without one of their own."""
    flags = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 150}
    lines = [{"prompt": "a"}, {"prompt": "b", "structured_outputs": {"choice": ["c"]}}, {"prompt": "d", "n": 2}]
    first, own, several = job.results(lines, defaults=flags)
    assert own["text"] == "c"
    for text in (first["text"], *texts(several)):
        require_match(text)


def test_answers_that_are_cut_short_by_their_length(job):
    """This is not an error: the finish reason already says that the answer may not match."""
    (row,) = job.results([{"prompt": "x", "max_tokens": 3, "response_format": wrapped(SCHEMA)}])
    assert (row["finish_reason"], row["usage"], row["text"][0]) == ("length", usage(1, 3), "{")


def test_a_grammar_that_does_not_compile(job):
    """Only its row fails, before anything is generated for it."""
    begun = set()
    model = FakeModel(before_step=lambda plan: begun.update(bytes([*s.prompt_token_ids]) for s in plan.started))
    good = {"structured_outputs": {"choice": ["yes"]}}
    lines = [
        {"prompt": "first", **good},
        {"prompt": "x", "n": 3, "structured_outputs": {"regex": "("}, "id": "the second"},
        {"prompt": "x", "response_format": wrapped({"type": "objec"})},
        {"prompt": "x", "structured_outputs": {"choice": []}},
        {"prompt": "x", "structured_outputs": {"json": "{"}},
        {"prompt": "last", **good},
    ]
    rows, tally, _ = job.run(lines, model=model)
    assert codes(rows) == [None, *["invalid_grammar"] * 4, None]
    assert rows[1]["id"] == "the second"
    assert rows[1]["error"]["message"].startswith("line 2: the regex cannot be used: ")
    assert [rows[0]["text"], rows[5]["text"]] == ["yes", "yes"]
    assert begun == {b"first", b"last"}
    assert tally.errors == {"invalid_grammar": 4}


def test_a_grammar_that_fails_on_the_way(job, monkeypatch):
    """An answer cut short there must not pass for a match; its neighbours are served."""
    monkeypatch.setattr("rosebatch.text.grammar.source.MAX_STATES", 100)
    hard = {"structured_outputs": {"regex": "[ab]*a[ab]{30}!"}, "max_tokens": 400}
    model = FakeModel({"all": bytes(random.Random(0).choices(b"ab", k=400))})
    lines = [
        {"prompt": "x", "max_tokens": 2},
        {"prompt": "all", **hard, "id": "the second"},
        {"prompt": "all", **hard, "n": 3},
        {"prompt": "x", "structured_outputs": {"choice": ["yes"]}},
    ]
    rows, tally, _ = job.run(lines, model=model, blocks=500)
    assert codes(rows) == [None, "grammar_failed", "grammar_failed", None]
    assert rows[1]["id"] == "the second"
    assert re.match("line 2: .*too many states", rows[1]["error"]["message"])
    assert rows[3]["text"] == "yes"
    assert (tally.completed, tally.output_tokens, tally.errors) == (2, 2 + 3, {"grammar_failed": 2})


@pytest.mark.parametrize(
    ("stop", "text", "whole"),
    [
        ({"stop_token_ids": [ord("b")]}, "aa", "aab"),
        ({"stop": "b"}, "aa", "aab"),
        ({"stop_token_ids": [ord("c")]}, "aab", "aabc"),
        ({"stop_token_ids": [ord("x")]}, "aabc", "aabc"),
    ],
)
def test_stop_tokens_of_a_row_with_a_grammar(job, stop, text, whole):
    """They end the answer as stop strings do: where the grammar lets them come, also if it ends there itself."""
    line = {"prompt": "x", "structured_outputs": {"choice": ["aabc"]}, **stop}
    rows = job.results([line, {**line, "include_stop_str_in_output": True}])
    assert [(row["text"], row["finish_reason"]) for row in rows] == [(text, "stop"), (whole, "stop")]
