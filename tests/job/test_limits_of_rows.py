"""Values at and past every limit, through the whole job: each costs its own row at most."""

import json

import pytest

from rosebatch.core.errors import RowError
from rosebatch.core.sampling_params import MAX_TOKENS, SamplingParams
from rosebatch.io import tools
from rosebatch.job import chat_rows
from rosebatch.text.batch_or_each import batch_or_each
from rosebatch.text.stop_strings import StopStrings
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import TEMPLATE, FakeModel
from tests.job.lines import codes
from tests.job.tool_templates import chat_tokenizer

GOOD = {"prompt": "good", "max_tokens": 2}


class PanicException(BaseException):
    """As the tokenizers library raises it: no Exception."""


class Backend:
    """A backend with one method replaced: it raises for a group with a bad item."""

    def __init__(self, name, bad, error):
        self._backend = byte_backend()
        method = getattr(self._backend, name)

        def call(items, *args, **kwargs):
            if any(bad in item for item in items):
                raise error
            return method(items, *args, **kwargs)

        setattr(self, name, call)

    def __getattr__(self, name):
        return getattr(self._backend, name)


@pytest.mark.parametrize("error", [PanicException("over"), ValueError("no"), MemoryError(), RecursionError("deep")])
def test_a_prompt_that_the_tokenizer_cannot_encode(job, error):
    """A panic is no Exception, and its group was lost with it."""
    tokenizer = Tokenizer(Backend("encode_batch_fast", "bad", error), TEMPLATE)
    chat = {"messages": [{"role": "user", "content": "bad"}]}
    rows = job.results([GOOD, {"prompt": "a bad one"}, chat, GOOD], tokenizer=tokenizer)
    assert codes(rows) == [None, "invalid_prompt", "invalid_prompt", None]


def test_whoever_ends_the_process_is_heard():
    """Only failures are caught: KeyboardInterrupt would else become an error of every row."""

    def interrupted(items):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch_or_each(interrupted, [1, 2], lambda error: RowError("x", "x"))


# Fields that name token ids: a value for an id, and what ids below zero and past the logits are called.
ID_FIELDS = {
    "prompt_token_ids": (lambda token_id: [token_id], "invalid_token_id", "invalid_token_id"),
    "stop_token_ids": (lambda token_id: [token_id], "invalid_sampling", None),
    "allowed_token_ids": (lambda token_id: [token_id], "invalid_sampling", "invalid_token_id"),
    "logit_bias": (lambda token_id: {str(token_id): 1}, "invalid_token_id", "invalid_token_id"),
}


@pytest.mark.parametrize("name", ID_FIELDS)
@pytest.mark.parametrize("vocab_size", [120, 257, 300])
def test_token_ids_around_the_logits_and_the_tokenizer(job, name, vocab_size):
    """Tokenizers of 257 tokens have more than a model's logits, or fewer. An id past either ended the job."""
    value, below, past = ID_FIELDS[name]
    ids = sorted({-1, 0, 256, 257, vocab_size - 1, vocab_size, 2**31, 2**63, 10**29})
    prompt = {} if name == "prompt_token_ids" else {"prompt": "good"}
    rows = job.results([GOOD, *({**prompt, "max_tokens": 2, name: value(each)} for each in ids)], vocab_size=vocab_size)
    expected = [below if each < 0 else past if each >= vocab_size else None for each in ids]
    assert codes(rows) == [None, *expected]
    assert rows[0]["text"] == FakeModel().complete("good", 2)


def test_an_answer_that_cannot_be_decoded(job):
    """decode_batch raised on another thread, and the job ended."""
    tokenizer = Tokenizer(Backend("decode_batch", ord("!"), OverflowError("big")))
    rows, tally, _ = job.run([GOOD, {"prompt": "x"}, GOOD], tokenizer=tokenizer, model=FakeModel({"x": b"a!b"}))
    assert codes(rows) == [None, "unexpected_error", None]
    assert (tally.completed, tally.failed) == (2, 1)


