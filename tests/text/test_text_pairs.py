"""Pairs of texts are encoded in bounded memory, to the same token ids."""

import pytest
from tokenizers import processors

from rosebatch.core.errors import RowError
from rosebatch.text import text_pairs
from rosebatch.text.long_texts import Bound
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend

REFUSAL = RowError("prompt_too_long", "too long")
TEXTS = ["a", "some words", "many more words " * 9, "w" * 60, ""]


class Watched:
    """A tokenizer that notes the characters of each call."""

    def __init__(self):
        self._backend = byte_backend()
        self._backend.post_processor = processors.TemplateProcessing(
            single="$A", pair="! $A ! $B:1 !:1", special_tokens=[("!", 33)]
        )
        self.sizes = []

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def encode_batch(self, texts, **options):
        self.sizes.append(sum(map(len, texts)))
        return self._backend.encode_batch(texts, **options)

    def encode_batch_fast(self, texts, **options):
        self.sizes.append(sum(map(len, texts)))
        return self._backend.encode_batch_fast(texts, **options)


@pytest.fixture
def backend():
    return Watched()


@pytest.mark.parametrize("longest", [None, 5, 20, 61, 1000])
def test_ids_do_not_depend_on_groups(backend, monkeypatch, longest):
    """A text that was cut for one pair was short in the next one, too."""
    pairs = [(first, second) for first in TEXTS for second in TEXTS]
    monkeypatch.setattr(text_pairs, "_GROUP", 100)
    found = list(Tokenizer(backend).encode_pairs(pairs, longest))
    alone = [next(Tokenizer(backend).encode_pairs([pair], longest)) for pair in pairs]
    assert found == alone
    assert max(map(len, found)) <= (longest or 1000)
    assert found[2 * len(TEXTS)] == list(f"!{TEXTS[2]}!a!".encode()) or longest not in (None, 1000)


@pytest.mark.parametrize("longest", [None, 100])
def test_a_long_text_with_very_many_others(backend, longest):
    """1,024 pairs of one text of 7 MB were 7 GB of text, and a terabyte while it was encoded."""
    text = "some words " * 700_000
    pairs = [(text, f"{number}") for number in range(1024)]
    found = list(Tokenizer(backend).encode_pairs(pairs, longest, Bound(longest or 0, 1000, REFUSAL)))
    if longest is None:
        assert found == [REFUSAL] * 1024
    else:
        ids = [list(f"!{text[: 97 - len(two)]}!{two}!".encode()) for _, two in pairs]
        assert found == ids
    assert max(backend.sizes) < 1 << 18
    assert sum(backend.sizes) < 1 << 20


def test_a_long_word_with_another_text(backend):
    """It cannot be cut, and memory has no room for all of it."""
    bound = Bound(100, 1000, REFUSAL, most_at_once=199_999)
    word, short = "w" * 200_000, ("a", "b")
    errors = Tokenizer(backend).encode_pairs([(word, "a"), short], 100, bound)
    assert [getattr(each, "code", "fits") for each in errors] == ["prompt_too_long", "fits"]
    assert [len(each) for each in Tokenizer(backend).encode_pairs([(word[:150_000], "a"), short], 100, bound)] == [
        100,
        5,
    ]


def test_many_long_texts_are_encoded_some_at_a_time(backend):
    """1,024 documents of 30 kB were encoded at once: 6 GB."""
    pairs = [("query", f"{number} " + "some words " * 2000) for number in range(100)]
    found = list(Tokenizer(backend).encode_pairs(pairs, 50))
    assert {len(ids) for ids in found} == {50}
    assert max(backend.sizes) < 1 << 19
