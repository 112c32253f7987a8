"""Tool calls in the answers of each form, whole and broken."""

import json

import pytest

from rosebatch.text.tool_calls.call import ToolCall
from rosebatch.text.tool_calls.gpt_oss import GptOss
from rosebatch.text.tool_calls.hermes import Hermes
from rosebatch.text.tool_calls.llama3 import Llama3
from rosebatch.text.tool_calls.mistral import Mistral
from rosebatch.text.tool_calls.qwen3_coder import Qwen3Coder

NAMES = ("add", "get_weather")
ADD, WEATHER = ToolCall("add", '{"a": 1, "b": [2, {"c": "}"}]}'), ToolCall("get_weather", '{"city": "Zürich"}')


def written(call, key="arguments"):
    return f'{{"name": "{call.name}", "{key}": {call.arguments}}}'


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{written(call)}\n</tool_call>" for call in calls)


def coder(name, **values):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def message(call, header="<|channel|>commentary to=functions.{} <|constrain|>json", end="<|call|>"):
    return f"{header.format(call.name)}<|message|>{call.arguments}{end}"


WHOLE = [
    (Hermes(), hermes(ADD), "", [ADD]),
    (Hermes(), f"Let me see.\n{hermes(ADD, WEATHER)}\n", "Let me see.", [ADD, WEATHER]),
    (Hermes(), f"<tool_call>{written(ADD)}", "", [ADD]),
    (Hermes(), f"<tool_call>{written(ADD, 'parameters')}</tool_call>", "", [ADD]),
    (Hermes(), '<tool_call>{"name": "add"}</tool_call>', "", [ToolCall("add", "{}")]),
    (Llama3(), written(ADD, "parameters"), "", [ADD]),
    (Llama3(), f"<|python_tag|>{written(ADD, 'parameters')}; {written(WEATHER)}", "", [ADD, WEATHER]),
    (Llama3(), f"\n{written(ADD)}\n{written(WEATHER)}\n", "", [ADD, WEATHER]),
    (Llama3(), f"I will.<|python_tag|>{written(ADD)}", "I will.", [ADD]),
    (Mistral(), f"[TOOL_CALLS][{written(ADD)}]", "", [ADD]),
    (Mistral(), f"Well.[TOOL_CALLS] [{written(ADD)}, {written(WEATHER)}]", "Well.", [ADD, WEATHER]),
    (Mistral(), f"[TOOL_CALLS]add[ARGS]{ADD.arguments}", "", [ADD]),
    (
        Mistral(),
        f"Well.[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{ADD.arguments}[TOOL_CALLS]get_weather{WEATHER.arguments}",
        "Well.",
        [ADD, WEATHER],
    ),
    (GptOss(), message(ADD), "", [ADD]),
    (GptOss(), message(ADD, end=""), "", [ADD]),
    (GptOss(), message(ADD, "<|start|>assistant to=functions.{}<|channel|>commentary json"), "", [ADD]),
    (GptOss(), message(ADD, " to=functions.{}<|channel|>commentary"), "", [ADD]),
    (Qwen3Coder(), coder("add", a=1, b='"x"', c="two words"), "", [{"a": 1, "b": "x", "c": "two words"}]),
    (Qwen3Coder(), "Well.\n" + coder("add") + "\n" + coder("add", a="[1]"), "Well.", [{}, {"a": [1]}]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), WHOLE)
def test_calls_are_taken_out(form, text, content, calls):
    """Arguments are JSON as it was written, with braces in its texts; what surrounds calls stays."""
    parsed = form.parse(text, NAMES)
    assert parsed.content == content
    if isinstance(form, Qwen3Coder):
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [("add", each) for each in calls]
    else:
        assert list(parsed.calls) == calls


BROKEN = [
    (Hermes(), "No call at all.  "),
    (Hermes(), hermes(ToolCall("other", "{}"))),
    (Hermes(), hermes(ToolCall("add", "[1]"))),
    (Hermes(), hermes(ToolCall("add", '"{}"'))),
    (Hermes(), hermes(ADD)[:-25]),
    (Hermes(), "<tool_call>\n{'name': 'add', 'arguments': {}}\n</tool_call>"),
    (Hermes(), '<tool_call>{"name": "add", "arguments": {}} or so</tool_call>'),
    (Hermes(), "<tool_call>" + '{"a":' * 100_000),
    (Hermes(), "<tool_call>" * 3),
    (Llama3(), "{}"),
    (Llama3(), '{"name": 3, "parameters": {}}'),
    (Llama3(), "<|python_tag|>print(1)"),
    (Llama3(), f"The call {written(ADD)}"),
    (Llama3(), written(ADD, "parameters")[:-3]),
    (Mistral(), f"[TOOL_CALLS]{written(ADD)}"),
    (Mistral(), f"[TOOL_CALLS][{written(ADD)[:-2]}]"),
    (Mistral(), "[TOOL_CALLS]"),
    (Mistral(), "[TOOL_CALLS]other[ARGS]{}"),
    (Mistral(), '[TOOL_CALLS]add[ARGS]{"a": '),
    (GptOss(), message(ToolCall("other", "{}"))),
    (GptOss(), message(ADD)[:-12]),
    (GptOss(), message(ToolCall("add", "[]"))),
    (GptOss(), "<|channel|>final<|message|>Done."),
    (Qwen3Coder(), coder("other", a=1)),
    (Qwen3Coder(), coder("add", a=1)[:-30]),
    (Qwen3Coder(), "<tool_call>\n<function=add>\nwords\n</function>\n</tool_call>"),
]


@pytest.mark.parametrize(("form", "text"), BROKEN)
def test_broken_calls_stay_as_they_are_written(form, text):
    """Nothing that the model wrote is lost, and nothing that it did not write is called."""
    assert form.parse(text, NAMES) == (text, ())


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (Hermes(), hermes(ADD) + "\n" + hermes(WEATHER)[:-20], hermes(WEATHER)[:-20], [ADD]),
        (Hermes(), hermes(ToolCall("other", "{}"), ADD), hermes(ToolCall("other", "{}")), [ADD]),
        (Llama3(), f"{written(ADD)}; {written(WEATHER)[:-5]}", written(WEATHER)[:-5], [ADD]),
        (Mistral(), f"[TOOL_CALLS][{written(ADD)}, {{", "[TOOL_CALLS], {", [ADD]),
        (GptOss(), message(ToolCall("other", "{}")) + message(ADD), message(ToolCall("other", "{}")), [ADD]),
    ],
)
def test_a_broken_call_beside_a_whole_one(form, text, content, calls):
    """An answer that reached its length has both."""
    parsed = form.parse(text, NAMES)
    assert (parsed.content.strip(), list(parsed.calls)) == (content, calls)
