"""Grammars at and past every limit, between rows that are served: each costs its own row at most."""

import json
import random
import sys

import pytest

from tests.helpers.json_lines import read_lines
from tests.job.fuzz_lines import PATTERNS
from tests.job.job_memory import peak

LARGE = 10_000_000
LIMITS = {"grammar_timeout": 0.3, "grammar_memory": "64MiB", "max_inflight_bytes": "64MiB"}
ENGINE = {"seqs": 16, "blocks": 1000, "budget": 1024}
# Lines that are read ahead, and what the C library keeps of memory that is free again.
REST = 64 << 20
COUNTS = [0, 1, 1000, 100_000, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**400]
REGEXES = [
    *("a?" * 100_000, "(" * 10_000 + "a" + ")" * 10_000, "[" * 10_000, "a" * LARGE, "|" * LARGE, "(a|b" * 1000),
    *("[ab]*a[ab]{30}", "(.*a){40}", "(((a{99}){99}){99}){99}", "[^\\x00-\\U0010ffff]", "[]", "a{2,1}"),
    *("(?=a)b", "\\1", "(?!a)", "a^", "$a", "\ud800", "\x00", "", "\\p{Greek}{1000}", "(?i)" + "k" * 5000),
    *(f"[ab]{{0,{count}}}" for count in COUNTS),
    *(f"[ab]{{{count}}}" for count in COUNTS),
    "|".join(f"{number:06}" for number in range(20_000)),
]
SCHEMAS = [
    *(json.dumps(PATTERNS), '{"not":' * 10_000 + "{}" + "}" * 10_000, '{"items":' * 400 + "{}" + "}" * 400, "true"),
    *("false", "{}", '{"$ref": "#"}', '{"$ref": "#/$defs/none"}', '{"enum": []}', '{"const": NaN}'),
    *('{"type": "integer", "minimum": 5, "maximum": 4}', '{"type": "number", "multipleOf": 0}', '{"allOf": [false]}'),
    '{"type": "objec"}',
    *(f'{{"type": "number", "minimum": {text}}}' for text in ("NaN", "Infinity", "1e308", "1e309", "5e-324", "-0.0")),
    *(f'{{"type": "integer", "minimum": {count}, "maximum": {count + 1}}}' for count in COUNTS),
    *(f'{{"type": "integer", "multipleOf": {count}}}' for count in COUNTS),
    *(f'{{"type": "string", "minLength": {count}}}' for count in COUNTS),
    *(f'{{"type": "array", "items": {{}}, "minItems": {count}}}' for count in COUNTS),
    json.dumps({"type": "string", "pattern": "a" * 100_000}),
    json.dumps({"enum": ["x" * LARGE]}),
    json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
    json.dumps({"oneOf": [{"const": f"{i}" * 20} for i in range(5000)]}),
]
CHOICES = [
    *([], [""], ["x" * LARGE], ["x"] * 100_000, [f"{i:06}" for i in range(50_000)], [1], [None], ["\x00"], ["yes", ""]),
    [f"{'deep ' * i}" for i in range(300)],
]
FORESEEN = {"invalid_json", "invalid_field", "invalid_sampling", "invalid_grammar", "grammar_too_large"}


def lines():
    """A line of JSON for each grammar."""
    # A surrogate stays an escape.
    for regex in REGEXES:
        yield json.dumps({"regex": regex})
    for schema in SCHEMAS:
        yield f'{{"json": {schema}}}'
        yield json.dumps({"json": schema})
    for choice in CHOICES:
        yield json.dumps({"choice": choice})


def run(job, tmp_path, chosen):
    """Run rows with grammars, and a good one after each; the error codes of the former."""
    job.settings = LIMITS
    good = ['{"prompt": "good", "max_tokens": 3}', '{"prompt": "g", "structured_outputs": {"choice": ["yes"]}}']
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for i, grammar in enumerate(chosen):
            file.write(f'{{"prompt": "row", "max_tokens": 40, "structured_outputs": {grammar}}}\n{good[i % 2]}\n')
    result, _ = job.run_file(source, target, limits=ENGINE)
    rows = read_lines(target)
    assert [row["index"] for row in rows] == list(range(2 * len(chosen)))
    assert result.report["completed"] + result.report["failed"] == len(rows)
    expected = [rows[1]["text"], "yes"]
    assert [row.get("text") for row in rows[1::2]] == [expected[i % 2] for i in range(len(chosen))]
    return {row["error"]["code"] for row in rows[::2] if "error" in row}


def test_some_grammars_at_their_limits(job, tmp_path):
    """The quick ones: broken, empty, with values that no number type holds."""
    quick = [line for line in lines() if len(line) < 200 and "999" not in line and "allOf" not in line]
    codes = run(job, tmp_path, random.Random(0).sample(quick, 24))
    assert "invalid_grammar" in codes <= FORESEEN


@pytest.mark.thorough
def test_all_grammars_at_their_limits(job, tmp_path):
    """None ends the job, hangs it, or harms a row beside it."""
    codes = run(job, tmp_path, shuffled())
    assert {"invalid_grammar", "grammar_too_large"} <= codes <= FORESEEN


def shuffled():
    chosen = list(lines())
    random.Random(1).shuffle(chosen)
    return chosen


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_memory_beside_grammars_at_their_limits(tmp_path):
    """What a grammar takes must be the memory of the process that tries it, not of the job."""
    rows = [f'{{"prompt": "row", "max_tokens": 40, "structured_outputs": {grammar}}}' for grammar in shuffled()]
    settings = {"limits": ENGINE, "launch": LIMITS}
    # Rows under way, grammars that are kept, and the sources of those that were tried.
    assert peak(tmp_path, rows, "out.jsonl", settings) < 3 * (64 << 20) + REST
