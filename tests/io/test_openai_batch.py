"""Requests of an OpenAI batch: what is understood, what is refused, and that nothing is ignored silently."""

import json

import openai.types
import pytest

from rosebatch.errors import RowError
from rosebatch.io.openai_batch import BatchShape, is_request, parse_request
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import Answer, FailedRow, PromptOptions, PromptRow
from rosebatch.request import SamplingParams

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**body):
    return {
        "custom_id": "request-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "some-model", "messages": HELLO, **body},
    }


def text(prompt="Hello", **body):
    return {**chat(), "url": "/v1/completions", "body": {"model": "some-model", "prompt": prompt, **body}}


def parse(values, **defaults):
    return parse_request(values, index=3, where="line 4", defaults=defaults)


def test_a_chat():
    """The API's own defaults hold where the body is silent: not greedy, and as long as the model can go on."""
    row = parse(chat())
    assert row == PromptRow(
        index=3,
        where="line 4",
        metadata={"custom_id": "request-1", "url": "/v1/chat/completions"},
        sampling=SamplingParams(temperature=1.0, max_tokens=2**31 - 1),
        has_seed=False,
        id="request-1",
        messages=HELLO,
    )


def test_every_sampling_field():
    """The names of the API, and those that other servers add."""
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "max_tokens": 7,
        "stop": "x",
        "stop_token_ids": [5],
        "ignore_eos": True,
        "seed": -2,
    }
    row = parse(chat(**fields, max_completion_tokens=9))
    assert row.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        max_tokens=9,
        stop=("x",),
        stop_token_ids=(5,),
        ignore_eos=True,
        seed=2**64 - 2,
    )
    assert row.has_seed


def test_flags_are_the_defaults():
    """They win over the API's, and the body wins over them."""
    assert parse(chat(), temperature=0.0, max_tokens=5).sampling == SamplingParams(max_tokens=5)
    assert parse(chat(temperature=0.5), temperature=0.0).sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Hello", ("Hello", None)), (["Hello"], ("Hello", None)), ([1, 2], (None, (1, 2))), ([[1, 2]], (None, (1, 2)))],
)
def test_prompts_of_completions(prompt, expected):
    """A text or token ids, alone or in a list of one."""
    row = parse(text(prompt))
    assert (row.prompt, row.prompt_token_ids, row.messages) == (*expected, None)


def test_without_method_and_url():
    """Other services' batches leave them out: the body says what it is."""
    for values, url in ((chat(), "/v1/chat/completions"), (text(), "/v1/completions")):
        short = {"custom_id": "a", "body": values["body"]}
        assert parse(short).metadata == {"custom_id": "a", "url": url}


def test_options_of_the_prompt():
    """Those of a chat's template, and those of a text."""
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"a": 1}, "truncate_prompt_tokens": 5}
    assert parse(chat(**options)).options == PromptOptions(**options)
    assert parse(text(echo=True)).options == PromptOptions(echo=True)


def test_fields_without_effect():
    """Accounting and routing of a hosted service, and features that are explicitly off."""
    body = {
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "stream": False,
        "n": 1,
        "logprobs": False,
        "tools": [],
        "response_format": {"type": "text"},
        "presence_penalty": 0,
        "temperature": None,
    }
    assert parse(chat(**body)) == parse(chat())


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ([], "invalid_field", "object"),
        ({"custom_id": 5, "body": {}}, "invalid_field", "custom_id"),
        ({"custom_id": "a", "body": []}, "invalid_field", "body"),
        ({**chat(), "method": "GET"}, "invalid_field", "method"),
        ({**chat(), "url": "/v1/embeddings"}, "unsupported_url", "/v1/embeddings"),
        (chat(messages=[]), "missing_prompt", "messages"),
        (chat(messages="hi"), "invalid_field", "messages"),
        (chat(messages=[{"content": "no role"}]), "invalid_field", "role"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "invalid_messages", "text parts"),
        (chat(temperature="warm"), "invalid_field", "temperature"),
        (chat(top_p=0), "invalid_sampling", "top_p"),
        (chat(stream=True), "unsupported_field", "stream"),
        (chat(tools=[{"type": "function"}]), "unsupported_field", "tools"),
        (chat(n=2), "unsupported_field", "n is"),
        (chat(temprature=1), "unknown_field", "temprature"),
        (chat(prompt="hi"), "invalid_field", "prompt has no meaning"),
        (text(messages=HELLO), "invalid_field", "messages has no meaning"),
        (text(""), "missing_prompt", "prompt"),
        (text(None), "missing_prompt", "prompt"),
        (text(["a", "b"]), "invalid_field", "list of one"),
        (text([1, "b"]), "invalid_field", "token ids"),
        (text([True]), "invalid_field", "token ids"),
        (text(logprobs=0), "unsupported_field", "logprobs"),
        (chat(echo=True), "invalid_field", "echo"),
        (text(suffix="x"), "unsupported_field", "suffix"),
    ],
)
def test_refused(values, code, message):
    """The line's own error, under its id, with a word that names the field."""
    row = parse(values)
    assert isinstance(row, FailedRow)
    assert row.error.code == code
    assert message in row.error.message
    assert (row.index, row.where) == (3, "line 4")


