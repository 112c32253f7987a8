"""Grammars with several kinds of tokenizers."""

import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.grammar.source import compile_matcher, load_tokens, serialize
from rosebatch.text.tokenizer import Tokenizer
from rosebatch.text.tool_calls.call import Offered
from tests.helpers.byte_tokenizer import EOS, byte_backend
from tests.helpers.grammars import EOS_IDS, VOCAB_SIZE
from tests.job.tool_templates import chat_backend

SHORT_WORDS = [b'": ', b'", "', b'{"', b"]}", b"  ", b"\n\n", b"abc", b'"}', b"12", b" ", b" 1", b", "]


@pytest.fixture(scope="module")
def byte_grammars():
    """Grammars for tokens of one byte."""
    return Grammars(Tokenizer(byte_backend()), VOCAB_SIZE, EOS_IDS)


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE of 600 tokens, trained on JSON: its tokens cross the borders of the grammar."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rng = random.Random(0)
    people = [{"name": rng.choice(["Ada", "Zoë"]), "kind": "foe", "scores": [[i, -i / 3]]} for i in range(200)]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<eos>"])
    backend.train_from_iterator([json.dumps(p, indent=rng.choice([None, 2])) for p in people], trainer)
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def spaced():
    """A tokenizer like that of Llama 2: a mark for the space, and byte tokens for text without a token."""
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for word in ["▁", "a", "b", '"', "{", "}", ":", ",", "▁a", '▁"', '":', "▁▁", "1", "▁1"]:
        vocab[word] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(backend)


@pytest.fixture(scope="module", params=["bytes", "words", "trained", "spaced"])
def any_grammars(request):
    """Several kinds of tokenizers, each with its end token."""
    if request.param in ("trained", "spaced"):
        tokenizer = request.getfixturevalue(request.param)
        size, eos = tokenizer.backend.get_vocab_size(), tokenizer.backend.token_to_id("<eos>")
        eos = tokenizer.backend.token_to_id("</s>") if eos is None else eos
    else:
        tokenizer = Tokenizer(byte_backend(*(SHORT_WORDS if request.param == "words" else ())))
        size, eos = VOCAB_SIZE, EOS
    return Grammars(tokenizer, size, [eos]), tokenizer, size, eos


@pytest.fixture(scope="module")
def accepts():
    """Whether an answer may be written under the grammar of forced calls."""
    backend = chat_backend()
    tokens = load_tokens(backend.to_str(), [256])
    forms = Tokenizer(backend).choose_parsers(calls="qwen3_coder")

    def check(schema, text, *, must_call=True):
        spec = forms.grammar([Offered("add", schema)], parallel=True, must_call=must_call)
        matcher = compile_matcher(tokens, serialize(spec))
        ids = backend.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check
