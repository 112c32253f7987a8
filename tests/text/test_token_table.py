"""Answers with a grammar have its text, whatever the tokenizer makes of texts."""

import json

import pytest
from tokenizers import AddedToken, normalizers

from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import EOS, byte_backend
from tests.helpers.grammars import allowed, spec, walk
from tests.helpers.marked_spaces import BYTE_PIECES, marked_spaces

# Normalizers make other texts of these: composed or decomposed, in small letters, without spaces around.
CHANGED = ["e\u0301", "\u0958", "\u1112\u1161\u11ab", "A", " a "]
# What stands for a space in the vocabulary, alone and beside spaces.
SPACES = ["\u2581", "a\u2581b", "\u2581\u2581x", "a  b"]


def sentencepiece(*added):
    """As of Llama 2: bytes for what has no token, and ``\u2581`` for a space. The last token ends a text."""
    pieces = ["<unk>", *BYTE_PIECES, "\u2581", *'abx"', "\u2581\u2581", "\u2581a", "</s>"]
    backend = marked_spaces(pieces, [("\u2581", "\u2581"), ("\u2581", "a")], ["</s>"])
    backend.add_tokens(list(added))
    return backend


def require_text(backend, eos, text):
    """Checks choices, of which one may begin another, and constants and keys of schemas."""
    tokenizer, size = Tokenizer(backend), 1 + max(backend.get_vocab().values())
    grammars = Grammars(tokenizer, size, [eos])

    def answers(kind, source):
        grammar = grammars.compile(spec(kind, source))
        found = [walk(grammar, tokenizer, size, eos, sample) for sample in range(4)]
        assert all(ended for _, ended in found)
        return {text for text, _ in found}

    assert answers("choice", [text]) == {text}
    assert answers("choice", [text, f"{text}{text}x"]) <= {text, f"{text}{text}x"}
    values = answers("json_schema", {"enum": [text, f"{text}x"]})
    assert {json.loads(value) for value in values} <= {text, f"{text}x"}
    key = {"properties": {text: {"const": text}}, "required": [text], "additionalProperties": False}
    keys = answers("json_schema", {"type": "object", **key})
    assert [json.loads(each) for each in keys] == [{text: text}] * len(keys)


@pytest.mark.parametrize("text", CHANGED)
@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.NFC(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]),
        normalizers.Replace("A", "\u212b"),
    ],
    ids=["Qwen", "several", "replaced"],
)
def test_texts_that_a_normalizer_changes(normalizer, text):
    """Of text that must come, the tokens of the normalized text were expected: with Qwen's NFC such rows failed."""
    backend = byte_backend()
    backend.normalizer = normalizer
    require_text(backend, EOS, text)


@pytest.mark.parametrize("text", SPACES)
def test_what_stands_for_a_space(text):
    """Encoding takes ``\u2581`` of a text for a space: rows with one failed."""
    backend = sentencepiece()
    require_text(backend, backend.token_to_id("</s>"), text)


@pytest.mark.parametrize("text", [*SPACES, "q", "aq", " q"])
def test_added_tokens_with_another_text_in_answers(text):
    """Gemma's runs of spaces are added tokens, and a normalizer puts a space before some: answers had these spaces."""
    run = AddedToken("\u2581\u2581", normalized=False, special=False)
    backend = sentencepiece(run, AddedToken("q", normalized=True, special=False))
    assert backend.decode([backend.token_to_id("a"), backend.token_to_id("q")]) == "a q"
    require_text(backend, backend.token_to_id("</s>"), text)


def test_a_run_of_spaces_is_a_token():
    """Gemma's own tokens for two spaces and more must serve code in an answer."""
    backend = sentencepiece(AddedToken("\u2581\u2581", normalized=False, special=False))
    size = 1 + max(backend.get_vocab().values())
    grammar = Grammars(Tokenizer(backend), size, [size - 1]).compile(spec("regex", "a {2}b|a {3}b"))
    constraint = grammar.start()
    assert constraint.feed(backend.token_to_id("a")) is False
    assert backend.token_to_id("\u2581\u2581") in allowed(constraint, size)


@pytest.mark.parametrize("text", ["a foo  b", "  foo", "foo\n", "foo foo", " foo bar"])
@pytest.mark.parametrize("strips", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}], ids=str)
@pytest.mark.parametrize("form", ["bytes", "sentencepiece"])
def test_tokens_that_take_the_spaces_around_them(form, strips, text):
    """Their token was expected in place of those of the text that must come: such rows failed."""
    added = AddedToken("foo", normalized=False, special=False, **strips)
    if form == "sentencepiece":
        backend = sentencepiece(added)
        require_text(backend, backend.token_to_id("</s>"), text)
        return
    backend = byte_backend()
    backend.add_tokens([added])
    require_text(backend, EOS, text)
