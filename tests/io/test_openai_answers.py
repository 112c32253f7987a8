"""Answers of an OpenAI batch, parsed strictly by the types of the official client."""

import json

import msgspec
import openai.types
import pytest
from msgspec.structs import replace

from rosebatch.core.errors import RowError
from rosebatch.io.openai.lines import BatchShape
from rosebatch.io.results import Choice
from rosebatch.io.rows import FailedRow
from rosebatch.io.scored_tokens import ScoredToken
from tests.helpers.results import make_result
from tests.helpers.scored import packed

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def answer(url, *choices, **fields):
    values = {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 1}
    choices = list(choices) or [Choice(text="Hi!", finish_reason="stop")]
    return make_result(index=3, metadata={"custom_id": "request-1", "url": url}, choices=choices, **values | fields)


def line(url, *choices, **fields):
    """The line of an answer, as it is read again."""
    shape = BatchShape("toy", 1700000000)
    return msgspec.json.decode(msgspec.json.encode(shape.result(answer(url, *choices, **fields))))


def parsed(url, *choices, **fields):
    """The body of an answer: parsed by the official client, and as it is written."""
    body = line(url, *choices, **fields)["response"]["body"]
    kind = openai.types.chat.ChatCompletion if url == CHAT else openai.types.Completion
    return kind.model_validate(body, strict=True), body


def test_the_line_of_a_chat_is_the_clients_type():
    """A field with a wrong name or type would be lost to every client of the API."""
    whole = line(CHAT)
    assert (whole["id"], whole["custom_id"], whole["error"]) == ("batch_req_3", "request-1", None)
    assert (whole["response"]["status_code"], whole["response"]["request_id"]) == (200, "req_3")
    body, written = parsed(CHAT)
    assert whole["response"]["body"] == written
    assert (body.choices[0].message.content, body.choices[0].message.role) == ("Hi!", "assistant")
    assert (body.choices[0].finish_reason, body.created, body.model) == ("stop", 1700000000, "toy")
    assert (body.usage.prompt_tokens, body.usage.completion_tokens, body.usage.total_tokens) == (5, 2, 7)
    assert body.usage.prompt_tokens_details.cached_tokens == 1
    assert body.choices[0].logprobs is None


def test_the_line_of_a_completion_is_the_clients_type():
    """The same for completions; token ids are beside the text if requested."""
    body, written = parsed(TEXT, Choice(text="Hi!", finish_reason="length", token_ids=[8, 9]))
    assert (body.choices[0].text, body.choices[0].finish_reason) == ("Hi!", "length")
    assert written["choices"][0]["token_ids"] == [8, 9]
    assert body.choices[0].logprobs is None


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_the_line_of_several_choices_is_the_clients_type(url):
    """Choices are numbered in order, and tokens are counted over all of them."""
    choices = [Choice(text=name, finish_reason=why) for name, why in (("a", "stop"), ("b", "length"), ("", "stop"))]
    body, _ = parsed(url, *choices, completion_tokens=9)
    assert [choice.index for choice in body.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in body.choices] == ["stop", "length", "stop"]
    assert [choice.message.content if url == CHAT else choice.text for choice in body.choices] == ["a", "b", ""]
    assert (body.usage.completion_tokens, body.usage.total_tokens) == (9, 14)


def scored(raw, logprob, *top):
    """A token and the likeliest tokens in its place. Ids are of the bytes: no line shows them."""

    def token_id(raw):
        return int.from_bytes(raw[:3], "big")

    likeliest = tuple(ScoredToken(token_id(other), other, value) for other, value in top)
    return ScoredToken(token_id(raw), raw, logprob, likeliest)


SCORED = [
    scored(b"Hi", -0.5, (b"Hi", -0.5), (b"Yo", -1.5)),
    scored(b" there", -2.0, (b" all", -0.25), (b" you", -1.0)),
    scored(b"!", 0.0, (b"!", 0.0), (b".", -9.5)),
]


def test_logprobs_of_a_chat_are_the_clients_type():
    """Each token has its bytes and log-probability, and so do the likeliest ones, likeliest first."""
    body, _ = parsed(CHAT, Choice(text="Hi there!", finish_reason="stop", logprobs=packed(SCORED)))
    content = body.choices[0].logprobs.content
    assert [(t.token, t.logprob, bytes(t.bytes)) for t in content] == [
        ("Hi", -0.5, b"Hi"),
        (" there", -2.0, b" there"),
        ("!", 0.0, b"!"),
    ]
    top = [(t.token, t.logprob, bytes(t.bytes)) for t in content[1].top_logprobs]
    assert top == [(" all", -0.25, b" all"), (" you", -1.0, b" you")]
    assert body.choices[0].logprobs.refusal is None


def test_logprobs_of_a_chat_without_the_likeliest():
    """The type requires an empty list, not null."""
    body, _ = parsed(CHAT, Choice(text="Hi", finish_reason="stop", logprobs=packed([scored(b"Hi", -0.5)])))
    assert body.choices[0].logprobs.content[0].top_logprobs == []


def test_a_token_that_is_half_a_character():
    """Clients rebuild characters from the bytes, so these must be exact; the text is a replacement character."""
    tokens = [scored(b"\xf0\x9f", -1.0, (b"\xf0\x9f", -1.0)), scored(b"\x98\x80", -2.0, (b"\x98\x80", -2.0))]
    body, _ = parsed(CHAT, Choice(text="\U0001f600", finish_reason="stop", logprobs=packed(tokens)))
    content = body.choices[0].logprobs.content
    assert bytes(b for token in content for b in token.bytes).decode() == body.choices[0].message.content
    assert (bytes(content[0].top_logprobs[0].bytes), set(content[0].token)) == (b"\xf0\x9f", {"\ufffd"})


