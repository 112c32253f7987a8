"""Fields of a row that say what its answer must match."""

import json

import pytest

from rosebatch.core.structured_outputs import GrammarSpec
from tests.helpers.results import assert_failed

SCHEMA = {"type": "object", "properties": {"é": {"type": "number"}}}
NAMED = {"name": "a", "strict": True, "schema": SCHEMA}
OBJECT = {"type": "object", "required": []}
TWO = "one grammar, but 2 are given"


@pytest.mark.parametrize(
    ("values", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "json_schema", {}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "json_schema", True),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_object", "schema": None}}, "json_object", None),
        ({"response_format": {"type": "json_object", "schema": True}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": {"required": []}}}, "json_schema", OBJECT),
        ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": False}}, "json_schema", False),
        ({"structured_outputs": {"json_object": True}}, "json_object", None),
        ({"structured_outputs": {"choice": ["yes", "é"]}}, "choice", ["yes", "é"]),
        ({"structured_outputs": {"choice": ["yes"], "json_object": False}}, "choice", ["yes"]),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, "regex", "a+"),
        ({"structured_outputs": {"regex": ""}}, "regex", ""),
    ],
)
def test_grammars(parse, values, kind, source):
    """Both spellings work; an empty regex, an empty schema and the schema false are grammars too."""
    row = parse({"prompt": "x", **values})
    grammar = row.sampling.grammar
    assert (grammar.kind, row.metadata) == (kind, {})
    if kind in ("regex", "json_object"):
        assert grammar.source == (source or "")
    else:
        assert json.loads(grammar.source) == source


@pytest.mark.parametrize(
    "values",
    [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
    ],
)
def test_no_grammar(parse, values):
    """Exporters also write fields that request nothing."""
    assert parse({"prompt": "x", **values}).sampling.grammar is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "needs json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "needs json_schema.schema"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "of type text has a schema"),
        ({"response_format": {"type": "text", "json_schema": NAMED}}, "of type text has a schema"),
        ({"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}}, TWO),
        ({"response_format": {"type": "json_object", "schema": {}}, "structured_outputs": {"json": {}}}, TWO),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, TWO),
        ({"structured_outputs": {"json": {}, "json_object": True}}, TWO),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, TWO),
    ],
)
def test_grammars_that_are_none_or_several(parse, values, message):
    """Of two grammars one would win silently; a schema in the wrong place would be ignored."""
    assert_failed(parse({"prompt": "x", **values}), "invalid_field", message)


def test_a_lines_own_grammar_replaces_the_runs(parse):
    """It must not count as a second one, which is an error; a line may also ask for none."""
    flags = {"structured_outputs": {"regex": "a+"}}
    own = {"response_format": {"type": "json_object"}}
    assert parse({"prompt": "x"}, **flags).sampling.grammar == GrammarSpec("regex", "a+")
    assert parse({"prompt": "x", **own}, **flags).sampling.grammar == GrammarSpec("json_object")
    assert parse({"prompt": "x", "response_format": {"type": "text"}}, **flags).sampling.grammar is None
    assert parse({"prompt": "x", "structured_outputs": None}, **flags).sampling.grammar == GrammarSpec("regex", "a+")
