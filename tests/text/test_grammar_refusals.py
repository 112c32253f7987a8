"""Grammars that cannot be used cost their row alone; what schemas may say."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models

from rosebatch.core.errors import RowError
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.grammars import allowed, feed_text, spec


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "a\\", "backslash"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "a[b&&c]", "nothing matches"),
        ("regex", "a\ud800", "surrogates"),
        ("regex", "x" * 5000 + "(", "unclosed group"),
        ("json_schema", "", "Expecting value"),
        ("json_schema", '{"type": ', "Expecting value"),
        ("json_schema", [1], "expected a JSON object or a boolean"),
        ("json_schema", '"string"', "expected a JSON object or a boolean"),
        ("json_schema", "false", "nsatisfiable"),
        ("json_schema", {"type": "objec"}, "objec"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ("json_schema", {"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
        ("json_schema", {"type": "string", "pattern": "("}, "unclosed group"),
        ("json_schema", {"type": "string", "format": "no such"}, "no such"),
        ("json_schema", {"$ref": "#"}, "nothing matches"),
        ("json_schema", {"$ref": "#/$defs/missing"}, "missing"),
        ("json_schema", '{"const": 1e999}', "float"),
        ("json_schema", '{"a": "\\ud800"}', "escape"),
        ("json_schema", '{"multipleOf": 1' + "0" * 5000 + "}", "digits"),
        ("json_schema", "[" * 100_000, "recursion"),
        ("json_schema", '{"items": ' * 500 + "{}" + "}" * 500, "recursion"),
        ("choice", [], "at least one"),
        ("choice", ["a", ""], "none empty"),
        ("choice", ["a", 1], "strings"),
        ("choice", {"a": 1}, "list of strings"),
        ("choice", "yes", "Expecting value"),
        ("choice", '["\\ud800"]', "escape"),
        # It took 12 s and a gigabyte to find that.
        ("choice", list(map(str, range(100_001))), "it has 100001 texts, more than 100000"),
        # A regex of 10 MB took 2.7 GB.
        ("regex", "a" * (2**19 + 1), "it has 524289 characters, more than 524288"),
        ("json_schema", json.dumps({"type": "string", "pattern": "a" * 2**22}), "more than 4194304"),
    ],
)
def test_grammars_that_cannot_be_used(byte_grammars, kind, source, message):
    """Only its row fails, with one short line, each time the grammar is used."""
    for _ in range(2):
        with pytest.raises(RowError) as caught:
            byte_grammars.compile(spec(kind, source))
        assert caught.value.code == "invalid_grammar"
        assert message in caught.value.message
        assert len(caught.value.message) <= 300
        assert caught.value.message.splitlines() == [caught.value.message]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/schema", "https://example.com/a.json", "file:///etc/hostname"])
def test_references_to_elsewhere_are_not_followed(byte_grammars, url):
    """A user's schema must not make this machine open files or connections."""
    with pytest.raises(RowError, match="does not fetch"):
        byte_grammars.compile(spec("json_schema", {"$ref": url}))


def test_a_schema_may_be_a_boolean(byte_grammars):
    """The schema true stands for all JSON, with the white space that other schemas allow."""
    constraint = byte_grammars.compile(spec("json_schema", "true")).start()
    assert not {ord(" "), ord("\n")} & set(allowed(constraint))
    assert feed_text(constraint, '[1, {"a": null}]') is True


def test_a_schema_may_ask_for_leniency(byte_grammars):
    """Leniency allows keywords that cannot be enforced; all other options in a schema are ignored."""
    own = {"lenient": True, "whitespace_pattern": r"\n*", "item_separator": "(", "no such": 1}
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}, "x-guidance": own}
    constraint = byte_grammars.compile(spec("json_schema", schema)).start()
    assert constraint.feed(ord("[")) is False
    assert ord("\n") not in allowed(constraint)
    assert feed_text(constraint, "1,1]") is True


def word_piece():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return backend


@pytest.mark.parametrize(
    ("backend", "eos", "message"), [(word_piece(), [0], "decoder"), (byte_backend(), [], "end token")]
)
def test_models_that_grammars_cannot_be_used_with(backend, eos, message):
    """Without bytes of its tokens or without an end token, each row with a grammar gets an error."""
    grammars = Grammars(Tokenizer(backend), 300, eos)
    for regex in ("a", "b"):
        with pytest.raises(RowError, match=message) as caught:
            grammars.compile(spec("regex", regex))
        assert caught.value.code == "invalid_grammar"
        assert len(caught.value.message) <= 300
