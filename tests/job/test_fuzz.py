"""Files of broken lines: each line gives one result or one error row, whatever is wrong with it."""

import heapq
import json
import random

import pyarrow.parquet as pq
import pytest

from rosebatch.io.reader import PromptReader
from rosebatch.job.check import check_rows
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.json_lines import read_lines
from tests.job.fake_model import FakeModel, launch_fake, make_engine
from tests.job.fuzz_lines import BATCH, CHATTY, DEEP, FORESEEN, LIMIT, NUMBERS, PLAIN, SHORT, limit_lines
from tests.job.lines import codes

LINES = 2_000
# Replacements for values: other types, numbers out of range, broken text.
VALUES = [
    *("null", "true", "0", "-1", "1e999", "-0.0", "1e-999", str(2**63), str(2**64), "9" * 400, "NaN", "Infinity"),
    *('""', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\\ufeff"', '"\U0001f600"', '"' + "y" * 3000 + '"'),
    *("[]", "{}", "[[]]", '[""]', "[null]", "[1, -1]", "[1.5]", '{"a": 1}', '[{"role": "user"}]'),
    "[" * 900 + "]" * 900,
    # Values for fields about several completions and grammars.
    *("2", "21", '{"5": "x", "y": 1e999}', '["a", "b", "c"]', '[[1], ["a"], "b"]', '"("', '"[ab]*a[ab]{30}"'),
    *('{"type": "json_object"}', '{"type": "objec"}', '{"$ref": "#"}', '{"json": "{"}', '{"regex": "a", "choice": []}'),
]


def mutate(line, rng):
    """Makes up to three changes to a good line."""
    for _ in range(rng.randint(0, 3)):
        kind = rng.randrange(5)
        place = rng.randrange(len(line) + 1)
        if kind == 0:
            line = line[:place] + bytes([rng.randrange(256)]) + line[place + rng.randrange(2) :]
        elif kind == 1:
            line = line[:place]
        elif kind == 2:
            line = line[:place] + line[rng.randrange(len(line) + 1) :]
        else:
            # Replace a value: from a colon to the next comma.
            colons = [i for i, byte in enumerate(line) if byte == ord(":")] or [0]
            start = rng.choice(colons) + 1
            end = line.find(b",", start)
            line = line[:start] + rng.choice(VALUES).encode("utf-8", "surrogatepass") + line[end if end > 0 else -1 :]
    return line.replace(b"\n", b" ").replace(b"\r", b" ")


def run(job, source, target, kind, **limits):
    """Runs lines of a kind of file. Gives the result, and all rows in order, also those that failed."""
    # A line whose logprobs became a list has the field of a result.
    column = "out" if kind == "jsonl" else None
    options = {"input_format": kind, "sampling": {"max_tokens": 3}, "result_column": column}
    result, _ = job.run_file(source, target, limits={"seqs": 32, "budget": 1024, **limits}, **options)
    # Requests that fail have a file of their own.
    paths = [path for path in (target, target.with_name("out.errors.jsonl")) if path.exists()]
    parts = [pq.read_table(path).to_pylist() if path.suffix == ".parquet" else read_lines(path) for path in paths]
    if column:
        (part,) = parts
        rows = [row[column] for row in part]
        assert [row["index"] for row in rows] == list(range(len(rows)))
    else:
        rows = list(heapq.merge(*parts, key=lambda row: int(row["id"].rpartition("_")[2])))
        assert [row["id"] for row in rows] == [f"batch_req_{i}" for i in range(len(rows))]
    assert len(rows) == result.report["completed"] + result.report["failed"]
    return result, rows


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["jsonl", "openai"])
def test_mutated_lines(job, tmp_path, kind):
    """As many rows come out as lines went in, in order, and good lines among bad ones are served."""
    rng = random.Random(kind)
    name, good = ("id", PLAIN) if kind == "jsonl" else ("custom_id", BATCH)
    lines = [mutate(json.dumps({**rng.choice(good), name: f"row {i}"}).encode(), rng) for i in range(LINES)]
    # A NUL, byte order marks, and lines of 10 MB, one of them only brackets.
    lines += [b"\x00", b"\xef\xbb\xbf{}", b"\xff\xfe", b"[" * 10_000_000, b'{"prompt":"' + b"z" * 10_000_000 + b'"}']
    rng.shuffle(lines)
    lines += [json.dumps({**good[0], name: "the last"}).encode()]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    assert PromptReader(str(source), {}, kind).count() is None, "lines that are read past are not counted"
    expected = sum(bool(line.strip()) for line in lines)
    assert expected > LINES * 0.9
    result, rows = run(job, source, target, kind, blocks=1000)
    assert len(rows) == expected
    failed = [code is not None for code in codes(rows)]
    assert sum(failed) == result.report["failed"] == result.num_failed
    assert 0.4 < sum(failed) / expected < 0.9
    if kind == "jsonl":
        whole = [row.get("choices", [row]) for row, bad in zip(rows, failed, strict=True) if not bad]
        assert all(choice["finish_reason"] for choices in whole for choice in choices)
        assert {len(choices) for choices in whole} >= {1, 2}
    assert not failed[-1]
    assert set(result.report["errors"]) >= {"invalid_json", "invalid_field", "invalid_sampling", "invalid_grammar"}


