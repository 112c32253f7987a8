"""A tokenizer whose ids do not follow each other."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer


def allowed(constraint):
    """The tokens that may come next."""
    mask = np.full(16, -1, np.int32)
    constraint.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize(("first", "end"), [(201, 0), (0, 297)])
def test_a_grammar_of_such_tokens(first, end):
    """Ids were taken to end at the number of tokens: no grammar compiled, or the end token was unknown."""
    vocab = {character: first + i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab={"<eos>": end, **vocab}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    grammars = Grammars(Tokenizer(backend), 500, [end])
    constraint = grammars.compile(GrammarSpec("choice", json.dumps(["zy", "x"]))).start()
    assert sorted(allowed(constraint)) == [vocab["x"], vocab["z"]]
    assert not constraint.feed(vocab["z"])
    assert allowed(constraint) == [vocab["y"]]
    constraint.feed(vocab["y"])
    assert (allowed(constraint), constraint.error) == ([end], None)
    # A token beyond the model's vocabulary, behind another gap.
    backend.add_special_tokens([AddedToken(f"<{i}>") for i in range(3)])
    narrow = Grammars(Tokenizer(backend), 1 + max(end, *vocab.values()), [end])
    assert sorted(allowed(narrow.compile(GrammarSpec("regex", "[xz]")).start())) == [vocab["x"], vocab["z"]]
    # What fills the gaps is no text.
    assert set(allowed(grammars.compile(GrammarSpec("regex", "(?s:.)*")).start())) <= {end, *vocab.values()}


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def bytes_and(others):
    """A tokenizer of bytes, with other names or ids in its own vocabulary."""
    vocab = {character: i for i, character in enumerate(BYTES)}
    backend = Backend(models.BPE(vocab=vocab | others, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.mark.parametrize("gap", [False, True])
def test_own_tokens_that_share_an_id(gap):
    """The names are more than the ids, and llguidance gets some of them, or all."""
    backend = bytes_and({f"name {i}": 255 for i in range(40)} | {"<eos>": 270 if gap else 256})
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    check_two_letters(backend)


@pytest.mark.parametrize("added", [13, 14, 31, 32])
def test_added_tokens_that_share_an_id(added):
    """Behind a gap, an added token gets an id that another has: masks had too few words, which ended the job."""
    backend = bytes_and({BYTES[7]: 270})
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.add_tokens([AddedToken(f"<{i}>") for i in range(added)])
    check_two_letters(backend)


def check_two_letters(backend):
    """One grammar, by the masks of one row and of several."""
    ids = backend.get_vocab(with_added_tokens=True)
    grammar = Grammars(Tokenizer(backend), 500, [ids["<eos>"]]).compile(GrammarSpec("regex", "[xz]"))
    constraint, other = grammar.start(), grammar.start()
    assert allowed(constraint) == [ids["x"], ids["z"]]
    masks = np.full((2, 16), -1, np.int32)
    constraint.fill_all([constraint, other], masks)
    for mask in masks:
        assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [ids["x"], ids["z"]]
    assert constraint.feed(ids["x"]) and constraint.error is None
