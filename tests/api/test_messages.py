"""What ``LLM.chat`` tells of reasoning and tool calls, beside the whole text."""

import json
import pickle
from dataclasses import asdict, replace
from unittest.mock import Mock

import numpy as np
import pytest

from rosebatch import LLM, SamplingParams
from rosebatch.text.chat_parsers import ChatReader
from rosebatch.text.tokenizer import Tokenizer
from rosebatch.text.tool_calls.qwen3_coder import Qwen3Coder
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import FakeModel, launch_fake, make_engine
from tests.job.test_tools import SUM_TEXT, TOOLS, WIDTH, WRITTEN, Scripted, require_valid
from tests.job.tool_templates import chat_tokenizer

LONG = SamplingParams(max_tokens=400)
ASK = [{"role": "user", "content": "Q1"}]
CALL = {"id": "call_0_0_0", "type": "function", "function": {"name": "add", "arguments": SUM_TEXT}}


def chats(answer, tokenizer=None):
    """A model that answers so."""
    tokenizer = tokenizer or chat_tokenizer("hermes")
    engine = make_engine(Scripted({"Q1": answer}), vocab_size=WIDTH, blocks=600, max_model_len=2000)
    return LLM.of(launch_fake(engine, tokenizer))


def test_calls_and_thoughts_of_an_answer():
    """The text is whole, as a script for vLLM wants it; the message has what it says."""
    whole = "<think>Add.</think>\n\nWell.\n" + WRITTEN["hermes"]
    (output,) = chats(whole).chat(ASK, LONG, tools=TOOLS)
    (completion,) = output.outputs
    assert SUM_TEXT in completion.text and completion.finish_reason == "stop"
    message = {"role": "assistant", "content": "Well.", "reasoning_content": "Add.", "tool_calls": [CALL]}
    assert completion.message == message
    assert pickle.loads(pickle.dumps(output)) == output, "it comes from other processes"


def test_token_ids_of_a_prompt_are_a_list():
    """They are made when they are read: before, outputs are compared, copied and sent as if they were there."""
    prompt = [1, 0, *range(2, 99)]

    def output():
        return LLM.of(launch_fake(make_engine(FakeModel()), None)).generate([prompt], SamplingParams(max_tokens=1))[0]

    read = output().prompt_token_ids
    assert type(read) is list and read == prompt
    (one,) = [output()]
    assert one.prompt_token_ids is one.prompt_token_ids, "a change stays"
    assert pickle.loads(pickle.dumps(output())).prompt_token_ids == prompt
    assert json.loads(json.dumps(asdict(output())))["prompt_token_ids"] == prompt
    assert replace(output(), prompt_token_ids=[7]).prompt_token_ids == [7]
    assert repr(prompt) in repr(output())


@pytest.mark.parametrize("kind", ["int64", "uint8", ">i4", "uint64", "float32", "bool"])
@pytest.mark.parametrize("ids", [[1, 0, 97], [1] * 99, [-1, 5], [2**40], []])
def test_arrays_are_taken_as_lists_of_their_numbers_are(kind, ids):
    """Whole numbers of an array are taken as they lie in memory, in their order of bytes and with their sign."""
    with np.errstate(invalid="ignore"):
        given = np.array(ids, np.float64).astype(kind)
    llm = LLM.of(launch_fake(make_engine(FakeModel()), None))
    array, numbers = llm.generate([given, given.tolist()], SamplingParams(max_tokens=1), on_error="return")
    assert (array.error_code, array.prompt_token_ids) == (numbers.error_code, numbers.prompt_token_ids)


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        (r'["\ud83d"]', r'{"a": ["\ud83d"]}'),
        (r'["é", "\ud83d\ude00"]', r'{"a": ["é", "\ud83d\ude00"]}'),
        ("1e400", '{"a": "1e400"}'),
        ("[1, -1e400]", '{"a": "[1, -1e400]"}'),
    ],
)
def test_arguments_that_are_no_json_text(value, arguments):
    """Half a character, which the model escaped, ended the whole job when it was written; 1e400 became Infinity."""
    written = f"<tool_call>\n<function=add>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = Qwen3Coder().parse(written, {"add": {}}).calls
    assert call.arguments == arguments
    assert call.arguments.encode()


