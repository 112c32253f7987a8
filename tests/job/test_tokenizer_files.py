"""Tokenizer folders whose files disagree: ids and texts are those of transformers' AutoTokenizer."""

import json
import re
import sys

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from rosebatch.core.errors import UserError
from rosebatch.text.tokenizer import Tokenizer
from rosebatch.text.tool_calls.hermes import Hermes
from tests.helpers.byte_tokenizer import EOS, byte_backend, save_backend
from tests.helpers.marked_spaces import BYTE_PIECES, marked_spaces

TEXTS = ["a<|new|>b", "a<|end|>  b", "x</s>y<eos>", " THE end", "the</s>  the<s> "]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
NAMED = {"bos_token": "<s>", "eos_token": "<eos>", "chat_template": TEMPLATE}
CHAT = [{"role": "user", "content": "a<|end|>b"}]
NEW = EOS + 4


def byte_level():
    """Bytes, two special tokens and one that is none: 257 to 259."""
    backend = byte_backend()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<|end|>", normalized=False)])
    return backend


def beginning():
    """The same, with a BOS in the post-processor."""
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    return backend


def padded():
    """The same as the first, with padding by a token that is none yet."""
    backend = byte_level()
    backend.enable_padding(pad_id=260, pad_token="<|new|>")
    return backend


def metaspace():
    pieces = ["<unk>", "<s>", "</s>", *BYTE_PIECES, "\u2581", *"abehtTHE", "\u2581a"]
    special = [AddedToken(each, normalized=False) for each in pieces[:3]]
    return marked_spaces(pieces, [("\u2581", "a")], special, fuse_unk=True)


def words():
    """Like BERT's: letters are made small."""
    backend = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "the": 1, "end": 2, "a": 3, "b": 4}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def token(content, **flags):
    """A token of ``added_tokens_decoder``."""
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, "special": True, **plain, **flags}


def decoder(*more, **changed):
    """``added_tokens_decoder`` with the tokens of tokenizer.json, with changed flags of <|end|>, and more."""
    kept = {str(number): each.__getstate__() for number, each in byte_level().get_added_tokens_decoder().items()}
    kept["259"] |= changed
    return {"added_tokens_decoder": kept | {str(NEW - 1 + n): each for n, each in enumerate(more, 1)}}


LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
GPT2 = {**NAMED, "tokenizer_class": "GPT2TokenizerFast", "unk_token": "<eos>"}
# The tokenizer, tokenizer_config.json, and other files.
FOLDERS = {
    "nothing-else": (byte_level, None, {}),
    "names": (byte_level, NAMED, {}),
    "bos-of-the-post-processor": (beginning, NAMED, {}),
    "add-bos-false": (beginning, {**NAMED, "add_bos_token": False}, {}),
    "add-bos-true": (byte_level, {**NAMED, "add_bos_token": True, "add_eos_token": True}, {}),
    "decoder-same": (byte_level, {**NAMED, **decoder()}, {}),
    "decoder-new": (byte_level, {**NAMED, **decoder(token("<|new|>"))}, {}),
    "decoder-new-not-special": (byte_level, {**NAMED, **decoder(token("<|new|>", special=False))}, {}),
    "decoder-special": (byte_level, {**NAMED, **decoder(special=True)}, {}),
    "decoder-rstrip": (byte_level, {**NAMED, **decoder(rstrip=True)}, {}),
    "decoder-lstrip": (byte_level, {**NAMED, **decoder(lstrip=True)}, {}),
    "decoder-single-word": (byte_level, {**NAMED, **decoder(single_word=True)}, {}),
    "decoder-before-older-files": (byte_level, {**NAMED, **decoder()}, {"added_tokens.json": {"<|new|>": NEW}}),
    "added-tokens-file": (byte_level, NAMED, {"added_tokens.json": {"<|new|>": NEW}}),
    "added-tokens-file-same": (byte_level, NAMED, {"added_tokens.json": {"<|end|>": 259}}),
    "added-and-named": (
        byte_level,
        {**NAMED, "additional_special_tokens": ["<|new|>"]},
        {"added_tokens.json": {"<|new|>": NEW}},
    ),
    "additional": (byte_level, {**NAMED, "additional_special_tokens": ["<|new|>"]}, {}),
    "additional-known": (byte_level, {**NAMED, "additional_special_tokens": ["</s>"]}, {}),
    "additional-not-special": (byte_level, {**NAMED, "additional_special_tokens": ["<|end|>"]}, {}),
    "additional-object": (
        byte_level,
        {**NAMED, "additional_special_tokens": [{"__type": "AddedToken", **token("<|new|>")}]},
        {},
    ),
    "extra": (byte_level, {**NAMED, "extra_special_tokens": ["<|new|>"]}, {}),
    "extra-named": (byte_level, {**NAMED, "extra_special_tokens": {"image_token": "<|new|>"}}, {}),
    "of-the-model": (byte_level, {**NAMED, "model_specific_special_tokens": {"image_token": "<|new|>"}}, {}),
    "token-of-its-own-name": (byte_level, {**NAMED, "image_token": "<|new|>"}, {}),
    "pad": (byte_level, {**NAMED, "pad_token": "<|new|>"}, {}),
    "padding": (padded, {**NAMED, "chat_template": TEMPLATE + "{{ pad_token }}"}, {}),
    "padding-without-config": (padded, None, {}),
    "padding-beside-a-name": (padded, {**NAMED, "pad_token": "</s>"}, {}),
    "padding-beside-no-name": (padded, {**NAMED, "pad_token": None}, {}),
    "eos-not-special": (byte_level, {**NAMED, "eos_token": "<|end|>"}, {}),
    "eos-a-plain-word": (byte_level, {**NAMED, "eos_token": "b"}, {}),
    "map": (byte_level, {"chat_template": TEMPLATE}, {"special_tokens_map.json": {"bos_token": "<s>"}}),
    "map-over-config": (byte_level, NAMED, {"special_tokens_map.json": {"eos_token": token("<|end|>")}}),
    "map-without-config": (byte_level, None, {"special_tokens_map.json": {"eos_token": "<|new|>"}}),
    "map-beside-decoder": (
        byte_level,
        {**NAMED, **decoder()},
        {"special_tokens_map.json": {"eos_token": "<|end|>", "pad_token": "<|new|>"}},
    ),
    "split-special-tokens": (byte_level, {**NAMED, "split_special_tokens": True}, {}),
    "prefix-space": (byte_level, {**GPT2, "add_prefix_space": True}, {}),
    "no-prefix-space": (byte_level, {**GPT2, "add_prefix_space": False}, {}),
    "prefix-space-of-a-plain-class": (byte_level, {**NAMED, "add_prefix_space": True}, {}),
    "metaspace": (metaspace, LLAMA, {}),
    "metaspace-no-prefix": (metaspace, {**LLAMA, "add_prefix_space": False}, {}),
    "metaspace-pad": (metaspace, {**LLAMA, "pad_token": "<|new|>"}, {}),
    "class-names": (metaspace, {"tokenizer_class": "LlamaTokenizerFast", "chat_template": TEMPLATE}, {}),
    "keeps-case": (words, {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False}, {}),
}


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path):
    """Of a tokenizer."""
    backend, config, files = FOLDERS[request.param]
    backend().save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        files = {**files, "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **config}}
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    return tmp_path


def test_ids_and_texts_are_those_of_transformers(folder):
    """Tokens named only beside tokenizer.json became characters, a BOS was lost, and marks stayed in answers."""
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ids = [theirs(text).input_ids for text in TEXTS]
    assert ours.encode(TEXTS) == ids
    everything = [[token_id] for token_id in range(len(theirs))] + ids
    for skip in (True, False):
        texts = [theirs.decode(each, skip_special_tokens=skip) for each in everything]
        assert [ours.backend.decode(each, skip_special_tokens=skip) for each in everything] == texts
    if theirs.chat_template:
        (chat,) = ours.encode_chats([CHAT], [{"add_generation_prompt": False}])
        assert chat == theirs.apply_chat_template(CHAT, tokenize=True)["input_ids"]


@pytest.mark.parametrize("name", ["Qwen2TokenizerFast", "GPT2TokenizerFast", "LlamaTokenizerFast"])
def test_a_class_that_would_split_otherwise(tmp_path, name):
    """transformers 5 replaces the normalizer and pre-tokenizer by its class's, which the model was not trained with."""
    backend = byte_level()
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    save_backend(backend, tmp_path, **{**GPT2, "tokenizer_class": name})
    assert Tokenizer.load(tmp_path).encode(["12 \ufb01n"]) == [list(b"12 fin")]


def test_templates_with_a_name(tmp_path):
    """A chat with tools takes the one for tools, as in transformers: the other one left the tools out."""
    templates = [{"name": "default", "template": "D{{ messages[0].content }}"}]
    templates += [{"name": "tool_use", "template": "T{{ tools[0].function.name }}{{ messages[0].content }}<tool_call>"}]
    save_backend(byte_level(), tmp_path, chat_template=templates)
    tools = [{"type": "function", "function": {"name": "add"}}]
    ours = Tokenizer.load(tmp_path)
    assert ours.render([CHAT, CHAT], [{}, {"tools": tools}]) == ["Da<|end|>b", "Tadda<|end|>b<tool_call>"]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(CHAT, tools=tools, tokenize=False) == "Tadda<|end|>b<tool_call>"
    assert isinstance(ours.parsers.calls, Hermes)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("F{{ tools[0].function.name }}")
    (tmp_path / "chat_template.jinja").write_text("F")
    plain = [{"role": "user", "content": ""}]
    assert Tokenizer.load(tmp_path).render([plain, plain], [{}, {"tools": tools}]) == ["F", "Fadd"]
    (tmp_path / "mine.jinja").write_text("M{{ tools[0].function.name }}")
    assert Tokenizer.load(tmp_path, tmp_path / "mine.jinja").render([plain], [{"tools": tools}]) == ["Madd"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"259": {"content": "<|end|>", "color": "red"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<|end|>"]}),
        ("tokenizer_config.json", {"additional_special_tokens": 7}),
        ("special_tokens_map.json", {"eos_token": ["<eos>"]}),
        ("special_tokens_map.json", ["<eos>"]),
        ("added_tokens.json", ["<|new|>"]),
    ],
)
def test_broken_files(tmp_path, name, values):
    """One line, not a traceback."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps(values))
    with pytest.raises(UserError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("in_files", [False, True])
def test_templates_without_a_default(tmp_path, in_files):
    """Chats of such a model failed: it had no template. A single one is for all; of several, the user chooses."""

    def load(**templates):
        config = [{"name": name, "template": template} for name, template in templates.items()]
        save_backend(byte_level(), tmp_path, chat_template=[] if in_files else config)
        for name, template in templates.items() if in_files else ():
            (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(template)
        return Tokenizer.load(tmp_path)

    chat = [{"role": "user", "content": "hi"}]
    assert load(tool_use="T{{ messages[0].content }}").render([chat], [{}]) == ["Thi"]
    (error,) = load(tool_use="T{{ messages[0].content }}", rag="R").render([chat], [{}])
    told = "the model has no chat template named default, but rag, tool_use: give --chat-template FILE"
    assert (error.code, error.message) == ("no_chat_template", told)


@pytest.mark.parametrize(
    "name", ["tekken.json", "tokenizer.model.v3", "qwen.tiktoken", "tiktoken.model", "spiece.model"]
)
def test_a_tokenizer_in_another_form(tmp_path, name):
    """Every row of such a folder failed, with the message that the model has no tokenizer."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=rf": its tokenizer is {re.escape(name)} alone, .* give --tokenizer "):
        Tokenizer.load(tmp_path)
    save_backend(byte_level(), tmp_path)
    assert Tokenizer.load(tmp_path) is not None


@pytest.mark.parametrize("config", [{"tokenizer_class": "BertTokenizer", "do_lower_case": False}, None])
def test_a_vocabulary_of_words_alone(tmp_path, config):
    """BERT's older folders have no other file. Their rows failed: the model had no tokenizer."""
    (tmp_path / "vocab.txt").write_text(
        "\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s", "a", "A", ","))
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, texts = AutoTokenizer.from_pretrained(tmp_path), ["thes, A [MASK]", " a  The"]
    assert Tokenizer.load(tmp_path).encode(texts) == [theirs(text).input_ids for text in texts]


def test_a_sentencepiece_model_without_its_package(tmp_path, monkeypatch):
    """transformers told to install tiktoken, which does not read it."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"a model")
    with pytest.raises(UserError, match=f"{tmp_path}: unreadable tokenizer .*: pip install sentencepiece"):
        Tokenizer.load(tmp_path)
