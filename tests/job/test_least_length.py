"""``min_tokens`` together with everything that ends a completion, over the fake model."""

import random

import pytest

from rosebatch.text.stop_strings import cut_at_stop
from tests.job.fake_model import FakeModel


@pytest.mark.parametrize(
    ("answer", "min_tokens", "stop", "text", "tokens"),
    [
        # Inside the protected tokens, or ending with the last of them, it neither ends the completion nor cuts.
        (b"a END b END c", 5, "END", "a END b ", 11),
        (b"a END b END c", 4, "END", "a ", 5),
        (b"a END b", 5, "END", "a END b", 8),
        (b"ENDENDEND", 6, "END", "ENDEND", 9),
        # Across their end.
        (b"abENDcd", 3, "END", "ab", 5),
        (b"abENDcd", 4, "END", "ab", 5),
        (b"abENDcd", 5, "END", "abENDcd", 8),
        # A character of two tokens is at the border.
        ("éEND".encode(), 1, "END", "é", 5),
        ("éENDéEND".encode(), 5, "END", "éENDé", 10),
    ],
)
def test_stop_strings_and_a_least_length(job, answer, min_tokens, stop, text, tokens):
    """Watching tokens and cutting the text must agree on which stop string counts."""
    line = {"prompt": "x", "min_tokens": min_tokens, "stop": stop}
    (row,) = job.results([line], model=FakeModel({"x": answer}))
    assert (row["text"], row["finish_reason"], row["usage"]["completion_tokens"]) == (text, "stop", tokens)


def test_a_protected_stop_string_beside_a_longer_one(job):
    """The text kept for a longer stop string still contains the protected shorter one."""
    line = {"prompt": "x", "min_tokens": 3, "stop": ["a", "abcdef"]}
    (row,) = job.results([line], model=FakeModel({"x": b"xxabbbbb"}))
    assert (row["text"], row["usage"]["completion_tokens"]) == ("xxabbbbb", 9)


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.thorough)])
def test_watching_agrees_with_cutting_behind_a_least_length(job, tokenizer, count):
    """For random bytes the completion must end with the first token that makes the text need cutting."""
    rng = random.Random(0)
    pieces = [b"a", b"b", b"c", "é".encode(), b"\xc3", b"\xff"]
    for _ in range(count):
        answer, minimum = b"".join(rng.choices(pieces, k=12)), rng.randint(0, 8)
        stop = rng.choice([["ab"], ["ab", "cé"], ["a"], ["abc", "b"], ["ca", "éa"]])
        line = {"prompt": "x", "stop": stop, "min_tokens": minimum, "max_tokens": len(answer)}
        protected = len(tokenizer.decode(answer[:minimum]))
        for end in range(minimum + 1, len(answer) + 1):
            whole = tokenizer.decode(answer[:end])
            text, _ = cut_at_stop(whole, stop, protected)
            if text != whole:
                break
        (row,) = job.results([line], model=FakeModel({"x": answer}))
        assert (row["text"], row["usage"]["completion_tokens"]) == (text, end), (answer, stop, minimum)


def test_end_tokens_and_a_least_length(job):
    """No end token, the model's or the row's, may end any choice too early."""
    lines = [
        {"prompt": "x", "min_tokens": 5, "n": 2, "max_tokens": 8},
        {"prompt": "x", "min_tokens": 2, "max_tokens": 8},
        {"prompt": "x", "min_tokens": 2, "stop_token_ids": [ord("b")], "max_tokens": 8},
        {"prompt": "x", "min_tokens": 8, "max_tokens": 8},
    ]
    first, *rows = job.results(lines, model=FakeModel({"x": b"abc"}))
    found = [(choice["text"], choice["finish_reason"]) for choice in (*first["choices"], *rows)]
    assert found == [*[("abc++", "stop")] * 2, ("abc", "stop"), ("a+c", "stop"), ("abc+++++", "length")]