def test_an_answer_that_cannot_be_told(job, monkeypatch):
    """What an answer raises ended the job with a traceback, again at each --resume."""
    tokenizer = Tokenizer(byte_backend(), TEMPLATE)
    monkeypatch.setattr(tokenizer, "is_special", lambda token_id: 1 // 0)
    rows, tally, _ = job.run([GOOD, {**GOOD, "logprobs": 1}, GOOD], tokenizer=tokenizer)
    assert codes(rows) == [None, "unexpected_error", None]
    assert rows[1]["error"]["message"].startswith("line 2: telling the answer failed: ZeroDivisionError")
    assert (tally.completed, tally.failed) == (2, 1)


def test_stop_strings_where_the_library_gives_up(tokenizer):
    """DecodeStream raises a plain Exception for some tokens, which ended the job in the middle of a step."""

    class GivesUp:
        def step(self, backend, token_id):
            raise Exception("Invalid prefix encountered while decoding stream")

    stop = StopStrings(tokenizer, ["END"])
    fed = []
    for byte in b"an END":
        if byte == ord("n"):
            stop._stream = GivesUp()
        fed.append(stop.feed(byte))
    assert fed == [False] * 5 + [True]


def test_prompts_have_a_limit_in_bytes(job):
    """Eleven million spaces made the tokenizers library panic, with a traceback on stderr."""
    tokenizer = Tokenizer(byte_backend(), TEMPLATE, {"eos_token": "<eos>"}, max_prompt_bytes=12)
    chat = {"messages": [{"role": "user", "content": "x" * 11}]}
    lines = [{"prompt": "x" * 12}, {"prompt": "é" * 6}, {"prompt": "é" * 6 + "x"}, {"prompt": "x" * 13}, chat]
    rows = job.results(lines, tokenizer=tokenizer)
    assert codes(rows) == [None, None, *["prompt_too_long"] * 3]
    assert "--max-prompt-bytes allows 12" in rows[2]["error"]["message"]
    # Not even looked at by the library.
    tokenizer = Tokenizer(Backend("encode_batch_fast", " " * 9, AssertionError()))
    rows = job.results([GOOD, {"prompt": " " * 11_000_000}, GOOD], tokenizer=tokenizer)
    assert codes(rows) == [None, "prompt_too_long", None]


def test_a_long_prompt_is_not_encoded_to_its_end(job):
    """A chat of 3 MB took 600 MB before it was refused. The error says what it said, but for the number."""
    text = "word " * 40_000
    chat = {"messages": [{"role": "user", "content": text}]}
    lines = [{"prompt": text}, chat, {"prompt_token_ids": [7] * 2001}, {"prompt": text, "truncate_prompt_tokens": 50}]
    *refused, cut = job.results(lines, max_model_len=200)
    end = "; with at least one to generate, 200 are allowed"
    for row, has in zip(refused, ("more than 200", "more than 200", "2001"), strict=True):
        assert row["error"]["message"].endswith(f": the prompt has {has} tokens{end}")
    assert cut["usage"]["prompt_tokens"] == 50


@pytest.mark.parametrize("limit", [2**31 - 1, 2**31, 2**63, 2**64, 10**300])
@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "truncate_prompt_tokens"])
def test_large_integers_mean_no_limit(job, name, limit):
    """min_tokens of 2^31 overflowed an int32 and ended the job, again at each --resume."""
    row, after = job.results([{"prompt": "x", "max_tokens": limit, name: limit}, GOOD], max_model_len=20)
    if "error" in row:
        assert row["error"]["code"] == "invalid_field"
        assert limit >= 2**64, "larger integers are no integers of JSON parsers"
    else:
        assert row["usage"]["completion_tokens"] == 19
    assert "error" not in after


