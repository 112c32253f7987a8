"""Schemas as llguidance can keep them."""

import pytest

from rosebatch.core.errors import RowError
from tests.helpers.grammars import spec
from tests.text.test_schema_numbers import takes

NEUTRAL = [
    *({"uniqueItems": False}, {"not": False}, {"propertyNames": True}, {"propertyNames": {}}, {"then": False}),
    *({"unevaluatedProperties": True}, {"unevaluatedItems": {}}, {"dependentRequired": {}}, {"dependencies": {}}),
    *({"dependentSchemas": {}}, {"if": {"const": 2}}, {"else": False}, {"minContains": 3}, {"maxContains": 0}),
    *({"minLength": 3.0}, {"maxItems": 2.0}, {"minProperties": 0.0}, {"maxProperties": 7.0}),
]


@pytest.mark.parametrize("keyword", NEUTRAL)
def test_keywords_that_ask_for_nothing(byte_grammars, keyword):
    """llguidance refuses keywords that it does not know, and counts with a decimal point."""
    grammar = byte_grammars.compile(spec("json_schema", {"type": "integer", **keyword}))
    assert takes(grammar, "12")
    nested = {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "null", **keyword}}}
    assert takes(byte_grammars.compile(spec("json_schema", nested)), "[null,null]")


@pytest.mark.parametrize(
    "schema",
    [
        *({"uniqueItems": True}, {"not": {}}, {"not": 0}, {"propertyNames": {"minLength": 1}}, {"uniqueItems": 0}),
        *({"if": {}, "then": False}, {"contains": {"const": 1}}, {"dependentRequired": {"a": ["b"]}}),
        *({"minLength": 2.5}, {"unevaluatedProperties": False}),
    ],
)
def test_keywords_that_ask_for_something(byte_grammars, schema):
    """They are refused, as before: an answer might not match."""
    with pytest.raises(RowError) as caught:
        byte_grammars.compile(spec("json_schema", {"type": ["string", "array", "object"], **schema}))
    assert caught.value.code == "invalid_grammar"


def test_names_that_look_like_keywords(byte_grammars):
    """A property may have the name of a keyword, and a constant its value."""
    properties = {"uniqueItems": False, "maximum": {"const": {"uniqueItems": False}}, "const": {"type": "null"}}
    whole = {"properties": properties, "required": ["maximum"], "additionalProperties": False}
    grammar = byte_grammars.compile(spec("json_schema", {"type": "object", **whole}))
    assert takes(grammar, '{"maximum":{"uniqueItems":false},"const":null}')
    assert not takes(grammar, '{"uniqueItems":1,"maximum":{"uniqueItems":false}}')


def of_keys(**keywords):
    return {"type": "object", "patternProperties": {"^[bc]$": {"const": 1}}, "additionalProperties": False, **keywords}


@pytest.mark.parametrize(
    "schema",
    [
        *(
            of_keys(minProperties=2),
            of_keys(minProperties=2.0, maxProperties=2),
            of_keys(minProperties=3, required=["b"]),
        ),
        {"type": "object", "minProperties": 2, "additionalProperties": {"const": 1}},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, of_keys(minProperties=5, required=["b", "b", "c"])]}},
    ],
)
def test_a_number_of_keys_that_may_repeat(byte_grammars, schema):
    """A key that comes twice is one key: ``{"b":1,"b":1}`` passed for two."""
    with pytest.raises(RowError, match="keys that differ cannot be kept; give more of them in required") as caught:
        byte_grammars.compile(spec("json_schema", schema))
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (of_keys(minProperties=1), '{"c":1}'),
        (of_keys(minProperties=2, required=["b"]), '{"b":1,"c":1}'),
        (of_keys(minProperties=2, required=["b", "c"]), '{"b":1,"c":1}'),
        (of_keys(minProperties=2, **{"x-guidance": {"lenient": True}}), '{"b":1,"c":1}'),
    ],
)
def test_a_number_of_keys_that_differ(byte_grammars, schema, answer):
    """One key is not counted twice, and those that are required differ."""
    grammar = byte_grammars.compile(spec("json_schema", schema))
    assert takes(grammar, answer)
    assert not takes(grammar, "{}")


@pytest.mark.parametrize("key", ["b", "é", "a/b", "a\nb"])
def test_a_key_in_another_spelling(byte_grammars, key):
    """``{"b":1,"\\u0062":2}`` is an object with the one key b: of a value that its own schema does not take."""
    schema = {"type": "object", "properties": {key: {"const": 1}}, "additionalProperties": {"const": 2}}
    grammar = byte_grammars.compile(spec("json_schema", schema))
    escaped = "".join(f"\\u{ord(character):04x}" for character in key)
    assert not takes(grammar, f'{{"{escaped}":2}}')
    assert not takes(grammar, f'{{"{escaped.upper().replace("U", "u")}":2}}')
    assert takes(grammar, '{"other":2}')


@pytest.mark.parametrize("text", ["a\x01b", "\x1f", "\x00", "\x7f"])
def test_control_characters(byte_grammars, text):
    """JSON has no other way to write them than ``\\u0001``."""
    grammar = byte_grammars.compile(spec("json_schema", {"enum": [text]}))
    assert takes(grammar, '"' + "".join(c if c.isalpha() else f"\\u{ord(c):04x}" for c in text) + '"')
    pattern = "^" + "".join(f"\\x{ord(character):02x}" for character in text) + "$"
    byte_grammars.compile(spec("json_schema", {"type": "string", "pattern": pattern}))