def run_at_limits(job, tmp_path, lines, kind, target):
    """Runs lines with good ones between them; gives the error codes of the others."""
    job.tokenizer = Tokenizer(byte_backend(), CHATTY, {"eos_token": "<eos>"})
    good = json.dumps(PLAIN[0] if kind == "jsonl" else {"custom_id": "good", **BATCH[1]})
    between = [each.replace('"good"', f'"good {i}"') for i, line in enumerate(lines) for each in (line, good)]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(between), encoding="utf-8")
    _, rows = run(job, source, tmp_path / target, kind, blocks=400, max_model_len=LIMIT)
    assert len(rows) == len(between)
    assert codes(rows[1::2]) == [None] * len(lines), "a good row pays for no other"
    return set(filter(None, codes(rows)))


def checked(job, source):
    """Row and code of each line that ``check`` finds, with the limits of the run."""
    config = launch_fake(make_engine(FakeModel(), max_model_len=LIMIT), job.tokenizer).plan.source.config
    failed = []
    check_rows(PromptReader(str(source), {"max_tokens": 3}, "jsonl", "out"), job.tokenizer, config, failed.append)
    return {(row.index, row.error.code) for row in failed}


def test_check_finds_what_fails_at_the_limits(job, tmp_path):
    """A file that ``check`` calls good must have no error rows, and the other way round."""
    lines = limit_lines("jsonl", NUMBERS + SHORT + DEEP, 200)
    run_at_limits(job, tmp_path, lines, "jsonl", "out.jsonl")
    rows = [row["out"] for row in read_lines(tmp_path / "out.jsonl")]
    failed = {(row["index"], row["error"]["code"]) for row in rows if "error" in row}
    assert checked(job, tmp_path / "in.jsonl") == failed


@pytest.mark.parametrize("target", ["out.jsonl", "out.parquet"])
def test_values_at_and_past_every_limit(job, tmp_path, target):
    """One result each, whatever stands in whichever field, and the file is finished at the end."""
    found = run_at_limits(job, tmp_path, limit_lines("jsonl", NUMBERS + SHORT + DEEP, 400), "jsonl", target)
    assert {"invalid_json", "invalid_field", "invalid_sampling", "invalid_messages"} <= found <= FORESEEN


def test_values_at_and_past_every_limit_of_a_batch(job, tmp_path):
    """The same for requests of the API."""
    found = run_at_limits(job, tmp_path, limit_lines("openai", NUMBERS + SHORT + DEEP, 400), "openai", "out.jsonl")
    assert {"invalid_json", "invalid_field", "invalid_sampling"} <= found <= FORESEEN


@pytest.mark.thorough
@pytest.mark.parametrize("how", [("jsonl", "out.jsonl"), ("jsonl", "out.parquet"), ("openai", "out.jsonl")])
def test_every_value_in_every_place(job, tmp_path, how):
    """All of them, not a sample."""
    kind, target = how
    lines = limit_lines(kind, NUMBERS + SHORT + DEEP, 10**9)
    assert len(lines) > 2_000
    assert run_at_limits(job, tmp_path, lines, kind, target) <= FORESEEN