def test_parameters_fit_a_devices_words():
    """They reach int32 and fp32 tensors, the least length with the prompt's length added to it."""
    params = SamplingParams(max_tokens=2**70, min_tokens=2**69, top_k=2**40, temperature=1e300)
    assert params.min_tokens == params.max_tokens == MAX_TOKENS
    assert params.min_tokens + 2**29 < 2**31
    assert params.top_k < 2**31
    assert params.temperature < 3e38
    with pytest.raises(ValueError, match=r"min_tokens must be in \[0, max_tokens\]"):
        SamplingParams(max_tokens=5, min_tokens=2**69)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"n": 2**31}, "invalid_sampling"),
        ({"seed": 2**64}, "invalid_sampling"),
        ({"seed": -1}, "invalid_sampling"),
        ({"logprobs": 2**31}, "invalid_sampling"),
        ({"prompt_logprobs": 2**63}, "invalid_sampling"),
        ({"logprobs": True, "top_logprobs": 2**63}, "invalid_sampling"),
        ({"logit_bias": {str(2**31): 1}}, "invalid_token_id"),
        ({"logit_bias": {"9" * 5000: 1}}, "invalid_sampling"),
        ({"logit_bias": {"5": 1e300}}, "invalid_sampling"),
        ({"repetition_penalty": 1e-300}, "invalid_sampling"),
        ({"repetition_penalty": 1e300}, "invalid_sampling"),
        ({"stop_token_ids": [-(2**63)]}, "invalid_sampling"),
        ({"stop_token_ids": [2**31, 2**63]}, None),
        ({"temperature": 1e300, "seed": 1}, None),
        ({"temperature": 1e-300, "top_p": 1e-300, "min_p": 1e-300, "seed": 2**64 - 1}, None),
        ({"truncate_prompt_tokens": -(2**63)}, "invalid_field"),
        ({"stop": "x" * 100_000}, None),
        ({"stop": ["", "y" * 100_000]}, "invalid_sampling"),
    ],
)
def test_values_past_their_limits(job, values, code):
    """Each costs its own row at most, and its message has a bounded size."""
    rows = job.results([GOOD, {**GOOD, **values}, GOOD])
    assert codes(rows) == [None, code, None]
    assert len(json.dumps(rows[1])) < 2000


def test_lines_that_are_nested_too_deeply(tmp_path, job):
    """What can just be read could not be written: the limit is the same wherever a line is handled."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [b'{"prompt": "a", "max_tokens": 1, "x": %s}' % (b"[" * n + b"]" * n) for n in (1, 599, 600, 900, 10_000)]
    source.write_bytes(b"\n".join([*lines, b'{"prompt": "[[{{"}']))
    job.run_file(source, target)
    rows = target.read_text().splitlines()
    assert ["invalid_json" in row for row in rows] == [False, False, True, True, True, False]


def test_a_message_with_a_deep_field(job):
    """An extra field nested 490 deep ended the job with a RecursionError."""
    deep = 1
    for _ in range(490):
        deep = {"a": deep}
    lines = [GOOD, {"messages": [{"role": "user", "content": "x", "extra": deep}]}, GOOD]
    assert codes(job.results(lines)) in ([None, "invalid_messages", None], [None] * 3)


def test_more_tools_or_calls_than_anyone_has(job, monkeypatch):
    """A line of 200,000 calls or tools took 750 MiB and ten seconds, most of it after it was parsed."""
    monkeypatch.setattr(chat_rows, "_MAX_CALLS", 3)
    monkeypatch.setattr(tools, "_MAX_TOOLS", 3)
    call = {"id": "a", "type": "function", "function": {"name": "f0", "arguments": "{}"}}
    offered = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(4)]
    ask = {"role": "user", "content": "x"}
    rows = [
        GOOD,
        *({"messages": [ask, *[{**ask, "role": "assistant", "tool_calls": [call] * n}] * 2]} for n in (1, 2)),
        *({"messages": [ask], "tools": offered[:n], "tool_choice": "none"} for n in (3, 4)),
        {"messages": [{**ask, "tool_calls": 4}]},
        GOOD,
    ]
    results = job.results(rows, tokenizer=chat_tokenizer("hermes"))
    messages = [row.get("error", {}).get("message", "") for row in results]
    assert ["more than 3" in message for message in messages] == [False, False, True, False, True, False, False]
    assert codes([results[2], results[4]]) == ["invalid_messages", "invalid_field"]
    assert messages[2].endswith("the chat has 4 tool calls, more than 3")
    assert messages[4].endswith("tools: there are 4, more than 3")
