"""Words and tokens that a row rules out, over the fake model and by themselves."""

import re

import numpy as np
import pytest

from rosebatch.core.sampling_params import SamplingParams
from rosebatch.text.token_bans import BanConstraint, find_bans
from tests.job.lines import codes, texts

LINE = {"prompt": "hello", "max_tokens": 12, "ignore_eos": True}


def allowed(constraint, vocab_size):
    """The tokens that may come next."""
    masks = np.zeros((1, -(-vocab_size // 32)), np.int32)
    BanConstraint.fill_all([constraint], masks)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:vocab_size]).tolist())


@pytest.fixture
def plain(job):
    """The answer to the line without bans."""
    return job.results([LINE])[0]["text"]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_words_never_come(job, plain, length):
    """Of several tokens too: only the last is ruled out, and only behind the others."""
    word = plain[4 : 4 + length]
    (text,), other = map(texts, job.results([{**LINE, "bad_words": [word]}, LINE]))
    assert text.startswith(plain[: plain.index(word)])
    assert word not in text
    assert len(text) == len(plain)
    assert other == [plain]


def test_the_middle_of_a_word_may_come(job, plain):
    """A word of two tokens must not take its last token out of every place."""
    (row,) = job.results([{**LINE, "bad_words": ["\x00" + plain[4]]}])
    assert texts(row) == [plain]


def test_only_allowed_tokens_come(job):
    """Greedy and sampled, in each of several completions."""
    line = {**LINE, "allowed_token_ids": [ord("a"), ord("b")]}
    rows = job.results([line, {**line, "temperature": 1, "seed": 3, "n": 4}])
    assert all(set(text) <= {"a", "b"} and len(text) == 12 for row in rows for text in texts(row))
    assert len(set(texts(rows[1]))) > 1


def test_with_a_grammar(job):
    """Both hold: what the grammar allows and the bans leave."""
    line = {**LINE, "structured_outputs": {"regex": "[abc]{6}"}, "bad_words": ["a"], "temperature": 1, "seed": 5}
    (text,) = texts(job.results([line])[0])
    assert re.fullmatch("[bc]{6}", text)


def test_rows_that_cannot_be_served(job):
    """They cost themselves only."""
    lines = [
        {**LINE, "allowed_token_ids": [10**6]},
        {**LINE, "bad_words": [" "]},
        {**LINE, "bad_words": "text"},
        {**LINE, "allowed_token_ids": [-1]},
        LINE,
    ]
    expected = ["invalid_token_id", "invalid_sampling", "invalid_field", "invalid_sampling", None]
    assert codes(job.results(lines)) == expected
    ids = {"prompt_token_ids": [1], "bad_words": ["a"]}
    assert codes(job.results([ids], without_tokenizer=True)) == ["no_tokenizer"]


def test_words_of_tokens_that_the_model_lacks(job):
    """Gemma 3's tokenizer has a token more than its logits. Such a row ended the job, and each resume of it."""
    line = {**LINE, "prompt": "ABC"}
    rows = job.results([{**line, "bad_words": ["~", "A"]}, line], vocab_size=ord("Z"))
    assert codes(rows) == [None, None]


def test_where_nothing_is_left(tokenizer):
    """A mask without a token would leave the sampler without a choice: the answer ends."""
    bans = find_bans(tokenizer, ("a",), (ord("a"),), 257, frozenset({256}))
    constraint = BanConstraint(bans, None)
    assert (allowed(constraint, 257), constraint.error) == ({256}, None)
    constraint = BanConstraint(find_bans(tokenizer, ("a",), (ord("a"),), 257, frozenset()), None)
    assert allowed(constraint, 257) == set()
    assert constraint.error == "all tokens are ruled out by bad_words and allowed_token_ids, for token 1 of the answer"


def test_a_word_behind_a_space(tokenizer):
    """Most words of a text stand behind one, and are other tokens then."""
    bans = find_bans(tokenizer, ("ab",), None, 257, frozenset({256}))
    assert sorted(bans.words) == [(ord(" "), ord("a"), ord("b")), (ord("a"), ord("b"))]
    constraint = BanConstraint(bans, None)
    assert ord("b") in allowed(constraint, 257)
    for token, is_allowed in (("a", False), ("a", False), ("c", True)):
        constraint.feed(ord(token))
        assert (ord("b") in allowed(constraint, 257)) == is_allowed


def test_special_tokens_and_stop_strings_in_the_text(job, plain):
    """Both are left out unless the row asks for them."""
    stop = plain[5:7]
    end = plain.index(stop)
    rows = job.results([{**LINE, "stop": stop}, {**LINE, "stop": stop, "include_stop_str_in_output": True}])
    assert [texts(row) for row in rows] == [[plain[:end]], [plain[:end] + stop]]
    assert [row["finish_reason"] for row in rows] == ["stop", "stop"]
    special = {**LINE, "max_tokens": 1, "allowed_token_ids": [256]}
    rows = job.results([special, {**special, "skip_special_tokens": False}])
    assert [texts(row) for row in rows] == [[""], ["<eos>"]]


def test_parameters():
    """Scripts pass lists; what is impossible is named."""
    assert SamplingParams(bad_words=["a"], allowed_token_ids=[3]).bans
    assert not SamplingParams().bans
    with pytest.raises(ValueError, match="bad_words must be made of texts"):
        SamplingParams(bad_words=[""])
