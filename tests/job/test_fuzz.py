"""Files of broken lines: each line gives one result or one error row, whatever is wrong with it."""

import heapq
import json
import random

import pytest

from rosebatch.io.reader import PromptReader

LINES = 2_000
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
PLAIN = [
    {"prompt": "hello", "max_tokens": 2, "stop": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 5},
    {"messages": CHAT, "max_tokens": 1, "seed": 3, "extra": {"deep": [1, {"a": None}]}},
    {"prompt_token_ids": [1, 2, 3], "max_tokens": 1, "ignore_eos": True, "stop_token_ids": [4]},
    {"prompt": "hello", "max_tokens": 3, "n": 2, "min_tokens": 2, "logprobs": 2, "prompt_logprobs": 1, "echo": True},
    {"prompt": "hello", "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 2, "logit_bias": {"5": 1}},
    {"prompt": "hello", "max_tokens": 9, "n": 2, "structured_outputs": {"regex": "[0-9](a|b)", "choice": None}},
    {"messages": CHAT, "max_tokens": 9, "logprobs": True, "top_logprobs": 2, "structured_outputs": {"choice": ["yes"]}},
]
SCHEMA = {"name": "any", "schema": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}}}
BATCH = [
    {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT, "max_tokens": 2}},
    {"url": "/v1/completions", "body": {"prompt": ["hello"], "max_tokens": 1, "stop": "x"}},
    {"body": {"prompt": ["hello", [1, 2]], "n": 2, "max_tokens": 1, "logprobs": 2, "echo": True, "suffix": None}},
    {"body": {"messages": CHAT, "max_tokens": 9, "response_format": {"type": "json_schema", "json_schema": SCHEMA}}},
    {"body": {"messages": CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "max_tokens": 2}},
]
# Replacements for values: other types, numbers out of range, broken text.
VALUES = [
    *("null", "true", "0", "-1", "1e999", "-0.0", "1e-999", str(2**63), str(2**64), "9" * 400, "NaN", "Infinity"),
    *('""', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\\ufeff"', '"\U0001f600"', '"' + "y" * 3000 + '"'),
    *(
        "[]",
        "{}",
        "[[]]",
        '[""]',
        "[null]",
        "[1, -1]",
        "[1.5]",
        '{"a": 1}',
        '[{"role": "user"}]',
        "[" * 900 + "]" * 900,
    ),
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
    expected = PromptReader(str(source), {}, kind).count()
    assert expected > LINES * 0.9
    limits = {"seqs": 32, "blocks": 1000, "budget": 1024}
    result, _ = job.run_file(source, target, limits=limits, input_format=kind, sampling={"max_tokens": 3})
    rows = [json.loads(line) for line in target.read_bytes().split(b"\n")[:-1]]
    if kind == "openai":
        # Requests that fail have a file of their own.
        errors = (tmp_path / "out.errors.jsonl").read_bytes().split(b"\n")[:-1]
        rows = list(heapq.merge(rows, map(json.loads, errors), key=lambda row: int(row["id"].rpartition("_")[2])))
    assert len(rows) == expected == result.report["completed"] + result.report["failed"]
    failed = [row.get("error") is not None for row in rows]
    assert sum(failed) == result.report["failed"] == result.num_failed
    assert 0.4 < sum(failed) / expected < 0.9
    if kind == "jsonl":
        assert [row["index"] for row in rows] == list(range(expected))
        whole = [row.get("choices", [row]) for row, bad in zip(rows, failed, strict=True) if not bad]
        assert all(choice["finish_reason"] for choices in whole for choice in choices)
        assert {len(choices) for choices in whole} >= {1, 2}
    else:
        assert [row["id"] for row in rows] == [f"batch_req_{i}" for i in range(expected)]
    assert not failed[-1]
    assert set(result.report["errors"]) >= {"invalid_json", "invalid_field", "invalid_sampling", "invalid_grammar"}
