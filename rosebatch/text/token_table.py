"""The tokenizer as llguidance reads it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from rosebatch.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """What compiles and follows grammars needs of a tokenizer.

    Attributes:
        tokenizer: its JSON.
        known: ids below this are tokens of both the tokenizer and the model.
        ends: the known end tokens.
    """

    tokenizer: str
    known: int
    ends: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> "TokenTable":
        """The table of a tokenizer, for a model whose logits have this width."""
        vocab = tokenizer.backend.get_vocab()
        known = min(1 + max(vocab.values(), default=-1), vocab_size)
        gaps = sorted(set(range(known)).difference(vocab.values()))
        content = _filled(tokenizer, vocab, gaps) if gaps else tokenizer.backend.to_str()
        return cls(content, known, sorted(i for i in eos_token_ids if i < known))


def _filled(tokenizer: Tokenizer, vocab: dict[str, int], gaps: list[int]) -> str:
    """The tokenizer as JSON, with special tokens in place of gaps, which no text has.

    llguidance takes the number of tokens for the end of their ids.
    """
    fillers = {f"<|no token {i}|>": i for i in gaps}
    content = json.loads(tokenizer.backend.to_str())
    content["model"]["vocab"] = vocab | fillers
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [{"id": i, "content": text, **form} for text, i in fillers.items()]
    return json.dumps(content)
