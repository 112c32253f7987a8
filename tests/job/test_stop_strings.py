"""Stop strings are watched token by token but belong to the text: the two must agree."""

import random

import pytest

from rosebatch.text.stop_strings import StopStrings, cut_at_stop
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import FakeModel

EOS = 256


def feed(tokenizer, stop, token_ids):
    """The answer to each token."""
    watcher = StopStrings(tokenizer, stop)
    return [watcher.feed(token_id) for token_id in token_ids]


@pytest.mark.parametrize(
    ("text", "stop", "protected", "cut"),
    [
        ("abc", (), 0, "abc"),
        ("abc", ("x",), 0, "abc"),
        ("abcabc", ("c",), 0, "ab"),
        ("abcabc", ("ca", "b"), 0, "a"),
        ("abc", ("abc",), 0, ""),
        ("abc", ("bc", "abcd"), 0, "a"),
        ("", ("a",), 0, ""),
        ("abcabc", ("c",), 2, "ab"),
        ("abcabc", ("c",), 3, "abcab"),
        ("abcabc", ("c",), 6, "abcabc"),
        ("abcabc", ("c",), 9, "abcabc"),
        ("abcd", ("bc",), 2, "a"),
        ("abcd", ("bc",), 3, "abcd"),
        ("abcabc", ("abc",), 2, ""),
        ("abcabc", ("abc",), 3, "abc"),
        ("aaaa", ("aa",), 1, ""),
        ("aaaa", ("aa",), 2, "a"),
        ("aaaa", ("aa",), 3, "aa"),
        ("abcabc", ("c", "ab"), 3, "abc"),
        ("ab", ("abcd",), 1, "ab"),
    ],
)
def test_cut_at_stop(text, stop, protected, cut):
    """The text is cut at the first match, not at the first stop string in the list.

    A match inside the protected characters is text; one that ends after them cuts at its beginning.
    """
    assert cut_at_stop(text, stop, protected)[0] == cut


@pytest.mark.parametrize("stop", [["cd"], ["d"], ["abcd"], ["x", "bcd", "e"]])
def test_across_token_borders(tokenizer, stop):
    """The match is found with its last token, however many tokens it spans."""
    assert feed(tokenizer, stop, b"abcd") == [False, False, False, True]


def test_a_string_that_begins_twice(tokenizer):
    """Keeping too little text would lose a match after a false beginning."""
    assert feed(tokenizer, ["aab"], b"aaab") == [False, False, False, True]
    assert feed(tokenizer, ["abab", "c"], b"ababab")[:4] == [False, False, False, True]


def test_inside_one_token():
    """A token may contain the whole string and text around it."""
    tokenizer = Tokenizer(byte_backend(b"the END of", b" it"))
    assert feed(tokenizer, ["END"], [258, 257]) == [False, True]


def test_characters_of_several_bytes(tokenizer):
    """Half a character is not text yet: U+FFFD must not appear inside a stop string."""
    assert feed(tokenizer, ["é\U0001f600"], "é\U0001f600".encode()) == [False] * 5 + [True]


def test_special_tokens_are_no_text(tokenizer):
    """They are not in the text, so they do not separate the halves of a stop string."""
    assert feed(tokenizer, ["ab"], [97, EOS, 98]) == [False, False, True]


def test_special_tokens_of_a_text_that_shows_them(job):
    """Watching left them out, and the text did not: the two disagreed about what is a match, and what is protected."""
    answers = {"p": [EOS, *b"ENDxyz"], "q": [*b"a", EOS, *b"bcdefg"]}
    model = FakeModel()
    model.next_token = lambda token_ids, prompt, seed: answers[chr(prompt[0])][len(token_ids) - len(prompt)]
    line = {"max_tokens": 6, "ignore_eos": True, "skip_special_tokens": False}
    lines = [{"prompt": "p", "stop": "END", "min_tokens": 4}, {"prompt": "q", "stop": "<eos>"}]
    lines = [{**line, **each} for each in (*lines, {"prompt": "q", "stop": "ab"})]
    rows = job.results(lines, model=model, return_token_ids=True)
    found = [(row["text"], row["finish_reason"], len(row["token_ids"])) for row in rows]
    assert found == [("<eos>ENDxy", "length", 6), ("a", "stop", 2), ("a<eos>bcde", "length", 6)]


def test_a_token_that_also_begins_the_next_character():
    """Its text waits until the character is complete; the match must be found then."""
    tokenizer = Tokenizer(byte_backend(b"END\xc3"))
    assert feed(tokenizer, ["END"], [257, 0xA9]) == [False, True]


def test_a_stop_string_in_text_that_is_held_back_at_the_end(job):
    """If the text is cut in the part held back, the finish reason is not the length."""
    model = FakeModel()
    model.next_token = lambda token_ids, prompt, seed: 257
    tokenizer = Tokenizer(byte_backend(b"END\xc3"))
    line = {"prompt": "x", "stop": "END", "max_tokens": 1}
    rows, tally, _ = job.run([line], model=model, tokenizer=tokenizer, vocab_size=258)
    assert (rows[0]["text"], rows[0]["finish_reason"]) == ("", "stop")
    assert tally.finish_reasons == {"stop": 1}


def test_watching_tokens_agrees_with_searching_the_text(tokenizer):
    """For random bytes, watching ends exactly when the row's text contains a stop string."""
    numbers = random.Random(0)
    pieces = [b"a", b"b", b"c", "é".encode(), "\U0001f600".encode(), b"\xff", b"\xc3", b"\xf0\x9f"]
    stop, found = ["ab", "cé", "bca"], 0
    for _ in range(300):
        token_ids = list(b"".join(numbers.choices(pieces, k=12)))
        watcher = StopStrings(tokenizer, stop)
        for end, token_id in enumerate(token_ids, start=1):
            text = tokenizer.decode(token_ids[:end])
            expected = any(s in text for s in stop)
            assert watcher.feed(token_id) == expected, token_ids[:end]
            if expected:
                found += 1
                break
    assert 50 < found < 300
