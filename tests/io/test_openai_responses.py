"""``/v1/responses``: requests as chats, and answers as items that the official client parses strictly."""

import re
from pathlib import Path

import msgspec
import pytest
from openai.types.responses import Response
from openai.types.responses import response_create_params as params

from rosebatch.core.sampling_params import MAX_TOKENS
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.io.openai.fields import IGNORED, REFUSED, GenerationBody
from rosebatch.io.openai.lines import BatchShape, parse_request
from rosebatch.io.openai.responses_request import IGNORED as OWN_IGNORED
from rosebatch.io.openai.responses_request import REFUSED as OWN_REFUSED
from rosebatch.io.openai.responses_request import as_chat
from rosebatch.io.results import Choice
from rosebatch.io.scored_tokens import ScoredToken
from rosebatch.io.tools import ToolCall
from tests.helpers.results import assert_failed, make_result
from tests.helpers.scored import packed

URL = "/v1/responses"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai_batch.md"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}
SERVED = {
    *("include", "input", "instructions", "max_output_tokens", "model", "parallel_tool_calls", "reasoning"),
    *("temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p"),
}


def line(**body):
    values = {"custom_id": "a", "url": URL, "body": {"model": "any", "input": "Hi", **body}}
    return parse_request(values, index=3, where="line 4", defaults={})


def told(row, *, text="Hello.", **choice):
    """The body of the answer to a row, which the client accepts."""
    choices = [Choice(**{"text": text, "finish_reason": "stop", **choice})]
    answer = make_result(
        index=3, metadata=row.metadata, choices=choices, prompt_tokens=5, completion_tokens=2, cached_tokens=1
    )
    line = msgspec.json.decode(msgspec.json.encode(BatchShape("toy", 1700000000).result(answer)))
    body = line["response"]["body"]
    Response.model_validate(body, strict=True)
    return body


def test_a_text():
    """The API's defaults, and the smallest response."""
    row = line()
    assert row.messages == [{"role": "user", "content": "Hi"}]
    assert (row.sampling.temperature, row.sampling.max_tokens) == (1.0, MAX_TOKENS)
    body = told(row)
    assert (body["id"], body["object"], body["status"], body["model"]) == ("resp_3", "response", "completed", "toy")
    (message,) = body["output"]
    assert (message["id"], message["role"], message["status"]) == ("msg_3", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": None}]
    assert body["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }


def test_items_are_messages():
    """Each kind of item, in order; calls of one turn are one message, and reasoning is left out.

    Further fields of a message or a call, such as its name, were dropped: the template decides.
    """
    items = [
        {"role": "developer", "content": "Be terse.", "name": "Ann", "id": "msg_1", "status": "completed"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": each} for each in "ab"]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}", "why": "x", "by": None},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "seen", "id": "o", "from": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "not seen"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]  # fmt: skip

    def call(number, arguments):
        return {"id": number, "type": "function", "function": {"name": "look", "arguments": arguments}}

    row = line(input=items, instructions="First.", tools=[TOOL])
    assert row.messages == [
        {"role": "system", "content": "First."},
        {"role": "developer", "content": "Be terse.", "name": "Ann"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [{"why": "x", **call("1", "{}")}, call("2", '{"a": 1}')]},
        {"role": "tool", "tool_call_id": "1", "content": "seen", "from": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "not seen"},
        {"role": "assistant", "content": "no"},
    ]
    assert told(row)["instructions"] == "First."


def test_fields_of_the_answer():
    """Length, samples and form go where a chat has them."""
    text = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}, "verbosity": "low"}
    row = line(max_output_tokens=9.0, temperature=0.5, top_p=0.9, text=text, reasoning={"effort": "high"}, top_k=3)
    sampling = row.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 3)
    assert sampling.grammar == GrammarSpec("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}')
    assert row.options.chat_template_kwargs == {"reasoning_effort": "high", "verbosity": "low"}
    body = told(row)
    assert body["text"] == text
    assert (body["max_output_tokens"], body["temperature"], body["top_p"]) == (9.0, 0.5, 0.9)
    assert body["reasoning"] == {"effort": "high"}


def test_tools():
    """A flat tool is a chat's; calls are items with ids that follow from their place."""
    row = line(tools=[TOOL], tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=False)
    (tool,) = row.tool_use.tools
    assert tool == {"type": "function", "function": {n: v for n, v in TOOL.items() if n != "type"}}
    assert (row.tool_use.choice, row.tool_use.name, row.tool_use.parallel) == ("required", "look", False)
    calls = (ToolCall("look", '{"a": 1}'), ToolCall("look", "{}"))
    body = told(row, text="", tool_calls=calls, finish_reason="tool_calls", reasoning="Hm.", reasoning_tokens=2)
    assert [(item["type"], item["status"]) for item in body["output"]] == [
        ("reasoning", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
    ]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert body["output"][1] == {
        "id": "fc_3_0",
        "type": "function_call",
        "call_id": "call_3_0_0",
        "name": "look",
        "arguments": '{"a": 1}',
        "status": "completed",
    }
    assert (body["tools"], body["parallel_tool_calls"]) == ([TOOL], False)
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_an_answer_that_was_cut():
    """A program that asks for the status must not take half an answer for a whole one."""
    body = told(line(), reasoning="Hm.", finish_reason="length")
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"]
    (thought,) = told(line(), text="", reasoning="Hm.", finish_reason="length")["output"]
    assert (thought["type"], thought["status"]) == ("reasoning", "incomplete")


def test_logprobs():
    """They are asked for by ``include``, ``top_logprobs`` says how many."""
    assert line(include=["message.output_text.logprobs"]).sampling.logprobs == 0
    row = line(top_logprobs=2)
    assert row.sampling.logprobs == 2
    tokens = packed([ScoredToken(5, b"Hi", -0.5, (ScoredToken(6, b"Ho", -1.0),))])
    (message,) = told(row, text="Hi", logprobs=tokens)["output"]
    assert message["content"][0]["logprobs"] == [
        {
            "token": "Hi",
            "bytes": [72, 105],
            "logprob": -0.5,
            "top_logprobs": [{"token": "Ho", "bytes": [72, 111], "logprob": -1.0}],
        }
    ]


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"input": None}, "missing_prompt", "input is missing or empty"),
        ({"input": []}, "missing_prompt", "input is missing or empty"),
        ({"input": 5}, "invalid_field", "input"),
        ({"input": [{"content": "a"}]}, "invalid_field", "input[0]: role is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "invalid_messages",
            "input[0].content[0]: parts of type 'input_audio' are not",
        ),
        # Dropped with its part, or its message, so that the answer was to the rest.
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "file": "b"}]}]},
            "invalid_messages",
            "input[0].content[0] has an unknown field: file",
        ),
        (
            {"input": [{"role": "user", "content": "a", "images": ["b"]}]},
            "unsupported_field",
            "images: images of a message are parts",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "invalid_messages", "items of type item_reference"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_field", "tools of type web_search"),
        ({"include": ["file_search_call.results"]}, "unsupported_field", "include: file_search_call.results"),
        ({"stream": True}, "unsupported_field", "stream"),
        ({"n": 2}, "invalid_field", "n must be 1"),
        ({"text": {"formt": {"type": "json_object"}}}, "invalid_field", "unknown field `formt`"),
        ({"text": {"format": {"type": "json_object", "shema": {}}}}, "invalid_field", "unknown field `shema`"),
        ({"text": {"format": {"type": "json_schema", "shema": {}}}}, "invalid_field", "unknown field `shema`"),
        ({"reasoning": {"efort": "low"}}, "invalid_field", "unknown field `efort`"),
        ({"messages": [{"role": "user", "content": "a"}]}, "unknown_field", "messages"),
        ({"max_tokens": 5}, "unknown_field", "max_tokens"),
        ({"nonsense": 1}, "unknown_field", "nonsense"),
        ({"temperature": 5, "top_p": 3}, "invalid_sampling", "top_p"),
    ],
)
def test_refused(body, code, message):
    """In one line, with the name of what is meant."""
    assert_failed(line(**body), code, message)


