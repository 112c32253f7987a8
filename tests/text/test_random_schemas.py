"""Answers to random schemas, of randomly chosen tokens, match them under another validator, to the digit."""

import pytest
from tokenizers import AddedToken

from rosebatch.core.errors import RowError
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import EOS, byte_backend
from tests.helpers.grammars import spec, walk
from tests.helpers.random_schemas import random_schema, require_valid

NUM_TOKENS = EOS + 3


def count_served(seeds, samples):
    """How many of so many schemas are served. Each answer to them must match."""
    backend = byte_backend()
    backend.add_special_tokens([AddedToken("<|im_end|>", normalized=False, special=True)])
    backend.add_tokens([AddedToken("<b>", normalized=False, special=False)])
    tokenizer = Tokenizer(backend)
    grammars, served = Grammars(tokenizer, NUM_TOKENS, [EOS]), 0
    for seed in seeds:
        schema = random_schema(seed)
        try:
            grammar = grammars.compile(spec("json_schema", schema))
        except RowError as error:
            assert error.code in ("invalid_grammar", "grammar_too_large")
            continue
        served += 1
        for sample in range(samples):
            text, ended = walk(grammar, tokenizer, NUM_TOKENS, EOS, sample)
            if ended:
                require_valid(text, schema)
    return served


def test_some_random_schemas():
    """Numbers past 2**53, excluded bounds, keys and constants that spell added tokens, patterns, maps, references."""
    assert count_served(range(30), 5) > 5


@pytest.mark.thorough
def test_many_random_schemas():
    """As above: 150 that are served."""
    assert count_served(range(500), 20) > 150