def test_a_conversation_goes_on_with_the_message():
    """The template of the next call must take what the last one gave; no id comes twice."""
    llm = chats(WRITTEN["hermes"])
    (first,) = llm.chat(ASK, LONG, tools=TOOLS)
    message = first.outputs[0].message
    assert message["content"] is None
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
    (second,) = llm.chat([*ASK, message, result], LONG, tools=TOOLS)
    assert f"assistant\n\n{WRITTEN['hermes']}" in second.prompt
    assert second.outputs[0].message["tool_calls"][0]["id"] == "call_1_0_0"


def test_a_stop_string_ends_the_message_too():
    (output,) = chats("<think>Add.</think>\n\nWell. STOP more").chat(ASK, SamplingParams(max_tokens=400, stop="STOP"))
    assert output.outputs[0].message == {"role": "assistant", "content": "Well. ", "reasoning_content": "Add."}


def test_calls_that_must_come():
    """``required``, one call, a named tool, none at all."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    llm = chats(WRITTEN["hermes"] + "\n" + WRITTEN["hermes"])
    for choice, parallel, names in (("required", False, ["add"]), (named, True, ["get_weather"]), ("none", True, [])):
        (output,) = llm.chat(ASK, LONG, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
        calls = output.outputs[0].message.get("tool_calls", [])
        assert [call["function"]["name"] for call in calls] == names
        for call in calls:
            require_valid(call)


def test_prompts_that_are_no_chats_have_no_message():
    (output,) = chats("x").generate("Q1", LONG)
    assert output.outputs[0].message is None


def test_a_model_whose_calls_are_unknown_is_served():
    """Scripts for vLLM read its text themselves. What must be a call cannot be had there."""
    template = "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}"
    llm = chats("!", Tokenizer(byte_backend(), template))
    (output,) = llm.chat(ASK, LONG, tools=TOOLS)
    assert output.outputs[0].message == {"role": "assistant", "content": output.outputs[0].text}
    with pytest.raises(ValueError, match="tool-call-parser"):
        llm.chat(ASK, LONG, tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([{"type": "function"}], "auto", "function"),
        (TOOLS, "perhaps", "perhaps"),
        (TOOLS, {"type": "function", "function": {"name": "sing"}}, "there is no tool sing"),
        (None, "required", "required needs tools"),
        (5, "auto", "tools must be a list, got int"),
    ],
)
def test_tools_that_cannot_be_used(tools, choice, message):
    with pytest.raises(ValueError, match=message):
        chats("x").chat(ASK, LONG, tools=tools, tool_choice=choice)


def test_parts_of_a_message_that_are_no_objects():
    """They were an AttributeError of the whole call."""
    wrong = [{"role": "user", "content": ["hi", None, ["text"]]}]
    output, good = chats("!").chat([wrong, ASK], LONG, on_error="return")
    assert (output.error_code, good.error) == ("invalid_messages", None)


def test_an_answer_that_cannot_be_told(monkeypatch):
    """One bad answer ended the call, and took the answers of all others with it."""
    monkeypatch.setattr(ChatReader, "parse", Mock(side_effect=AssertionError("a parser's mistake")))
    (output,) = chats("<think>Add.</think>Well.").chat(ASK, LONG, on_error="return")
    assert output.error_code == "unexpected_error" and "a parser's mistake" in output.error


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "text": "hi"}, "a message of the role user has no content, but text"),
        ({"role": "user", "name": "Bob", "content": None}, "a message of the role user has no content"),
        ({"role": "system"}, "a message of the role system has no content"),
        ({"role": "developer", "hi": 1, "b": 2}, "a message of the role developer has no content, but hi, b"),
        ({"role": "user", "content": ""}, None),
        ({"role": "assistant", "content": None}, None),
        ({"role": "tool"}, None),
    ],
)
def test_a_message_that_says_nothing(message, told):
    """A text in a field of another name was left out, and the answer was to an empty message."""
    output, good = chats("!").chat([[*ASK, message], ASK], LONG, on_error="return")
    assert (output.error, good.error) == (told, None)
