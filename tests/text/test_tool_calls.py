"""Tool calls in the answers of each form, whole and broken."""

import json

import pytest

from rosebatch.text.grammar.source import compile_matcher, load_tokens, serialize
from rosebatch.text.tokenizer import Tokenizer
from rosebatch.text.tool_calls.call import Offered, ToolCall
from rosebatch.text.tool_calls.gpt_oss import GptOss
from rosebatch.text.tool_calls.hermes import Hermes
from rosebatch.text.tool_calls.llama3 import Llama3
from rosebatch.text.tool_calls.mistral import Mistral
from rosebatch.text.tool_calls.qwen3_coder import Qwen3Coder
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.tool_calls import ADD, TOOLS, WEATHER, coder, hermes, message, written
from tests.job.tool_templates import chat_backend

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
    parsed = form.parse(text, TOOLS)
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
    (Qwen3Coder(), coder("add", a=1, b=2).replace("\n</parameter>", "", 1)),
    (Qwen3Coder(), coder("add", a="", b=2).replace("\n\n</parameter>", "", 1)),
    (Qwen3Coder(), coder("add", a=1).replace("</parameter>\n", "</parameter>\nwords\n")),
]


@pytest.mark.parametrize(("form", "text"), BROKEN)
def test_broken_calls_stay_as_they_are_written(form, text):
    """Nothing that the model wrote is lost, and nothing that it did not write is called."""
    assert form.parse(text, TOOLS) == (text, ())


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
    parsed = form.parse(text, TOOLS)
    assert (parsed.content.strip(), list(parsed.calls)) == (content, calls)


MARKED = {"s": "[TOOL_CALLS] <|python_tag|>", "t": message(ADD), "u": f"{hermes(ADD)}\n{coder('add')}"}
IN_TEXT = ToolCall("add", json.dumps(MARKED))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Hermes(), hermes(IN_TEXT, IN_TEXT)),
        (Llama3(), "; ".join(2 * [written(IN_TEXT, "parameters")])),
        (Llama3(), "<|python_tag|>" + "; ".join(2 * [written(IN_TEXT, "parameters")])),
        (Mistral(), f"[TOOL_CALLS][{written(IN_TEXT)}, {written(IN_TEXT)}]"),
        (Mistral(), 2 * f"[TOOL_CALLS]add[ARGS]{IN_TEXT.arguments}"),
        (GptOss(), message(IN_TEXT) + message(IN_TEXT)),
    ],
)
def test_marks_in_the_arguments_of_a_call(form, text):
    """They are text there: such a call was lost, or a call was found inside of its own arguments."""
    assert form.parse(text, TOOLS) == ("", (IN_TEXT, IN_TEXT))


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("", True),
        ("Well. <tool_ca 2 < 3", True),
        (f"Well.\n{coder('add', a=1)}\nand {coder('add')}{coder('add')} so", True),
        (coder("add", a="x\n", b=2, c='"</parameter'), True),
        (coder("sing"), False),
        ("Well. <tool_call>x", False),
        (coder("add", a="</parameter>"), False),
        (coder("add")[:-15], False),
    ],
)
def test_calls_beside_text(accepts, text, is_accepted):
    """Where the model decides, a call it begins is a call; arguments of a tool that is not strict are free."""
    assert accepts({"type": "object"}, text, must_call=False) is is_accepted


def test_the_mark_of_a_call_is_no_text():
    """Many tokenizers have it among their ordinary tokens: it passed for text, and what followed was free."""
    backend = byte_backend()
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    tokens = load_tokens(backend.to_str(), [256])
    forms = Tokenizer(backend).choose_parsers(calls="hermes")
    assert forms.calls_have_a_token
    spec = forms.grammar([Offered("add", {"type": "object"})], parallel=True, must_call=False)
    for text, count in (("a <tool_call>x", 3), ("b" + hermes(ToolCall("add", "{}")), None)):
        ids = backend.encode(text).ids
        assert compile_matcher(tokens, serialize(spec)).try_consume_tokens(ids) == (count or len(ids))
    spelled = [backend.token_to_id(character) for character in "<tool_call>"]
    assert compile_matcher(tokens, serialize(spec)).try_consume_tokens(spelled) == len(spelled) - 1


@pytest.mark.parametrize(("name", "knows"), [("llama3", False), ("gpt_oss", False), ("mistral", True)])
def test_forms_whose_calls_cannot_be_told_from_text_as_they_begin(name, knows):
    assert Tokenizer(chat_backend()).choose_parsers(calls=name).calls_have_a_token is knows
    assert not Tokenizer(byte_backend()).choose_parsers(calls=name).calls_have_a_token
