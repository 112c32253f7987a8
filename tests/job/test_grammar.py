"""Structured output: masks allow only tokens that match, and unusable grammars are refused."""

import json
import random
import re
import subprocess
import sys
import threading

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rosebatch.core.errors import RowError
from rosebatch.core.sampling_params import GrammarSpec
from rosebatch.text.compiled_grammar import Grammar, TokenConstraint
from rosebatch.text.grammar import Grammars
from rosebatch.text.grammar_source import new_matcher
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import EOS, byte_backend

# The width of a model with padded logits. 269 is not a multiple of 32, and one end token is unknown to the tokenizer.
VOCAB_SIZE, EOS_IDS = 269, (EOS, 266)
SHORT_WORDS = [b'": ', b'", "', b'{"', b"]}", b"  ", b"\n\n", b"abc", b'"}', b"12", b" ", b" 1", b", "]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["friend", "foe", 'a "friend"', None, 3]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "scores": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}, "minItems": 1},
        "boss": {"$ref": "#/$defs/person"},
    },
    "required": ["name", "kind", "scores"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"name": {"const": "Ada"}}, "required": ["name"]}},
}


def spec(kind, source=""):
    return GrammarSpec(kind, source if isinstance(source, str) else json.dumps(source))


@pytest.fixture(scope="module")
def byte_grammars():
    """Grammars for tokens of one byte."""
    return Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, EOS_IDS)


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE of 600 tokens, trained on JSON: its tokens cross the borders of the grammar."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rng = random.Random(0)
    people = [{"name": rng.choice(["Ada", "Zoë"]), "kind": "foe", "scores": [[i, -i / 3]]} for i in range(200)]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<eos>"])
    backend.train_from_iterator([json.dumps(p, indent=rng.choice([None, 2])) for p in people], trainer)
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def spaced():
    """A tokenizer like that of Llama 2: a mark for the space, and byte tokens for text without a token."""
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for word in ["▁", "a", "b", '"', "{", "}", ":", ",", "▁a", '▁"', '":', "▁▁", "1", "▁1"]:
        vocab[word] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(backend)


@pytest.fixture(scope="module", params=["bytes", "words", "trained", "spaced"])
def any_grammars(request):
    """Several kinds of tokenizers, each with its end token."""
    if request.param in ("trained", "spaced"):
        tokenizer = request.getfixturevalue(request.param)
        size, eos = tokenizer.backend.get_vocab_size(), tokenizer.backend.token_to_id("<eos>")
        eos = tokenizer.backend.token_to_id("</s>") if eos is None else eos
    else:
        tokenizer = Tokenizer(byte_backend(*(SHORT_WORDS if request.param == "words" else ())))
        size, eos = VOCAB_SIZE, EOS
    return Grammars(tokenizer, size, [eos]), tokenizer, size, eos


