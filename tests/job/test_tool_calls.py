"""Tool calls in the answers of each form, whole and broken."""

import json

import pytest

from rosebatch.core.errors import RowError
from rosebatch.text.grammar_source import compile_matcher, load_tokens, serialize
from rosebatch.text.tokenizer import Tokenizer
from rosebatch.text.tool_calls.call import Offered, ToolCall
from rosebatch.text.tool_calls.gpt_oss import GptOss
from rosebatch.text.tool_calls.hermes import Hermes
from rosebatch.text.tool_calls.llama3 import Llama3
from rosebatch.text.tool_calls.mistral import Mistral
from rosebatch.text.tool_calls.qwen3_coder import Qwen3Coder
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.tool_templates import chat_backend

TOOLS = {"add": {"properties": {}}, "get_weather": {}}
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


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": "string"}, "\n\ntwo\n", "\n\ntwo\n"),
        ({"type": "string"}, "", ""),
        ({"type": "integer"}, "5", 5),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "boolean"}, "True", True),
        ({"type": "string"}, "True", "True"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, "[1, {}]", [1, {}]),
        ({}, "5", 5),
        (True, "five", "five"),
        ({"type": [3, None]}, "5", 5),
    ],
)
def test_the_schema_says_what_a_value_is(schema, written, value):
    """A text of digits became a number, Python's True a text, and NaN no JSON at all."""
    tools = {"add": {"properties": {"a": schema}}}
    (call,) = Qwen3Coder().parse(coder("add", a=written), tools).calls
    assert json.loads(call.arguments, parse_constant=pytest.fail) == {"a": value}


@pytest.mark.parametrize("schema", [{"properties": []}, {"properties": None}, {"properties": {"a": {"enum": 3}}}])
def test_values_of_a_broken_schema(schema):
    """What the schema says is unclear then, and the call is there all the same."""
    (call,) = Qwen3Coder().parse(coder("add", a=1), {"add": schema}).calls
    assert json.loads(call.arguments) == {"a": 1}


TEXTS = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "word": {"type": "string", "minLength": 2, "maxLength": 4},
        "unit": {"enum": ["C", "</x>", "F"]},
        "n": {"$ref": "#/$defs/n"},
        "any": True,
    },
    "required": ["code", "n"],
    "$defs": {"n": {"type": "integer", "maximum": 99}},
}


@pytest.fixture(scope="module")
def accepts():
    """Whether an answer may be written under the grammar of forced calls."""
    backend = chat_backend()
    tokens = load_tokens(backend.to_str(), [256])
    forms = Tokenizer(backend).choose_parsers(calls="qwen3_coder")

    def check(schema, text, *, must_call=True):
        spec = forms.grammar([Offered("add", schema)], parallel=True, must_call=must_call)
        matcher = compile_matcher(tokens, serialize(spec))
        ids = backend.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check


@pytest.mark.parametrize(
    ("values", "is_accepted"),
    [
        ({"code": "if a < b:\n\n    </b>\n", "n": 5}, True),
        ({"code": "", "word": "é\n", "unit": "F", "n": 5, "any": "[1]"}, True),
        ({"code": "x", "n": 500}, False),
        ({"code": "x"}, False),
        ({"code": "x", "word": "a", "n": 5}, False),
        ({"code": "x", "word": "abcde", "n": 5}, False),
        ({"code": "x", "unit": "K", "n": 5}, False),
        ({"code": "x</parameter>y", "n": 5}, False),
        ({"code": "x</function>y", "n": 5}, False),
    ],
)
def test_forced_texts_without_quotes(accepts, values, is_accepted):
    """What the grammar takes, the parser reads as it was meant: no text ends its parameter or its call."""
    text = coder("add", **values)
    assert accepts(TEXTS, text) is is_accepted
    if is_accepted:
        (call,) = Qwen3Coder().parse(text, {"add": TEXTS}).calls
        told = json.loads(call.arguments)
        assert {**told, "any": None} == {**values, "any": None}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "a+"}}}, "add: a: pattern cannot be kept"),
        ({"properties": {}, "minProperties": 1}, "add: minProperties cannot be kept"),
        ({"properties": {"a b": {}}}, "'a b' is no name"),
        ({"properties": {}, "required": ["z"]}, "requires z"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "no possible value"),
        ({"properties": {"a": {"type": "string", "minLength": "2"}}}, "Expected"),
        ({"properties": [1]}, "Expected"),
    ],
)
def test_schemas_that_have_no_form(accepts, schema, message):
    """One line that says what it is, instead of arguments that do not match."""
    with pytest.raises(RowError, match=message):
        accepts(schema, "")


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
