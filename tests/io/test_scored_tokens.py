"""Lists of tokens with log-probabilities are put together of bytes; they are those of an encoder."""

import math
import random

import msgspec
import pytest

from rosebatch.core.request import Logprobs, PackedLogprobs
from rosebatch.io.openai.endpoint import scored
from rosebatch.io.results import scored_token
from rosebatch.io.scored_tokens import ScoredTokens, TokenTable

# Halves of characters, what JSON escapes, a special token, and a text that looks like the place of the number.
RAW = [
    b"a",
    b" b",
    b"\xc3",
    b"\xa9\xff",
    b"",
    b'"\\\n\x00',
    b"%b%d",
    "<|end|>é".encode(),
    b'"logprob":null',
    b"\xf0\x9f",
]
NUMBERS = [0.0, -0.0, -0.1, -1e-7, -1e-45, -3.4e38, -123456.0, -math.inf, math.nan]


class Bytes:
    """A vocabulary."""

    def token_bytes(self, token_id):
        return RAW[token_id]

    def is_special(self, token_id):
        return token_id == 7


@pytest.mark.parametrize("vocabulary", [Bytes(), None], ids=["texts", "ids"])
@pytest.mark.parametrize("first", [None, 7], ids=["completion", "prompt"])
@pytest.mark.parametrize("likeliest", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("form", [scored, scored_token])
def test_the_bytes_are_the_encoders(vocabulary, first, likeliest, count, form):
    """A separator or a number in the wrong place would be another answer, or a line that nobody can read."""
    draw = random.Random(f"{first} {likeliest} {count}")

    def token():
        return draw.randrange(len(RAW)), draw.choice([*NUMBERS, -draw.expovariate(1)])

    given = [Logprobs(*token(), tuple(token() for _ in range(likeliest)), 1) for _ in range(count)]
    tokens = ScoredTokens(PackedLogprobs(given), TokenTable(vocabulary), first)
    expected = [{**form(each), "top_logprobs": list(map(form, each.top))} for each in tokens]
    assert len(tokens) == len(expected) == count + (first is not None)
    assert bytes(tokens.json(form)) == msgspec.json.encode(expected)


def test_places_of_a_prompt():
    """Its first token has no number, and comes before those that have one."""
    given = PackedLogprobs([Logprobs(1, -0.5), Logprobs(2, -1.5)])
    tokens = ScoredTokens(given, TokenTable(Bytes()), 0)
    assert [each.token_id for each in tokens] == [tokens[at].token_id for at in range(3)] == [0, 1, 2]
    assert [each.logprob for each in tokens[::-1]] == [-1.5, -0.5, None]
    with pytest.raises(IndexError):
        tokens[3]
