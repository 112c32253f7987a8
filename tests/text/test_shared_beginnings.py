"""What texts begin with is encoded once, and token ids are those of each text as a whole."""

import random

import pytest

from rosebatch.text import shared_beginnings
from rosebatch.text.long_texts import LongTexts
from rosebatch.text.shared_beginnings import SharedBeginnings
from tests.text.test_long_texts import BACKENDS, byte_backend, text_of


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(shared_beginnings, "_WORTH", 2000)


class Counted:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, backend):
        self.backend = backend
        self.characters = 0

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def encode_batch_fast(self, texts, **options):
        self.characters += sum(map(len, texts))
        return self.backend.encode_batch_fast(texts, **options)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", BACKENDS)
def test_ids_are_those_of_the_whole_texts(kind):
    """At any place where texts part: within a word, behind a space, and at the end of one of them."""
    backend = BACKENDS[kind]()
    shared = SharedBeginnings(LongTexts(backend))
    rng = random.Random(0)
    used = 0
    for seed in range(20):
        begin = text_of(400, seed)[: rng.randint(1200, 1500)]
        texts = [
            begin + rng.choice(["", " ", "\n", "s", "\u0301", "▁"]) + text_of(rng.randint(0, 20), n) for n in range(8)
        ]
        for add in (False, True):
            for group in (texts, texts[:1]):
                found = shared.encode(group, add_special_tokens=add)
                used += found is not None
                assert found in (None, [backend.encode(each, add_special_tokens=add).ids for each in group])
    assert used > 40


def test_each_beginning_is_encoded_once():
    """Also for texts that come one by one, and not for the one after the beginning has changed."""
    backend = Counted(BACKENDS["GPT-2"]())
    shared = SharedBeginnings(LongTexts(backend))
    begin = text_of(1000)
    assert shared.encode([begin + "a"], add_special_tokens=False) is None
    assert shared.encode([begin + "a", begin + "b"], add_special_tokens=False) is not None
    backend.characters = 0
    for number in range(10):
        assert shared.encode([f"{begin}{number}"], add_special_tokens=False) is not None
    # Those around the cut, and up to the next place where one may be.
    assert backend.characters < 10 * 250
    assert shared.encode(["x" + begin], add_special_tokens=False) is None


def test_a_cut_depends_on_what_follows_it():
    """A text that parted from the beginning right behind the cut got the token ids of another one."""
    backend = byte_backend()
    shared = SharedBeginnings(LongTexts(backend))
    begin = "a b " * 1000
    assert shared.encode([begin, begin + "c"], add_special_tokens=False) is not None
    rest = shared._last.rest
    assert shared.encode([begin[: rest + 10]], add_special_tokens=False) is None


def test_no_text_at_all():
    """There may be none in a group of rows."""
    assert SharedBeginnings(LongTexts(byte_backend())).encode([], add_special_tokens=True) is None
