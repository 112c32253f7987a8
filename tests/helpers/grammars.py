"""Grammars in tests: the tokens that they allow, and answers of randomly chosen ones."""

import json
import random

import numpy as np

from rosebatch.core.structured_outputs import GrammarSpec
from tests.helpers.byte_tokenizer import EOS

# The width of a model with padded logits. 269 is not a multiple of 32, and one end token is unknown to the tokenizer.
VOCAB_SIZE, EOS_IDS = 269, (EOS, 266)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["friend", "foe", 'a "friend"', None, 3]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "scores": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}, "minItems": 1},
        "boss": {"$ref": "#/$defs/person"},
    },
    "required": ["name", "kind", "scores"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"name": {"const": "Ada"}}, "required": ["name"]}},
}


def spec(kind, source=""):
    return GrammarSpec(kind, source if isinstance(source, str) else json.dumps(source))


def tokens_of(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def allowed(constraint, vocab_size=VOCAB_SIZE):
    """The tokens that may come next. The mask starts with all bits set, so every bit must be written."""
    mask = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    constraint.fill(mask)
    return tokens_of(mask)


def feed_text(constraint, text):
    """Feeds text byte by byte and returns what ``feed`` says of the last byte; it must not end before."""
    *before, last = [constraint.feed(byte) for byte in text.encode()]
    assert not any(before)
    return last


def walk(grammar, tokenizer, size, eos, seed, prefer=(), limit=400):
    """The text of randomly chosen allowed tokens, and whether it ended. After 40 tokens it prefers those that close."""
    rng, constraint, chosen = random.Random(seed), grammar.start(), []
    while len(chosen) < limit:
        ids = allowed(constraint, size)
        assert ids
        texts = {i: tokenizer.decode([i]) for i in ids}
        picks = [i for i in ids if texts[i] in prefer]
        if not picks and len(chosen) > 40:
            picks = [i for i in ids if i == eos or texts[i].strip() in ('"', "]", "}", "]}", '"}')]
        token = rng.choice(picks or ids)
        ended = constraint.feed(token)
        chosen += [token] * (token != eos)
        if ended:
            assert allowed(constraint, size) == [eos]
            break
    assert constraint.error is None
    return tokenizer.decode(chosen), len(chosen) < limit
