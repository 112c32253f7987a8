"""Sentencepiece's vocabularies in .gguf files: merges by score, words that begin with a mark, and single bytes."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from rosebatch.model.family import list_of
from rosebatch.model.gguf.metadata import Metadata, TokenType

# Sentencepiece's space.
_MARK = "\u2581"


def spelled(tokens: list[str], pieces: str) -> list[str]:
    """The tokens as sentencepiece has them. Gemma's files hold those of spaces alone as spaces."""
    if pieces != "gemma":
        return tokens
    return [_MARK * len(token) if token and not token.strip(" ") else token for token in tokens]


def sentencepiece(metadata: Metadata, tokens: list[str], pieces: str) -> Tokenizer:
    """Byte-pair merges of a sentencepiece vocabulary, with the splits of the model's own tokenizer.

    Llama's puts a space before a text; Phi-3's does so before a first space, too, and its marks take the space behind
    them; Gemma's puts none.

    Args:
        metadata: of the file.
        tokens: see ``spelled``.
        pieces: whose rules these are, see ``GGUF``.

    Raises:
        UserError: the file has neither merges nor scores.
    """
    vocab = {token: i for i, token in enumerate(tokens)}
    given = metadata.get("tokenizer.ggml.merges", kind=list[str])
    if given is not None:
        merges = [tuple(merge.split(" ", 1)) for merge in given]
    elif pieces == "gemma":
        # Converters lose the scores of tokens that users defined, which are the best. The others' fall by number.
        types = metadata.get("tokenizer.ggml.token_type", [0] * len(tokens), list_of(int, len(tokens)))
        defined = TokenType.CONTROL, TokenType.USER_DEFINED
        merges = _merges(tokens, vocab, [0.0 if kind in defined else -float(i) for i, kind in enumerate(types)])
    else:
        merges = _merges(tokens, vocab, metadata.need("tokenizer.ggml.scores", list_of(float, len(tokens))))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    spaced = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if pieces == "gemma":
        backend.normalizer = normalizers.Replace(" ", _MARK)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        spaced = False
    elif pieces == "phi" and spaced:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), normalizers.Replace(" ", _MARK)])
    else:
        scheme = "first" if spaced else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_MARK, prepend_scheme=scheme, split=False)
    text: list[Any] = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*text, decoders.Strip(content=" ", left=1)] if spaced else text)
    return backend


def _merges(tokens: list[str], vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, those of the best first."""
    found = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        found += [(score, *pair) for pair in sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    # Equal ones stay in order.
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [(left, right) for _, left, right in found]