def tokens_of(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def allowed(constraint, vocab_size=VOCAB_SIZE):
    """The tokens that may come next. The mask starts with all bits set, so every bit must be written."""
    mask = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    constraint.fill(mask)
    return tokens_of(mask)


def feed_text(constraint, text):
    """Feeds text byte by byte and returns what ``feed`` says of the last byte; it must not end before."""
    *before, last = [constraint.feed(byte) for byte in text.encode()]
    assert not any(before)
    return last


def walk(grammar, tokenizer, size, eos, seed, prefer=(), limit=400):
    """The text of randomly chosen allowed tokens, and whether it ended. After 40 tokens it prefers those that close."""
    rng, constraint, chosen = random.Random(seed), grammar.start(), []
    while len(chosen) < limit:
        ids = allowed(constraint, size)
        assert ids
        texts = {i: tokenizer.decode([i]) for i in ids}
        picks = [i for i in ids if texts[i] in prefer]
        if not picks and len(chosen) > 40:
            picks = [i for i in ids if i == eos or texts[i].strip() in ('"', "]", "}", "]}", '"}')]
        token = rng.choice(picks or ids)
        ended = constraint.feed(token)
        chosen += [token] * (token != eos)
        if ended:
            assert allowed(constraint, size) == [eos]
            break
    assert constraint.error is None
    return tokenizer.decode(chosen), len(chosen) < limit


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


def test_end_tokens_only_where_the_grammar_may_end(byte_grammars):
    """All end tokens of the model are allowed there, also unknown to the tokenizer, but no padding."""
    constraint = byte_grammars.compile(spec("regex", "ab?")).start()
    assert allowed(constraint) == [ord("a")]
    assert constraint.feed(ord("a")) is False
    assert allowed(constraint) == sorted([ord("b"), *EOS_IDS])
    assert constraint.feed(ord("b")) is True
    assert allowed(constraint) == sorted(EOS_IDS)
    assert constraint.error is None


def test_an_end_token_ends(byte_grammars):
    """Any end token ends the grammar without an error and is not part of its text."""
    for eos in EOS_IDS:
        constraint = byte_grammars.compile(spec("regex", "a*")).start()
        assert constraint.feed(ord("a")) is False
        assert constraint.feed(eos) is True
        assert allowed(constraint) == sorted(EOS_IDS)
        assert constraint.feed(ord("a")) is True
        assert constraint.error is None


def test_an_end_token_that_is_ordinary_text():
    """Some models end with a token of plain letters: inside a string it would cut the answer short."""
    grammars = Grammars(Tokenizer(byte_backend(b"END")), 258, [257])
    constraint = grammars.compile(spec("regex", "(a|E|END)*")).start()
    assert allowed(constraint, 258) == [ord("E"), ord("a"), 257]
    assert constraint.feed(ord("E")) is False
    assert allowed(constraint, 258) == [ord("E"), ord("N"), ord("a"), 257]
    assert constraint.feed(ord("N")) is False
    assert allowed(constraint, 258) == [ord("D")]
    inside = grammars.compile(spec("regex", "x(END|a)!")).start()
    assert inside.feed(ord("x")) is False
    assert allowed(inside, 258) == [ord("E"), ord("a")]
    assert inside.feed(257) is True
    assert inside.error == "an end token came too early"


@pytest.mark.parametrize("vocab_size", [257, 258, 287, 288, 289, 320, 1000])
def test_widths_of_logits(vocab_size):
    """Padding after the last token is never allowed, wherever a word of the mask ends."""
    grammar = Grammars(Tokenizer(byte_backend()), vocab_size, [EOS]).compile(spec("regex", "[^a]*"))
    ids = allowed(grammar.start(), vocab_size)
    assert ord("a") not in ids
    assert ids[-1] == EOS
    assert {ord("b"), 0} < set(ids)


@pytest.mark.parametrize("vocab_size", [260, 256 + 32, 289])
def test_a_model_with_fewer_tokens_than_the_tokenizer(vocab_size):
    """A bit for a token without weights would be in another row's mask, or beyond the mask."""
    extra = [bytes([97 + i % 26, 97 + i // 26]) for i in range(40)]
    tokenizer = Tokenizer(byte_backend(*extra))
    grammar = Grammars(tokenizer, vocab_size, [EOS, 290]).compile(spec("regex", "[a-z]+"))
    constraint = grammar.start()
    assert allowed(constraint, vocab_size) == [*range(97, 123), *range(257, vocab_size)]
    assert constraint.feed(vocab_size) is True
    assert "the tokenizer has no token" in constraint.error


def test_a_model_without_the_tokens_for_it():
    """A mask without any bit gives NaN probabilities: the row must end with an error instead."""
    constraint = Grammars(Tokenizer(byte_backend()), 100, [99]).compile(spec("choice", ["az", "xy"])).start()
    assert allowed(constraint, 100) == [ord("a")]
    assert constraint.feed(ord("a")) is False
    assert allowed(constraint, 100) == [99]
    assert constraint.feed(99) is True
    assert constraint.error == "an end token came too early"


@pytest.mark.parametrize("vocab_size", [260, 288, VOCAB_SIZE])
def test_all_masks_at_once(vocab_size):
    """Filling all masks together gives the same bits as one by one: live, ended and failed completions."""
    tokenizer = Tokenizer(byte_backend(*(bytes([b, b]) for b in range(40))))
    grammars = Grammars(tokenizer, vocab_size, (EOS, 258))
    specs = [spec("json_schema", PERSON), spec("regex", "a+"), spec("choice", ["ab", "xyz"]), spec("json_object")]
    rng = random.Random(vocab_size)

    def follow():
        """Completions after no, some and many tokens, one that ended, and one that got a wrong token."""
        for which in specs:
            for steps in (0, 1, 5, 60):
                constraint = grammars.compile(which).start()
                for _ in range(steps):
                    constraint.feed(rng.choice(allowed(constraint, vocab_size)))
                yield constraint
        for token in (EOS, ord("b")):
            constraint = grammars.compile(spec("regex", "a+")).start()
            constraint.feed(ord("a"))
            assert constraint.feed(token) is True
            yield constraint

    constraints = list(follow())
    rng.shuffle(constraints)
    masks = np.full((len(constraints), -(-vocab_size // 32)), -1, dtype=np.int32)
    TokenConstraint.fill_all(constraints, masks)
    expected = np.zeros_like(masks)
    for constraint, mask in zip(constraints, expected, strict=True):
        constraint.fill(mask)
    assert (masks == expected).all()
    assert masks.any(axis=1).all()
    assert sum(constraint.error is not None for constraint in constraints) == 1
    TokenConstraint.fill_all(constraints[:1], masks[:1])
    assert (masks == expected).all(), "again, and of one alone"


def test_all_masks_where_one_cannot_be_made(monkeypatch):
    """A completion that exceeds the limit ends with its reason, and the other masks stay right."""
    monkeypatch.setattr("rosebatch.text.grammar_source.MAX_STATES", 100)
    grammars = Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, EOS_IDS)
    easy = grammars.compile(spec("choice", ["yes"])).start()
    hard = grammars.compile(spec("regex", "[ab]*a[ab]{30}!")).start()
    rng, masks = random.Random(0), np.zeros((2, -(-VOCAB_SIZE // 32)), np.int32)
    for _ in range(1000):
        TokenConstraint.fill_all([hard, easy], masks)
        assert tokens_of(masks[1]) == [ord("y")]
        if hard.error or hard.feed(rng.choice(b"ab")):
            break
    assert "too many states" in hard.error
    TokenConstraint.fill_all([hard, easy], masks)
    assert tokens_of(masks[0]) == sorted(EOS_IDS)
    assert easy.error is None


def test_bits_land_in_the_right_words():
    """The highest bit of a word is an int32's sign: end tokens there must work like any other."""
    backend = byte_backend(*(bytes([b, b]) for b in range(60)))
    for eos in (EOS, 287, 288, 316):
        grammar = Grammars(Tokenizer(backend), 317, [eos]).compile(spec("choice", ["ab"]))
        constraint = grammar.start()
        assert allowed(constraint, 317) == [97]
        assert constraint.feed(97) is False
        assert constraint.feed(98) is True
        assert allowed(constraint, 317) == [eos]


def test_a_row_of_a_larger_array(byte_grammars):
    """The engine keeps all masks in one array: other rows' masks must not change."""
    masks = np.full((3, -(-VOCAB_SIZE // 32)), -1, dtype=np.int32)
    byte_grammars.compile(spec("choice", ["x"])).start().fill(masks[1])
    assert (masks[[0, 2]] == -1).all()
    assert tokens_of(masks[1]) == [ord("x")]


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


def test_two_completions_do_not_disturb_each_other(byte_grammars):
    """They share the compiled grammar but no state, even if one of them fails."""
    grammar = byte_grammars.compile(spec("choice", ["abc", "abd", "xyz"]))
    first, second, third = (grammar.start() for _ in range(3))
    assert first.feed(ord("a")) is False
    assert allowed(second) == [ord("a"), ord("x")]
    assert second.feed(ord("x")) is False
    assert third.feed(ord("q")) is True
    assert allowed(first) == [ord("b")]
    assert allowed(second) == [ord("y")]
    assert feed_text(first, "bd") is True
    assert feed_text(second, "yz") is True
    assert allowed(grammar.start()) == [ord("a"), ord("x")]
    assert first.error is second.error is None


@pytest.mark.parametrize("token", [ord("b"), -1, 257, VOCAB_SIZE, 2**40])
def test_a_token_that_is_not_allowed(byte_grammars, token):
    """The row ends with an error, and the engine continues with all other rows."""
    constraint = byte_grammars.compile(spec("regex", "a+")).start()
    assert constraint.feed(ord("a")) is False
    assert constraint.feed(token) is True
    assert constraint.error
    assert allowed(constraint) == sorted(EOS_IDS)
    assert constraint.feed(ord("a")) is True


def test_one_rows_excess_does_not_end_the_others(monkeypatch):
    """All rows of a grammar share a limit of llguidance: once it was reached, all of them stopped."""
    replaced, replace_matcher = [], Grammar.replace_matcher
    monkeypatch.setattr(Grammar, "replace_matcher", lambda self: (replaced.append(self), replace_matcher(self))[1])
    monkeypatch.setattr("rosebatch.text.grammar_source.MAX_STATES", 5000)
    monkeypatch.setattr("rosebatch.text.compiled_grammar._MAX_MATCHERS", 1)
    # This regex has as many states as there are strings of a and b.
    grammar = Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, EOS_IDS).compile(spec("regex", "[ab]*a[ab]{30}"))
    bystander = grammar.start()
    assert feed_text(bystander, "ab") is False
    for seed in range(60):
        rng, constraint = random.Random(seed), grammar.start()
        for _ in range(50):
            assert allowed(constraint)[:2] == [ord("a"), ord("b")]
            assert constraint.feed(rng.choice(b"ab")) is False
        assert constraint.error is None
    assert len(replaced) == 1
    assert feed_text(bystander, "a") is False
    assert allowed(bystander) == [ord("a"), ord("b")]
    assert feed_text(bystander, "b" * 30) is False
    assert allowed(bystander) == [ord("a"), ord("b"), *sorted(EOS_IDS)]
    assert bystander.error is None
    assert len(replaced) == 2


def test_many_completions_take_turns(monkeypatch):
    """Several matchers let threads work without waiting for each other: all must give the same masks."""
    compiled = []
    for module in ("compiled_grammar", "grammar_source"):
        name = f"rosebatch.text.{module}.new_matcher"
        monkeypatch.setattr(name, lambda *args: compiled.append(new_matcher(*args)) or compiled[-1])
    monkeypatch.setattr("rosebatch.text.compiled_grammar._MAX_MATCHERS", 3)
    grammar = Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, EOS_IDS).compile(spec("regex", "a(b|cd)"))
    constraints = [grammar.start() for _ in range(16)]
    assert len(compiled) == 1, "few completions are not worth another compilation"
    constraints += [grammar.start() for _ in range(64)]
    assert len(compiled) == 3
    masks = np.zeros((80, -(-VOCAB_SIZE // 32)), np.int32)
    for token in b"acd":
        TokenConstraint.fill_all(constraints, masks)
        assert (masks == masks[0]).all()
        assert tokens_of(masks[0])[0] in (token, ord("b"))
        assert {c.feed(token) for c in constraints} == {token == ord("d")}


def test_a_row_that_is_too_much_by_itself(monkeypatch):
    """It ends with an error: an answer that is cut short must not pass for a match."""
    monkeypatch.setattr("rosebatch.text.grammar_source.MAX_STATES", 5000)
    grammar = Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, EOS_IDS).compile(spec("regex", "[ab]*a[ab]{30}"))
    rng, constraint, length = random.Random(0), grammar.start(), 0
    while ord("a") in allowed(constraint) and not constraint.feed(rng.choice(b"ab")):
        length += 1
    assert 1000 < length < 5000
    assert allowed(constraint) == sorted(EOS_IDS)
    assert constraint.feed(ord("a")) is True
    assert "too many states" in constraint.error
    assert constraint.error.splitlines() == [constraint.error]
    assert allowed(grammar.start()) == [ord("a"), ord("b")]


def test_each_grammar_is_compiled_once(byte_grammars):
    """A file often has one schema for all rows: compiling it for each would cost more than the model."""
    first = byte_grammars.compile(spec("json_schema", PERSON))
    assert byte_grammars.compile(spec("json_schema", PERSON)) is first
    assert byte_grammars.compile(spec("json_object")) is not first


def test_a_file_with_a_grammar_for_each_row():
    """Memory stays bounded, and a dropped grammar still works for the row that follows it."""
    grammars = Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, EOS_IDS)
    grammar = grammars.compile(spec("regex", "ab"))
    constraint = grammar.start()
    for i in range(200):
        grammars.compile(spec("regex", f"x{i}"))
    assert grammars.compile(spec("regex", "ab")) is not grammar
    assert feed_text(constraint, "ab") is True


def test_compiling_beside_generation(byte_grammars):
    """One thread compiles grammars while another follows one: neither may fail."""
    failures = []

    def prepare():
        try:
            for i in range(60):
                byte_grammars.compile(spec("json_schema", {"type": "string", "maxLength": i + 1}))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    grammar = byte_grammars.compile(spec("choice", ["to be", "to go"]))
    while thread.is_alive():
        assert feed_text(grammar.start(), "to go") is True
    thread.join()
    assert not failures


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


def test_runs_without_a_grammar_do_not_load_llguidance():
    """Importing it would cost time at every start."""
    code = (
        "import sys, tokenizers; from rosebatch.text.grammar import Grammars;"
        "from rosebatch.text.tokenizer import Tokenizer;"
        "Grammars(Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE())), 300, [256]);"
        "sys.exit('llguidance' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
