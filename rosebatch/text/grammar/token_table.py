"""The tokenizer as llguidance reads it."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rosebatch.text.tokenizer import Tokenizer

_SPACE = "\u2581"


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
        fillers = {f"<|no token {i}|>": i for i in sorted(set(range(known)).difference(vocab.values()))}
        content = _exact(tokenizer, fillers)
        if fillers:
            content = _with_vocabulary(content, vocab | fillers)
        return cls(content, known, sorted(i for i in eos_token_ids if i < known))


def _exact(tokenizer: Tokenizer, fillers: dict[str, int]) -> str:
    """The tokenizer as JSON, such that each token has its text in answers, and texts are encoded as they are.

    llguidance encodes text that must come, and follows these tokens byte by byte. It takes the number of tokens for the
    end of their ids, so fillers are special tokens in place of gaps, which no text has.
    """
    # Only the beginning is parsed, for a vocabulary takes long. Within strings, the quotes of a key are escaped.
    first, key, rest = tokenizer.backend.to_str().partition('"normalizer":')
    head = json.loads(f"{first}{key}null}}")
    normalizer, end = json.JSONDecoder().raw_decode(rest)
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    head["added_tokens"] = [
        *_as_answered(tokenizer, head["added_tokens"]),
        *({"id": i, "content": text, **form} for text, i in fillers.items()),
    ]
    head["normalizer"] = _spaces_alone(normalizer)
    return json.dumps(head)[:-1] + rest[end:]


def _as_answered(tokenizer: Tokenizer, added: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Added tokens, each with its text in answers. One that has another text there is left to the model, or to no text.

    Gemma's runs of spaces are also tokens of the model. A normalizer may put a space in front of a token. In prompts,
    some take the spaces around them, too.
    """
    backend = tokenizer.backend
    for token in added:
        token |= {"lstrip": False, "rstrip": False}
        if token["special"] or tokenizer.decode([token["id"]]) == token["content"]:
            yield token
        elif backend.model.token_to_id(backend.id_to_token(token["id"])) != token["id"]:
            yield {**token, "special": True}


def _spaces_alone(normalizer: Any) -> Any:
    """A normalizer that only writes spaces another way, as sentencepiece does."""
    if normalizer is None:
        return None
    if normalizer["type"] == "Sequence":
        return {**normalizer, "normalizers": list(filter(None, map(_spaces_alone, normalizer["normalizers"])))}
    writes_spaces = normalizer.get("content") == _SPACE and normalizer["pattern"] == {"String": " "}
    return normalizer if writes_spaces or normalizer.get("prepend") == _SPACE else None


def _with_vocabulary(tokenizer: str, vocab: dict[str, int]) -> str:
    """A tokenizer with another vocabulary."""
    content = json.loads(tokenizer)
    content["model"]["vocab"] = vocab
    return json.dumps(content)