def answer(url, **fields):
    values = {"text": "Hi!", "finish_reason": "stop", "prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 1}
    return Answer(index=3, metadata={"custom_id": "request-1", "url": url}, **values | fields)


def test_the_line_of_a_chat_is_the_clients_type():
    """The official client parses it, strictly, and finds everything in its place."""
    line = BatchShape("toy", 1700000000).result(answer("/v1/chat/completions"))
    assert (line["id"], line["custom_id"], line["error"]) == ("batch_req_3", "request-1", None)
    assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, "req_3")
    body = openai.types.chat.ChatCompletion.model_validate(line["response"]["body"], strict=True)
    assert body.choices[0].message.content == "Hi!"
    assert (body.choices[0].finish_reason, body.created, body.model) == ("stop", 1700000000, "toy")
    assert (body.usage.prompt_tokens, body.usage.completion_tokens, body.usage.total_tokens) == (5, 2, 7)
    assert body.usage.prompt_tokens_details.cached_tokens == 1


def test_the_line_of_a_completion_is_the_clients_type():
    """As for chats; token ids stand beside the text where they are asked for."""
    line = BatchShape("toy", 5).result(answer("/v1/completions", finish_reason="length", token_ids=[8, 9]))
    body = openai.types.Completion.model_validate(line["response"]["body"], strict=True)
    assert (body.choices[0].text, body.choices[0].finish_reason) == ("Hi!", "length")
    assert line["response"]["body"]["choices"][0]["token_ids"] == [8, 9]


def test_the_line_of_a_failure():
    """The shape of the error file: no response, and why."""
    row = FailedRow(index=3, where="line 4", metadata={"custom_id": "a"}, error=RowError("some_code", "no"))
    assert BatchShape("toy", 5).failure(row) == {
        "id": "batch_req_3",
        "custom_id": "a",
        "response": None,
        "error": {"code": "some_code", "message": "line 4: no"},
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps(chat()), True),
        ("\n\n{broken\n" + json.dumps(chat()) + "\n", True),
        ('{"prompt":"a","custom_id":"b"}\n', False),
        ("{broken\n", False),
        ("", False),
        ("[1]", False),
    ],
)
def test_a_batch_is_told_by_its_first_line(tmp_path, content, expected):
    """Blank and broken lines before it do not decide; where nothing does, it is a file of our own fields."""
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    assert PromptReader(str(path), {}).is_batch is expected
    assert PromptReader(str(path), {}, "openai").is_batch
    assert not PromptReader(str(path), {}, "jsonl").is_batch


def test_ids_are_unique(tmp_path):
    """By custom_id: the answers of two requests could not be told apart."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps({**chat(), "custom_id": name}) for name in ("a", "b", "a")))
    rows = list(PromptReader(str(path), {}))
    assert [getattr(row, "error", None) and row.error.code for row in rows] == [None, None, "duplicate_id"]


def test_is_request():
    """Both fields, of an object."""
    assert is_request(chat())
    assert not any(map(is_request, [{"custom_id": "a"}, {"body": {}}, [], None, "custom_id body"]))
