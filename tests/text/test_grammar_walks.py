"""Structured output: whatever allowed tokens come, the answer matches."""

import json
import random
import re

import jsonschema
import pytest

from tests.helpers.grammars import PERSON, allowed, feed_text, spec, walk


def test_any_walk_matches_a_json_schema(any_grammars):
    """Whatever allowed tokens a model chooses, the answer is JSON of the schema, with any tokenizer."""
    grammars, *rest = any_grammars
    grammar = grammars.compile(spec("json_schema", PERSON))
    texts = []
    for seed in range(12):
        text, ended = walk(grammar, *rest, seed)
        assert ended
        person = json.loads(text)
        jsonschema.validate(person, PERSON)
        assert isinstance(person.get("age", 0), int), "5.0 passes for an integer"
        texts.append(text)
    assert len(set(texts)) == 12


def test_any_walk_of_json_object_is_one(any_grammars):
    """Arrays and bare numbers are JSON, but not objects."""
    grammars, *rest = any_grammars
    grammar = grammars.compile(spec("json_object"))
    for seed in range(12):
        text, ended = walk(grammar, *rest, seed)
        assert ended
        assert isinstance(json.loads(text), dict)


REGEXES = [r"[0-9]{3}-[a-c]+", r"(é|😀|x y)*z", r"a/b(/c)?", r"^(yes|no)$"]
REGEXES += [r"(?i)rose|\"q\"", r"[a-z_]{2,5}\s[^\n]", r"a\\", ""]


@pytest.mark.parametrize("regex", REGEXES)
def test_any_walk_matches_a_regex(any_grammars, regex):
    """The whole answer matches, also when users write anchors."""
    grammars, *rest = any_grammars
    grammar = grammars.compile(spec("regex", regex))
    for seed in range(12):
        text, ended = walk(grammar, *rest, seed)
        assert re.fullmatch(regex, text) or not ended
        assert ended or "+" in regex or "*" in regex


def test_any_walk_is_a_choice(any_grammars):
    """The answer is one choice exactly, with its quotes, escapes and rare characters; every choice is reachable."""
    grammars, *rest = any_grammars
    choices = ["yes", "yes, sir", 'a "no"', "back\\slash\n", "naïve 😀", "/re/", " x"]
    grammar = grammars.compile(spec("choice", choices))
    assert {walk(grammar, *rest, seed)[0] for seed in range(200)} == set(choices)


@pytest.mark.parametrize("schema", [{"x-guidance": {"whitespace_flexible": True}}, {}])
def test_white_space_comes_to_an_end(any_grammars, schema):
    """A model that likes line breaks wrote them until max_tokens; a schema cannot ask for that either."""
    grammars, *rest = any_grammars
    schema = schema | {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "array", "items": {"const": True}, "maxItems": 5}},
        "required": ["a", "b"],
        "additionalProperties": {"type": "null"},
        "maxProperties": 2,
    }
    grammar = grammars.compile(spec("json_schema", schema))
    spaces = (" ", "  ", "\n", "\n\n", "\t", "\r")
    for seed in range(5):
        text, ended = walk(grammar, *rest, seed, prefer=(*spaces, ", ", '": ', " 1"))
        assert ended
        assert not re.search(r"\s\s|[\n\t\r]", text)
        assert json.loads(text)


@pytest.mark.parametrize("text", ['{"a":1,"b":[true,true]}', '{"a": 1, "b": [true, true]}'])
def test_the_usual_forms_of_json(byte_grammars, text):
    """Compact JSON and that of json.dumps are what models write: both must be allowed."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
    constraint = byte_grammars.compile(spec("json_schema", schema | {"additionalProperties": False})).start()
    assert feed_text(constraint, text)
    assert constraint.error is None


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice"])
def test_what_comes_ahead_is_in_the_masks(any_grammars, kind):
    """Drafts come with masks that are made before they are taken."""
    grammars, _, size, eos = any_grammars
    source = {"json_schema": PERSON, "regex": "Answer: (yes|no), of course[!?]", "choice": ["positive", "neutral"]}
    grammar = grammars.compile(spec(kind, source[kind]))
    for seed in range(6):
        rng, constraint, chosen = random.Random(seed), grammar.start(), []
        while len(chosen) < 60:
            ids = allowed(constraint, size)
            chosen.append(rng.choice(ids))
            if constraint.feed(chosen[-1]):
                break
        follower = grammar.start()
        for place in range(len(chosen)):
            ahead = follower.ahead([*chosen[place : place + 3], size])
            follower.feed(chosen[place])
            expected, later = [], grammar.start()
            for number, token in enumerate(chosen[: place + 3]):
                if token == eos or later.feed(token):
                    # An end is no draft, and nothing follows the last token.
                    expected += [allowed(later, size)] * (number >= place and token != eos)
                    break
                expected += [allowed(later, size)] * (number >= place)
            assert [allowed(each, size) for each in ahead] == expected


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice"])
def test_runs_are_what_masks_name_one_after_the_other(any_grammars, kind):
    """Encoding gives all tokens of a text that must come: a rest of it, encoded alone, may have others."""
    grammars, _, size, eos = any_grammars
    source = {"json_schema": PERSON, "regex": "Answer: (yes|no), of course[!?]", "choice": ["positive", "neutral"]}
    grammar, longest = grammars.compile(spec(kind, source[kind])), 0
    for seed in range(6):
        rng, constraint, follower, ended = random.Random(seed), grammar.start(), grammar.start(), False
        for _ in range(60):
            ids = allowed(constraint, size)
            if ended or ids == [eos]:
                break
            run, ended = follower.follow(ids[0]) if len(ids) == 1 else ([rng.choice(ids)], None)
            longest = max(longest, len(run))
            for number, token in enumerate(run):
                assert number == 0 or allowed(constraint, size) == [token]
                stops = constraint.feed(token)
            if ended is None:
                ended = follower.feed(run[0])
            assert ended == stops
    # JSON may have spaces, so little of it must come.
    assert longest > 1 or kind == "json_schema"
