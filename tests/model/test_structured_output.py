"""Structured output of the demo model: without a grammar its 135M parameters seldom produce valid JSON."""

import json
import re

import pytest

from rosebatch.cli.app import main
from tests.helpers.marks import needs_demo_model

pytestmark = needs_demo_model


def record(**properties):
    """A schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def text(limit):
    return {"type": "string", "maxLength": limit}


def integer(minimum, limit):
    return {"type": "integer", "minimum": minimum, "maximum": limit}


# Every schema limits the length: no model is sure to end an unbounded string or list.
PERSON = record(name=text(20), age=integer(0, 130), married={"type": "boolean"})
REVIEW = record(
    mood={"enum": ["positive", "neutral", "negative"]},
    stars=integer(1, 5),
    product=record(name=text(16), kind={"enum": ["phone", "laptop", "book", None]}),
)
ORDER = record(
    number={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    items={
        "type": "array",
        "items": record(fruit={"enum": ["apple", "pear", "plum"]}, count=integer(1, 99)),
        "minItems": 1,
        "maxItems": 2,
    },
)
CITIES = {"type": "array", "items": text(12), "minItems": 2, "maxItems": 4}
QUESTIONS = [
    (PERSON, "Ada Lovelace was 36 and married. Describe her as JSON."),
    (PERSON, "Describe a person."),
    (PERSON, 'Bob is 71. He calls himself "the Great". As JSON:'),
    (REVIEW, "This phone is great, I love it! Rate this review as JSON."),
    (REVIEW, "The book was boring and far too long. Rate this review as JSON."),
    (REVIEW, "I never bought anything."),
    (ORDER, "Order AB-1234: two apples and three plums. As JSON:"),
    (ORDER, "I would like a pear, please."),
    (ORDER, "Write a poem about plums."),
    (CITIES, "List the cities of France as JSON."),
    (CITIES, "Which are the biggest cities of Japan? Answer in Japanese."),
    (CITIES, "Write\nmany\nempty\nlines."),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Runs ``rosebatch generate`` on the demo model."""
    folder = tmp_path_factory.mktemp("structured")

    def run(rows, *flags):
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(SystemExit) as exit_info:
            main(["generate", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--quiet", *flags])
        assert exit_info.value.code == 0
        return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]

    return run


def chat(question, **fields):
    return {"messages": [{"role": "user", "content": question}], **fields}


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.thorough
def test_every_document_is_valid(answers):
    """Greedy and wild (temperature 1.3), with both spellings of a schema and two completions of a prompt."""
    rows = [chat(question, response_format=response_format(schema)) for schema, question in QUESTIONS]
    rows += [
        chat(question, structured_outputs={"json": schema}, temperature=1.3, seed=seed, n=2)
        for seed, (schema, question) in enumerate(QUESTIONS)
        if seed % 3 == 1
    ]
    done = answers(rows, "--max-tokens", "120")
    documents = [(row["text"], row["finish_reason"]) for row in done[: len(QUESTIONS)]]
    documents += [(choice["text"], choice["finish_reason"]) for row in done[12:] for choice in row["choices"]]
    schemas = [schema for schema, _ in QUESTIONS] + [PERSON, PERSON, REVIEW, REVIEW, ORDER, ORDER, CITIES, CITIES]
    for (document, finish_reason), schema in zip(documents, schemas, strict=True):
        assert finish_reason == "stop", document
        require_valid(json.loads(document), schema)
    # What the grammar leaves open, the model knows.
    assert '"age": 71' in documents[2][0]


@pytest.mark.thorough
def test_regex_and_choice(answers):
    """The whole text matches: no space before it, no explanation after it."""
    date, kinds = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]", ["yes", "yes, but", "no", "  maybe"]
    rows = [
        chat("When did the second world war end?", structured_outputs={"regex": date}),
        chat("Write a poem.", structured_outputs={"regex": date}, temperature=1.3, seed=1, n=4),
        chat("Is the sky blue?", structured_outputs={"choice": kinds}),
        chat("Write a poem.", structured_outputs={"choice": kinds}, temperature=1.3, seed=2, n=4),
    ]
    one_date, dates, one_kind, some_kinds = answers(rows, "--max-tokens", "20")
    for answer in [one_date, *dates["choices"]]:
        assert re.fullmatch(date, answer["text"])
        assert answer["finish_reason"] == "stop"
    assert one_date["text"].startswith("1945")
    for answer in [one_kind, *some_kinds["choices"]]:
        assert answer["text"] in kinds
        assert answer["finish_reason"] == "stop"


def require_valid(value, schema):
    """Checks a value against the schema keywords that are used here."""
    if "enum" in schema:
        assert any(value == allowed and type(value) is type(allowed) for allowed in schema["enum"])
        return
    match schema["type"]:
        case "object":
            assert type(value) is dict
            assert set(value) == set(schema["required"]) == set(schema["properties"])
            for name, each in value.items():
                require_valid(each, schema["properties"][name])
        case "array":
            assert type(value) is list
            assert schema["minItems"] <= len(value) <= schema["maxItems"]
            for each in value:
                require_valid(each, schema["items"])
        case "string":
            assert type(value) is str
            assert len(value) <= schema.get("maxLength", 100)
            assert re.search(schema.get("pattern", ""), value)
        case "integer":
            assert type(value) is int
            assert schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            assert type(value) is bool
        case other:
            raise AssertionError(f"no check of type {other}")


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ({"name": "a", "age": 3}, PERSON),
        ({"name": "a", "age": True, "married": True}, PERSON),
        ({"name": "a" * 21, "age": 3, "married": True}, PERSON),
        ({"name": "a", "age": 131, "married": True}, PERSON),
        ({"name": "a", "age": 3, "married": True, "more": 1}, PERSON),
        ({"number": "AB-123", "items": [{"fruit": "pear", "count": 1}]}, ORDER),
        ({"number": "AB-1234", "items": []}, ORDER),
        ({"number": "AB-1234", "items": [{"fruit": "fig", "count": 1}]}, ORDER),
        (["a"], CITIES),
    ],
)
def test_the_check_refuses(value, schema):
    """A check that accepts anything would prove nothing above."""
    with pytest.raises(AssertionError):
        require_valid(value, schema)