@pytest.mark.parametrize("name", OWN_REFUSED)
def test_refused_fields(name):
    """Null, and values that change nothing, are as if the field were absent."""
    refused = OWN_REFUSED[name]
    assert line(**{name: "unheard of"}).error.message == f"{name} is not supported: {refused.why}"
    for value in (None, *refused.neutral):
        assert line(**{name: value}) == line()


def test_every_field_of_the_client_has_a_rule():
    """A new field of the API would be an unknown one, and fail lines that its own service serves."""
    names = {name for kind in params.ResponseCreateParamsBase.__mro__ for name in getattr(kind, "__annotations__", {})}
    assert names - (SERVED | set(OWN_IGNORED) | set(OWN_REFUSED) | set(IGNORED) | set(REFUSED)) == set()
    assert as_chat({"input": "a", **dict.fromkeys(names - {"input"})})["messages"] == [{"role": "user", "content": "a"}]
    assert line(**dict.fromkeys(names - {"input"})).ignored == ()
    assert not (SERVED | set(GenerationBody.__struct_fields__)) & set(OWN_IGNORED)


def test_ignored_fields():
    """They are counted in the report, those of chats and those of responses."""
    row = line(max_tool_calls=3, user="me", metadata={"a": "b"})
    assert (row.ignored, told(row)["metadata"]) == (("user", "metadata", "max_tool_calls"), {"a": "b"})


def test_the_page_lists_the_rules():
    """What is refused, and why, is found there."""
    section = PAGE.read_text().partition("### Responses")[2].partition("## Answers")[0]
    found = re.findall(r"^\| `(\w+)` \| (ignored|refused)[^|]*\| ([^|]+) \|$", section, re.MULTILINE)
    assert {name: why for name, rule, why in found if rule == "ignored"} == OWN_IGNORED
    assert {n: why for n, rule, why in found if rule == "refused"} == {n: why for n, (why, _) in OWN_REFUSED.items()}
