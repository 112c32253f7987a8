"""Qwen3-Coder's calls: values without quotes, which the schema tells apart."""

import json

import pytest

from rosebatch.core.errors import RowError
from rosebatch.text.tool_calls.qwen3_coder import Qwen3Coder
from tests.helpers.tool_calls import TOOLS, coder


def test_end_marks_in_a_value_without_quotes():
    """A value ends where the next parameter, or the end of the call, follows."""
    text = "a </parameter> b </function>\n</tool_call>"
    parsed = Qwen3Coder().parse(coder("add", a=text, b=1) + "\n" + coder("add", b=text), {"add": {}})
    assert parsed.content == ""
    assert [json.loads(call.arguments) for call in parsed.calls] == [{"a": text, "b": 1}, {"b": text}]


def test_a_parameter_that_comes_twice():
    """Both are in the arguments, as in forms whose calls are JSON: the first one was dropped."""
    (call,) = Qwen3Coder().parse(coder("add", a=1, b=2).replace("=b>", "=a>"), TOOLS).calls
    assert call.arguments == '{"a": 1, "a": 2}'


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DEFS = {
    "text": {"type": "string", "enum": ["7", "8"]},
    "maybe": {"oneOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]},
    "a/b": {"allOf": [{"$ref": "#/$defs/maybe"}]},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#"}]},
    "number": {"type": "number"},
}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (NULLABLE, "42", "42"),
        (NULLABLE, "null", None),
        (NULLABLE, '{"a": 1}', '{"a": 1}'),
        ({"$ref": "#/$defs/text"}, "7", "7"),
        ({"$ref": "#/$defs/maybe"}, "7", "7"),
        ({"$ref": "#/$defs/maybe"}, "None", None),
        ({"$ref": "#/$defs/a~1b"}, "8", "8"),
        ({"$ref": "#/%24defs/text"}, "8", "8"),
        ({"$ref": "#/$defs/number"}, "8", 8),
        ({"$ref": "#/$defs/none"}, "8", 8),
        ({"$ref": "https://x/#/$defs/text"}, "8", 8),
        ({"$ref": "#/$defs/loop"}, "8", 8),
        ({"allOf": [{"type": "string"}]}, "5", "5"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"anyOf": [{"const": "1"}, {"const": "2"}]}, "1", "1"),
        ({"enum": ["1", None]}, "1", "1"),
        ({"enum": ["1", None]}, "null", None),
        ({"type": ["integer", "string"], "enum": ["1", "2"]}, "1", "1"),
        ({"const": "0123"}, "0123", "0123"),
    ],
)
@pytest.mark.parametrize("place", ["properties", "additional", "allOf", "anyOf", "$ref"])
def test_the_resolved_schema_says_what_a_value_is(schema, written, value, place):
    """42 of a text that may be null became a number, and so did 7 of a reference to a text."""
    objects = {"type": "object", "properties": {"a": schema}}
    whole = {
        "properties": objects,
        "additional": {"additionalProperties": schema},
        "allOf": {"allOf": [{"properties": {"b": {}}}, objects]},
        "anyOf": {"anyOf": [objects, {"properties": {"a": {"$ref": "#/$defs/text"}}}]} if value == "7" else objects,
        "$ref": {"$ref": "#/$defs/whole"},
    }[place]
    tools = {"add": {**whole, "$defs": {**DEFS, "whole": objects}}}
    (call,) = Qwen3Coder().parse(coder("add", a=written), tools).calls
    assert json.loads(call.arguments) == {"a": value}


def test_a_schema_of_many_references(accepts):
    """Each is resolved once: two references to the next of 60 definitions were 2**60."""
    defs = {f"d{i}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(60)}
    tools = {"add": {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**defs, "d60": {"type": "string"}}}}
    (call,) = Qwen3Coder().parse(coder("add", a="1"), tools).calls
    assert json.loads(call.arguments) == {"a": "1"}
    assert accepts(tools["add"], coder("add", a="1"))
    deep = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)}
    (call,) = Qwen3Coder().parse(coder("add", a="1"), {"add": {**tools["add"], "$defs": deep}}).calls
    assert json.loads(call.arguments) == {"a": 1}, "too deep to tell"


@pytest.mark.parametrize("number", ["123456789012345678901234567890", "0.12345678901234567890", "1.50", "-0", "1E5"])
def test_numbers_keep_their_digits(number):
    """They were read as float64 and written again."""
    (call,) = Qwen3Coder().parse(coder("add", a=number, b=f"[{number}]"), TOOLS).calls
    assert call.arguments == f'{{"a": {number}, "b": [{number}]}}'


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
        "named": {"$ref": "#/$defs/named"},
        "either": {"anyOf": [{"const": "a"}, {"$ref": "#/$defs/named"}], "title": "Either"},
    },
    "required": ["code", "n"],
    "$defs": {"n": {"type": "integer", "maximum": 99}, "named": {"type": "string", "enum": ["7", "eight"]}},
}


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
        ({"code": "x\n<parameter=n>\ny", "n": 5}, False),
        ({"code": "x", "n": 5, "named": "eight", "either": "7"}, True),
        ({"code": "x", "n": 5, "either": "a"}, True),
        ({"code": "x", "n": 5, "named": '"7"'}, False),
        ({"code": "x", "n": 5, "either": "b"}, False),
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
