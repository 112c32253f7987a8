"""A tokenizer whose ids do not follow each other."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.text.grammar import Grammars
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
