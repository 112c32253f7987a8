"""Masks of grammars: which bits are set."""

import random

import numpy as np
import pytest

from rosebatch.text.grammar.compiled import TokenConstraint
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import EOS, byte_backend
from tests.helpers.grammars import EOS_IDS, PERSON, VOCAB_SIZE, allowed, spec, tokens_of


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
    monkeypatch.setattr("rosebatch.text.grammar.source.MAX_STATES", 100)
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


@pytest.mark.parametrize("longest", [9, 18, 45])
def test_tokens_that_are_allowed_together(monkeypatch, longest):
    """Where a string has few characters left, tokens of more must be ruled out, whichever slice they are in."""
    words = [letter * length for letter in (b"a", "é".encode()) for length in range(2, 40)]
    tokenizer = Tokenizer(byte_backend(*words, b'aa"', b'a", "', b"a\\n", b"  "))
    size = tokenizer.backend.get_vocab_size()
    which = spec("json_schema", {"type": "array", "items": {"type": "string", "maxLength": longest}, "minItems": 2})
    sliced = Grammars(tokenizer, size, [EOS]).compile(which)
    monkeypatch.setattr("rosebatch.text.grammar.source._SLICES", [])
    plain = Grammars(tokenizer, size, [EOS]).compile(which)
    for seed in range(8):
        rng, one, other = random.Random(seed), sliced.start(), plain.start()
        for _ in range(60):
            token_ids = allowed(one, size)
            assert token_ids == allowed(other, size)
            token_id = rng.choice([i for i in token_ids if i < 256] or token_ids) if seed % 2 else rng.choice(token_ids)
            if one.feed(token_id) | other.feed(token_id):
                break


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


@pytest.mark.parametrize("most", [60, 100, 300])
def test_drafts_near_the_limit_of_states(monkeypatch, most):
    """A copy failed where its completion could start over, and that answer was cut: an end token had come too early."""
    monkeypatch.setattr("rosebatch.text.grammar.source.MAX_STATES", most)
    errors, grammars = set(), Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, (EOS,))
    for seed in range(4):
        rng, constraint, ended = random.Random(seed), grammars.compile(spec("regex", "[ab]*a[ab]{30}!")).start(), False
        while not ended and rng.random() < 0.99:
            found = constraint.ahead(rng.choices(b"ab", k=8))
            masks = [allowed(each) for each in (constraint, *found)]
            assert not found or [EOS] not in masks[1:]
            token_id = rng.choice(masks[0])
            ended = constraint.feed(token_id)
        errors.add(constraint.error)
    assert errors <= {None, f"lexer error: too many states: {most} >= {most}"}