def test_logprobs_of_a_completion_are_the_clients_type():
    """The four lists have one entry for each token, and offsets point at the tokens in the text."""
    body, _ = parsed(TEXT, Choice(text="Hi there!", finish_reason="stop", logprobs=packed(SCORED)))
    (choice,) = body.choices
    assert choice.logprobs.tokens == ["Hi", " there", "!"]
    assert choice.logprobs.token_logprobs == [-0.5, -2.0, 0.0]
    assert choice.logprobs.top_logprobs[0] == {"Hi": -0.5, "Yo": -1.5}
    assert choice.logprobs.text_offset == [0, 2, 8]
    pairs = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    assert all(choice.text.startswith(token, offset) for token, offset in pairs)


def test_logprobs_of_an_echoed_prompt_come_first():
    """The prompt's tokens come first in the same lists. The first has no number, and the client's type no null."""
    prompt = packed([scored(b"Say", None), scored(b" it:", -4.0, (b" so", -0.5))])
    choice = Choice(
        text="Say it:Hi there!", finish_reason="stop", logprobs=packed(SCORED), prompt_logprobs=prompt, echo=True
    )
    body = line(TEXT, choice)["response"]["body"]
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Say", " it:", "Hi", " there", "!"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"][0]) == ([0.0, -4.0, -0.5, -2.0, 0.0], {})
    assert logprobs["text_offset"] == [0, 3, 7, 9, 15]
    openai.types.Completion.model_validate(body, strict=True)


def test_logprobs_of_a_completion_without_the_likeliest():
    """A client looks the token itself up among the likeliest, as in the API."""
    body, _ = parsed(TEXT, Choice(text="Hi", finish_reason="stop", logprobs=packed([scored(b"Hi", -0.5)])))
    assert body.choices[0].logprobs.top_logprobs == [{"Hi": -0.5}]


def test_an_unlikely_token_of_a_completion():
    """The token itself is one entry more than requested, as the API's reference says."""
    body, _ = parsed(TEXT, Choice(text=" there", finish_reason="stop", logprobs=packed(SCORED[1:2])))
    assert body.choices[0].logprobs.top_logprobs == [{" all": -0.25, " you": -1.0, " there": -2.0}]


def test_likeliest_tokens_that_look_the_same():
    """Two halves of characters have the same text and so one key: the likelier one counts."""
    token = scored(b"a", -0.5, (b"a", -0.5), (b"\xc3", -1.0), (b"\xe2", -7.0))
    body, _ = parsed(TEXT, Choice(text="a", finish_reason="stop", logprobs=packed([token])))
    assert body.choices[0].logprobs.top_logprobs == [{"a": -0.5, "\ufffd": -1.0}]


def test_offsets_behind_halves_of_a_character():
    """Two tokens that make one character put every later offset one place too late."""
    tokens = [scored(b"\xc3", -1.0, (b"a", -1.0)), scored(b"\xa9", -1.0, (b"a", -1.0)), scored(b"!", 0.0, (b"!", 0.0))]
    body, _ = parsed(TEXT, Choice(text="é!", finish_reason="stop", logprobs=packed(tokens)))
    assert body.choices[0].logprobs.text_offset[2] == 1


def test_logprobs_of_a_prompt_that_is_not_echoed():
    """The lists hold the tokens of the text, so not those of the prompt."""
    prompt = packed([scored(b"Say", None), scored(b" it:", -4.0, (b" so", -0.5))])
    choice = Choice(text="Hi there!", finish_reason="stop", logprobs=packed(SCORED), prompt_logprobs=prompt)
    logprobs = line(TEXT, choice)["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hi", " there", "!"]


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_logprobs_of_a_prompt_alone(url):
    """Log-probabilities that were requested and computed must not vanish from the line."""
    prompt = packed([scored(b"Say", None), scored(b" it:", -4.0, (b" so", -0.5))])
    choice = Choice(text="Hi there!", finish_reason="stop", prompt_logprobs=prompt)
    assert " it:" in json.dumps(line(url, choice))


def test_the_line_of_a_failure():
    """A line of the error file is as the hosted service writes it; what no other request mends is status 500."""
    row = FailedRow(index=3, where="line 4", metadata={"custom_id": "a"}, error=RowError("some_code", "no"))
    assert BatchShape("toy", 5).failure(row) == {
        "id": "batch_req_3",
        "custom_id": "a",
        "response": {
            "status_code": 400,
            "request_id": "req_3",
            "body": {
                "error": {"message": "line 4: no", "type": "invalid_request_error", "param": None, "code": "some_code"}
            },
        },
        "error": None,
    }
    ours = FailedRow(index=3, where="line 4", metadata={}, error=RowError("worker_died", "no"))
    response = BatchShape("toy", 5).failure(ours)["response"]
    assert (response["status_code"], response["body"]["error"]["type"]) == (500, "server_error")


def test_an_answer_may_name_the_model_of_its_request():
    """Who compares files of several models looks there; without a model in the request it is the one that ran."""
    asked = answer(CHAT, Choice(text="a", finish_reason="stop"))
    named = replace(asked, row=replace(asked.row, metadata={**asked.row.metadata, "model": "theirs"}))
    models = [
        BatchShape("ours", 5, echo_model=echo).result(each)["response"]["body"]["model"]
        for echo in (False, True)
        for each in (asked, named)
    ]
    assert models == ["ours", "ours", "ours", "theirs"]
