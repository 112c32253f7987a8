"""Log-probabilities of rows, of their completions and of their prompts, over the fake model."""

import pytest
from tokenizers import processors

from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import scored
from tests.job.lines import choices_of


def written(tokens):
    """Log-probabilities as result rows have them."""

    def one(token_id, logprob):
        return {"token": bytes([token_id]).decode(errors="replace"), "token_id": token_id, "logprob": logprob}

    return [{**one(t.token_id, t.logprob), "top_logprobs": [one(*other) for other in t.top]} for t in tokens]


@pytest.mark.parametrize("blocks", [64, 9], ids=["roomy", "preempted"])
def test_logprobs_of_each_token(job, blocks):
    """Every token has one, in order, even if a preempted completion was computed again."""
    lines = [{"prompt": f"row {i}", "max_tokens": 9, "logprobs": i % 3, "n": 1 + i % 2} for i in range(8)]
    rows, _, engine = job.run(lines, blocks=blocks)
    assert (engine.stats.preemptions > 0) == (blocks == 9)
    for i, row in enumerate(rows):
        for choice in row.get("choices", [row]):
            expected = [scored(byte, 5 + at, i % 3) for at, byte in enumerate(choice["text"].encode())]
            assert choice["logprobs"] == written(expected)
            assert len(expected) == 9


def test_logprobs_only_where_they_are_asked_for(job):
    """A neighbour's request must not add log-probabilities to a row."""
    lines = [{"prompt": "abc", "max_tokens": 2, **more} for more in ({}, {"logprobs": 0}, {"prompt_logprobs": 0})]
    names = [{"logprobs", "prompt_logprobs"} & set(row) for row in job.results(lines)]
    assert names == [set(), {"logprobs"}, {"prompt_logprobs"}]


@pytest.mark.parametrize("budget", [64, 3], ids=["whole", "in-chunks"])
def test_logprobs_of_the_prompt(job, budget):
    """Every prompt token but the first has one, in chunks or whole; cached tokens must be computed for it."""
    lines = [{"prompt": "0123456789", "max_tokens": 2, **more} for more in ({}, {"prompt_logprobs": 2}, {})]
    lines.append({**lines[1], "n": 2})
    rows = job.results(lines, budget=budget, seqs=1)
    expected = written([scored(token_id, at, 2) for at, token_id in enumerate(b"0123456789")])
    expected[0] |= {"logprob": None, "top_logprobs": []}
    assert [row.get("prompt_logprobs") for row in rows] == [None, expected, None, expected]


def test_an_echoed_prompt_with_its_logprobs(job):
    """One list covers prompt and completion, with offsets into the whole text."""
    (line,) = job.answer({"prompt": "Say it:", "echo": True, "logprobs": 1, "max_tokens": 3})
    (choice,) = choices_of(line)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"] == list(range(10))
    expected = [scored(byte, at, 1).logprob for at, byte in enumerate(choice["text"].encode())]
    assert choice["logprobs"]["token_logprobs"] == [0.0, *expected[1:]]
    assert choice["logprobs"]["top_logprobs"][0] == {}


def test_logprobs_without_a_tokenizer(job):
    """Ids in, ids and numbers out, as reinforcement learning needs them, was refused."""
    line = {"prompt_token_ids": [*b"01234"], "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1}
    (row,), (plain,) = job.results([line], without_tokenizer=True), job.results([line])
    for name in ("logprobs", "prompt_logprobs"):
        for token, expected in zip(row[name], plain[name], strict=True):
            assert token == expected | {"token": None, "top_logprobs": token["top_logprobs"]}
            assert [each["token"] for each in token["top_logprobs"]] == [None] * len(expected["top_logprobs"])
            numbers = [[(e["token_id"], e["logprob"]) for e in t["top_logprobs"]] for t in (token, expected)]
            assert numbers[0] == numbers[1]
    (answer,) = job.answer({"prompt": [*b"01234"], "logprobs": 1, "max_tokens": 2}, without_tokenizer=True)
    (choice,) = choices_of(answer)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token['token_id']}" for token in row["logprobs"]]
    assert choice["logprobs"]["text_offset"] == [0, 0]


def test_each_choice_echoes_the_prompts_logprobs(job):
    """Each choice's text begins with the prompt, so its lists must too."""
    (line,) = job.answer({"prompt": "Say it:", "echo": True, "logprobs": 1, "n": 2, "max_tokens": 3})
    for choice in choices_of(line):
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_offsets_behind_a_special_token(job):
    """After a BOS in an echoed prompt, every later offset was some places too large."""
    backend = byte_backend()
    backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 256)])
    body = {"prompt": "Say it:", "echo": True, "logprobs": 1, "max_tokens": 3}
    (line,) = job.answer(body, tokenizer=Tokenizer(backend))
    (choice,) = choices_of(line)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens[1:]) == choice["text"]
    assert offsets == [0, *range(10)]


def test_a_prompt_alone(job):
    """Scoring a text needs one generated token: it must appear nowhere."""
    (line,) = job.answer({"prompt": "Say it:", "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2})
    body = line["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["Say it:"] * 2
    assert [choice["logprobs"]["tokens"] for choice in body["choices"]] == [list("Say it:")] * 2
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    alone = {"prompt": "abc", "max_tokens": 0}
    rows, tally, _ = job.run([{**alone, "prompt_logprobs": 0}, alone])
    assert (rows[0]["text"], rows[0]["usage"]["completion_tokens"], len(rows[0]["prompt_logprobs"])) == ("", 0, 3)
    assert rows[1]["error"]["message"] == "line 2: max_tokens must be >= 1, got 0"
    assert tally.output_tokens == 0
