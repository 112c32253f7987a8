"""Tokens of a text that must come, where a rest of the text has other tokens than it has behind the others."""

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.grammars import allowed, spec


def test_each_token_is_the_only_one_that_its_mask_allows():
    """``'s`` is cut off in front of letters, but its ``s`` alone belongs to them: a rest is encoded as ``sa``."""
    pieces = ["it", "sa", "bc"]
    vocabulary = {"<eos>": 0} | {piece: 1 + i for i, piece in enumerate([*"itsabc'", *pieces])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(piece) for piece in pieces]))
    split = pre_tokenizers.Split(Regex(r"'s|\p{L}+|."), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    assert backend.encode("it'sabc").tokens == ["it", "'", "s", "a", "bc"]
    grammar = Grammars(Tokenizer(backend), len(vocabulary), [0]).compile(spec("regex", "it'sabc"))
    constraint, follower, ended = grammar.start(), grammar.start(), False
    named, followed = [], []
    while not ended:
        (token,) = allowed(constraint, len(vocabulary))
        named.append(backend.id_to_token(token))
        ended = constraint.feed(token)
    ended = False
    while not ended:
        (token,) = allowed(follower, len(vocabulary))
        run, ended = follower.follow(token)
        followed += map(backend.id_to_token, run)
    assert named == followed == ["it", "'", "s", "a", "bc"]
