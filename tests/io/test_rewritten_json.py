"""JSON that is written a piece at a time has the bytes of JSON that is decoded and encoded as a whole."""

import json
import random
import tracemalloc

import msgspec
import pytest

from rosebatch.io import rewritten_json
from rosebatch.io.json_nesting import depth
from rosebatch.io.rewritten_json import rewritten


def whole(text):
    return msgspec.json.encode(msgspec.json.decode(text))


def value(rng, levels):
    """Anything that JSON has, with marks in its texts."""
    if levels and rng.random() < 0.7:
        inner = [value(rng, levels - 1) for _ in range(rng.randrange(7))]
        return (
            inner
            if rng.random() < 0.6
            else {rng.choice(["a", ",", '"[', "é\\"]) + str(n): v for n, v in enumerate(inner)}
        )
    texts = ["", "x" * 9, '",[', "\\", '\\"', "é]", "\u2028", "\n{"]
    return rng.choice([*texts, 0, -1.5, 1e-7, 2**70, True, None])


@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_those_of_the_whole(monkeypatch, seed):
    """A piece may end between any two items, and a large item may be of any kind."""
    rng = random.Random(seed)
    monkeypatch.setattr(rewritten_json, "_PIECE", rng.choice([1, 7, 40]))
    options = {"indent": rng.choice([None, 1]), "ensure_ascii": rng.random() < 0.5}
    text = json.dumps([value(rng, 5) for _ in range(8)], **options).encode()
    assert rewritten(text) == whole(text)
    assert rewritten(b'{"a": %s, "b": 1, "a": %s}' % (text, text)) == whole(b'{"a": %s, "b": 1}' % text)


@pytest.mark.parametrize(
    "text", [b"[]", b"[ ]", b"{ }", b"[1.50, 1E5, -0,\t0.1234567890123456789]", b'[[ "\\u00e9" ] ,[ ]]']
)
def test_spellings(monkeypatch, text):
    """Numbers and texts are written as those of small rows."""
    monkeypatch.setattr(rewritten_json, "_PIECE", 1)
    assert rewritten(text) == whole(text)


@pytest.mark.parametrize("text", [b'["a", "\xff"]', b"[1, 1e999]", b'["\\ud800"]', b"[1, nul]"])
def test_what_cannot_be_decoded(monkeypatch, text):
    """It would be in the output as it is, where no reader takes it."""
    monkeypatch.setattr(rewritten_json, "_PIECE", 1)
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        rewritten(text)


def test_the_memory_of_many_numbers():
    """A list of 4.9 million numbers took 190 MiB at once, beside the rows that wait."""
    text = b"[%s]" % b",".join([b"0.125"] * 300_000)
    tracemalloc.start()
    try:
        rewritten(text)
        pieces = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        whole(text)
        at_once = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 2.4 MB of places, the text in pieces and as a whole; or 24 bytes and a pointer each.
    assert pieces < at_once * 0.8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1", 0),
        (b'["[[", {"a": [1]}]', 3),
        (b'"\\"[["', 0),
        (b"[" * 9000 + b"]" * 9000, 9000),
        (b"[%s[" % (b'"]",' * 5000), 2),
    ],
)
def test_depth(text, expected):
    """Lists in a text are none, also where a block of bytes ends in it."""
    assert depth(text) == expected
