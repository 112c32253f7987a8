"""Completions that follow one grammar, and grammars that are compiled."""

import random
import subprocess
import sys
import threading

import numpy as np
import pytest

from rosebatch.text.grammar.compiled import Grammar, TokenConstraint, _only
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.grammar.source import new_matcher
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.grammars import EOS_IDS, PERSON, VOCAB_SIZE, allowed, feed_text, spec, tokens_of


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


def test_many_choices(byte_grammars):
    """Of more than 2,000, none could be followed: each answer failed at its first token."""
    constraint = byte_grammars.compile(spec("choice", [f"{i:05}" for i in range(20_000)])).start()
    assert allowed(constraint) == [ord("0"), ord("1")]
    assert feed_text(constraint, "19999") is True
    assert constraint.error is None


def alone(grammar, fed):
    """The tokens up to the end, each the only one that its mask allows; none if a mask allows others."""
    constraint, found = grammar.start(), []
    for token in fed:
        constraint.feed(token)
    while len(ids := allowed(constraint)) == 1:
        found += ids
        if constraint.feed(*ids):
            return found
    return []


def test_the_rest_of_a_choice_is_what_masks_would_leave():
    """Tokens that come without logits must be those that would have been sampled, one after the other."""
    grammars = Grammars(Tokenizer(byte_backend(b"ab", b"abc", b"cab", b"bc")), VOCAB_SIZE, EOS_IDS)
    rng, lengths = random.Random(0), set()
    for _ in range(40):
        texts = {"".join(rng.choices("abc", k=rng.randrange(1, 9))) for _ in range(rng.randrange(1, 4))}
        grammar = grammars.compile(spec("choice", sorted(texts)))
        constraint, fed = grammar.start(), []
        while True:
            rest = constraint.rest()
            assert rest == alone(grammar, fed)
            lengths.add(len(rest))
            fed.append(rng.choice([token for token in allowed(constraint) if token not in EOS_IDS] or [EOS_IDS[0]]))
            if constraint.feed(fed[-1]):
                break
        assert constraint.rest() == []
    assert max(lengths) > 3


def test_a_long_beginning_of_several_choices(byte_grammars, monkeypatch):
    """Each token looked through all that follow it: a beginning of 400 tokens took 80,000 masks a row, 15 seconds."""
    grammar = byte_grammars.compile(spec("choice", ["ab" * 100, "ab" * 150, "ab" * 150 + "cd" * 50]))
    constraint, looks = grammar.start(), []
    monkeypatch.setattr("rosebatch.text.grammar.compiled._only", lambda words: looks.append(1) or _only(words))
    for token in b"ab" * 150 + b"c":
        assert constraint.rest() == []
        assert constraint.feed(token) is False
    assert bytes(constraint.rest()).decode() == ("cd" * 50)[1:]
    assert 300 < len(looks) <= 401


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
    monkeypatch.setattr(
        Grammar, "replace_matcher", lambda self, **k: (replaced.append(self), replace_matcher(self, **k))[1]
    )
    monkeypatch.setattr("rosebatch.text.grammar.source.MAX_STATES", 5000)
    monkeypatch.setattr("rosebatch.text.grammar.compiled._MAX_MATCHERS", 1)
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
    for module in ("compiled", "source"):
        name = f"rosebatch.text.grammar.{module}.new_matcher"
        monkeypatch.setattr(name, lambda *args: compiled.append(new_matcher(*args)) or compiled[-1])
    monkeypatch.setattr("rosebatch.text.grammar.compiled._MAX_MATCHERS", 3)
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
    monkeypatch.setattr("rosebatch.text.grammar.source.MAX_STATES", 5000)
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


def test_runs_without_a_grammar_do_not_load_llguidance():
    """Importing it would cost time at every start."""
    code = (
        "import sys, tokenizers; from rosebatch.text.grammar.grammars import Grammars;"
        "from rosebatch.text.tokenizer import Tokenizer;"
        "Grammars(Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE())), 300, [256]);"
        "sys.exit('llguidance' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
