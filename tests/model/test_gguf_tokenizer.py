"""The tokenizer of a GGUF file: how it splits text, what it merges, and what it refuses."""

import json
import unicodedata

import gguf
import pytest
import torch
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, CohereTokenizer, GPTNeoXTokenizer, Qwen2Tokenizer

from rosebatch.core.errors import UserError
from rosebatch.model.gguf.cache import converted_folder
from rosebatch.model.gguf.metadata import Metadata, Reader
from rosebatch.model.gguf.tokenizer import read_tokenizer
from rosebatch.text.tokenizer import Tokenizer
from tests.model import gguf_files
from tests.model import test_gguf_families as families
from tests.model.gguf_files import BOS, END

pytestmark = pytest.mark.usefixtures("cache")

DIGITS = ("1 2", "12 3", "123 4", "Ġ 1", "Ġ1 2", "a b", "Ġ ab", "' M", "' m")
SPLITS = {
    "gpt-2": ["abc", "Ġ1234", "Ġ", "ĠI", "'", "M", "Ġit", "'s", "!!", "Ċ", "Ċ", "x"],
    "smollm": ["abc", "Ġ", "1", "2", "3", "4", "Ġ", "ĠI", "'", "M", "Ġit", "'s", "!!", "Ċ", "Ċ", "x"],
    "llama-bpe": ["abc", "Ġ", "123", "4", "Ġ", "ĠI", "'M", "Ġit", "'s", "!!ĊĊ", "x"],
    "qwen2": ["abc", "Ġ", "1", "2", "3", "4", "Ġ", "ĠI", "'M", "Ġit", "'s", "!!ĊĊ", "x"],
    "gpt-4o": ["abc", "Ġ", "123", "4", "Ġ", "ĠI'M", "Ġit's", "!!ĊĊ", "x"],
    "deepseek-llm": ["abc", "Ġ", *"1234", "Ġ", "ĠI", "'", "M", "Ġit", "'", "s", "!!", "Ċ", "Ċ", "x"],
}
SPLITS |= {"qwen35": SPLITS["qwen2"], "deepseek-v3": SPLITS["llama-bpe"], "kimi-k2": SPLITS["gpt-4o"]}
TEXTS = [
    "abc 1234  I'M it's!!\n\nx",
    "",
    " ",
    "   three spaces, tab\tand\r\nline ends \n\n ",
    "naïve café, Ünïcödé, 東京 2024年, \U0001f600\U0001f1e9\U0001f1ea e\u0301",
    "x = f(a[0], **{'k': 1e-5}) # ½ ² Ⅷ",
    "\x00\x7f\ufffd\u2028",
]


def load_tokenizer(path):
    folder = converted_folder(path, torch.float32)
    return Tokenizer.load(folder), folder


@pytest.mark.parametrize("pre", SPLITS)
def test_splits(write_gguf, toy, pre):
    """Before merging, smollm and qwen2 split numbers by digit, llama-bpe by threes, gpt-2 not at all."""
    _, folder = load_tokenizer(write_gguf("llama", toy, pre=pre, merges=DIGITS))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(TEXTS[0])] == SPLITS[pre]


def test_marks_are_parts_of_words_in_qwen3_5(write_gguf, toy):
    """Qwen2 splits words of Hindi at vowel signs."""
    _, folder = load_tokenizer(write_gguf("llama", toy, pre="qwen35"))
    text, backend = "हिन्दी 12", Backend.from_file(str(folder / "tokenizer.json"))
    pieces = [text[first:end] for _, (first, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["हिन्दी", " ", "1", "2"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-v3", ["Wörld", "'s", " ", "時計ほげ", "ABC", "!?/", "foo"]),
        ("deepseek-llm", ["W", "ö", "rld", "'", "s", " ", "時計ほげ", "ABC", "!?/", "foo"]),
        ("kimi-k2", ["Wörld's", " ", "時計", "ほげ", "ABC", "!?/", "foo"]),
        ("gpt-4o", ["Wörld's", " 時計ほげ", "ABC", "!?/", "foo"]),
    ],
)
def test_splits_of_languages(write_gguf, toy, pre, pieces):
    """DeepSeek's and Kimi's have Chinese apart from other words."""
    _, folder = load_tokenizer(write_gguf("llama", toy, pre=pre))
    text, backend = "Wörld's 時計ほげABC!?/foo", Backend.from_file(str(folder / "tokenizer.json"))
    found = [text[first:end] for _, (first, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["Ġ", "1234"]),
        ("smollm", ["Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["Ġ", "123", "4"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4"]),
        ("default", ["Ġ", "1234"]),
    ],
)
def test_merges_stay_inside_the_splits(write_gguf, toy, pre, tokens):
    """Merges go by rank and never cross a split."""
    tokenizer, _ = load_tokenizer(
        write_gguf("llama", toy, pre=pre, merges=("1 2", "12 3", "Ġ 12", "123 4"), add_bos=False)
    )
    (ids,) = tokenizer.encode([" 1234"])
    assert [tokenizer.backend.id_to_token(i) for i in ids] == tokens


@pytest.mark.parametrize("pre", SPLITS)
def test_round_trip(write_gguf, toy, pre):
    """Any text survives, byte by byte if necessary; transformers reads the same ids from the folder."""
    tokenizer, folder = load_tokenizer(write_gguf("llama", toy, pre=pre, merges=DIGITS, add_bos=False))
    encoded = tokenizer.encode(TEXTS)
    # Qwen's own tokenizer composes characters.
    expected = [unicodedata.normalize("NFC", text) if pre.startswith("qwen") else text for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in encoded] == expected
    reference = AutoTokenizer.from_pretrained(folder)
    assert [reference(text)["input_ids"] for text in TEXTS] == encoded
    assert [reference.decode(ids, clean_up_tokenization_spaces=False) for ids in encoded] == expected


@pytest.mark.thorough
@pytest.mark.parametrize("pre", ["gpt-4o", "llama-bpe", "dbrx", "qwen2", "olmo", "command-r"])
def test_ids_are_those_of_the_models_own_tokenizer(write_gguf, toy, pre):
    """By transformers' class of the model, or by its reader of such files."""
    path = write_gguf("llama", toy, pre=pre, merges=DIGITS, add_bos=False)
    tokenizer, folder = load_tokenizer(path)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    own = {"olmo": GPTNeoXTokenizer, "command-r": CohereTokenizer, "qwen2": Qwen2Tokenizer}.get(pre)
    if own is None:
        reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    else:
        reference = own(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    assert [reference(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == tokenizer.encode(TEXTS)


SAME = {
    "lfm2": "llama-bpe",
    "starcoder": "smollm",
    "refact": "smollm",
    "stablelm2": "qwen2",
    "glm4": "llama-bpe",
    "chatglm-bpe": "glm4",
}


@pytest.mark.thorough
@pytest.mark.parametrize("pre", SAME)
def test_kinds_with_the_same_splits(write_gguf, toy, pre):
    """llama.cpp has the same patterns for both."""
    paths = [write_gguf("llama", toy, pre=each, add_bos=False, file=f"{each}.gguf") for each in (pre, SAME[pre])]
    first, second = (json.loads(load_tokenizer(path)[0].backend.to_str()) for path in paths)
    assert (first["pre_tokenizer"], first["normalizer"]) == (second["pre_tokenizer"], second["normalizer"])


def test_words_before_a_prompt_of_glm(write_gguf, toy):
    """The model's own tokenizer puts them there, and no key of the file says so; a chat's are the template's."""
    words = ["[gMASK]", "<sop>"]
    tokenizer, _ = load_tokenizer(
        write_gguf("llama", toy, pre="glm4", words=words, template="{{ messages[0].content }}")
    )
    first, second, ab = map(tokenizer.backend.token_to_id, [*words, "ab"])
    assert tokenizer.encode(["ab"]) == [[first, second, ab]]
    assert tokenizer.encode_chats([[{"role": "user", "content": "ab"}]]) == [[ab]]


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["<|return|>", "<|call|>", "<|end|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>"], ["<|end|>"]),
        (["<eos>", "</s>"], ["<eos>"]),
    ],
)
def test_tokens_that_end_in_other_models(write_gguf, toy, words, ends):
    """gpt-oss stopped behind its thoughts, and Gemma at a tag of HTML."""
    tokenizer, folder = load_tokenizer(write_gguf("llama", toy, words=words))
    found = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert found == [END, *map(tokenizer.backend.token_to_id, ends)]


@pytest.mark.parametrize("pre", ["glm4", "chatglm-bpe", "qwen2"])
def test_ends_of_glm(write_gguf, toy, pre):
    """A call of a tool went on behind <|observation|>: transformers' GLM ends there and at <|user|>, no key says so.

    Other models may have such words.
    """
    words = ["<|user|>", "<|observation|>", "<|assistant|>"]
    tokenizer, folder = load_tokenizer(write_gguf("llama", toy, pre=pre, words=words))
    found = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert found == [END, *map(tokenizer.backend.token_to_id, words[:2] if pre != "qwen2" else [])]


def test_the_ends_of_ollama(write_gguf, toy, monkeypatch):
    """Its files have a list of all of them, under a key of its own: they were refused for it."""
    add = gguf.GGUFWriter.add_eos_token_id

    def both(self, token_id):
        add(self, token_id)
        self.add_array("tokenizer.ggml.eos_token_ids", [token_id, 7])

    monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", both)
    _, folder = load_tokenizer(write_gguf("llama", toy))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [END, 7]


@pytest.mark.parametrize("pre", SPLITS)
def test_special_tokens_are_not_split(write_gguf, toy, pre):
    """Each is one id anywhere; control tokens are not part of the text, user-defined ones are."""
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, pre=pre, add_bos=False))
    (ids,) = tokenizer.encode(["<|begin|>ab<tool> <|stop|><|stop|>"])
    token = tokenizer.backend.token_to_id
    assert (ids, tokenizer.decode(ids)) == ([BOS, token("ab"), 302, token("Ġ"), END, END], "ab<tool> ")


@pytest.mark.parametrize("kind", gguf.TokenType)
def test_end_tokens_of_any_type(write_gguf, toy, kind):
    """Some files call them words, user-defined or unused: they became characters, or stayed in the text."""
    types = {"<|im_end|>": kind, "<mine>": kind}
    path = write_gguf("llama", toy, words=types, types=types, eot_word="<mine>", add_bos=False)
    tokenizer, folder = load_tokenizer(path)
    ends = [tokenizer.backend.token_to_id(token) for token in ("<mine>", "<|im_end|>")]
    assert tokenizer.encode(["<mine>", "<|im_end|>"]) == [[each] for each in ends]
    assert tokenizer.decode(ends) == ""
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [END, *ends]


@pytest.mark.parametrize("kind", [gguf.TokenType.NORMAL, gguf.TokenType.UNUSED])
def test_marks_of_the_template(write_gguf, toy, kind):
    """Marks that a file calls words or unused became characters in every chat. Other words stay what they are."""
    types = {"<|im_start|>": kind, "<|other|>": kind}
    template = "<|im_start|>{{ messages[0].content }}"
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, words=types, types=types, template=template, add_bos=False))
    mark = tokenizer.backend.token_to_id("<|im_start|>")
    assert tokenizer.encode_chats([[{"role": "user", "content": "<|other|>"}]]) == [
        [mark, *tokenizer.encode(["<|other|>"])[0]]
    ]
    assert len(tokenizer.encode(["<|other|>"])[0]) > 1


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|im_end|>", "<|end_of_text|>", "</s>", "<end_of_turn>", "<|eom_id|>"])
def test_chats_end_without_a_key_for_it(write_gguf, toy, end):
    """llama.cpp knows these by their text: chats of files without an eot key never stopped."""
    tokenizer, folder = load_tokenizer(write_gguf("llama", toy, words=[end]))
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [END, tokenizer.backend.token_to_id(end)]


def test_templates_with_a_name(write_gguf, toy):
    """The one for tools was dropped."""
    templates = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T{{ tools[0].function.name }}"},
    ]
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, template=templates))
    chat, tools = [{"role": "user", "content": ""}], [{"type": "function", "function": {"name": "add"}}]
    assert tokenizer.render([chat, chat], [{}, {"tools": tools}]) == ["D", "Tadd"]


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos(write_gguf, toy, add_bos):
    """The file decides: a prompt gets a BOS, a chat gets only its template's."""
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, add_bos=add_bos, template=template))
    ab = tokenizer.backend.token_to_id("ab")
    assert tokenizer.encode(["ab"]) == [[BOS, ab] if add_bos else [ab]]
    assert tokenizer.encode_chats([[{"role": "user", "content": "ab"}]]) == [[BOS, ab, END]]


@pytest.mark.parametrize("add_bos", [True, False])
def test_eos(write_gguf, toy, add_bos):
    """Embedding models are trained with an EOS behind a prompt: the file's flag was ignored."""
    template = "{{ messages[0].content }}"
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, add_bos=add_bos, add_eos=True, template=template))
    ab = tokenizer.backend.token_to_id("ab")
    assert tokenizer.encode(["ab"]) == [[*([BOS] if add_bos else []), ab, END]]
    assert tokenizer.encode_chats([[{"role": "user", "content": "ab"}]]) == [[ab]]


def test_bos_of_llama_3(write_gguf, toy):
    """Most files say nothing, and llama.cpp then adds a BOS for this pre-tokenizer."""
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, pre="llama-bpe"))
    assert tokenizer.encode(["a"]) == [[BOS, tokenizer.backend.token_to_id("a")]]


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("gpt-2", False), ("qwen2", False)])
def test_words_that_merges_do_not_reach(write_gguf, toy, pre, whole):
    """Llama 3 takes a whole word of its vocabulary before any merge (``ignore_merges``), the others do not."""
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy, pre=pre, words=("xyz",), add_bos=False))
    (ids,) = tokenizer.encode(["xyz"])
    assert [tokenizer.backend.id_to_token(i) for i in ids] == (["xyz"] if whole else ["x", "y", "z"])


@pytest.mark.parametrize(("more", "named"), [({"pre": "falcon"}, "'falcon'"), ({"kind": "bert"}, "'bert'")])
def test_an_unknown_tokenizer(write_gguf, toy, more, named):
    """Wrong splits make answers worse without a visible error, so an unknown kind is refused."""
    with pytest.raises(UserError, match=named):
        converted_folder(write_gguf("llama", toy, **more), torch.float32)


def test_a_file_without_a_tokenizer(write_gguf, toy, monkeypatch):
    """Some files have none: the user gets one line."""
    monkeypatch.setattr(gguf_files, "add_tokenizer", lambda writer, **more: None)
    with pytest.raises(UserError):
        converted_folder(write_gguf("llama", toy), torch.float32)


@pytest.mark.parametrize("missing", ["add_token_list", "add_token_merges"])
def test_half_a_tokenizer(write_gguf, toy, monkeypatch, missing):
    """One line, not a TypeError about None."""
    monkeypatch.setattr(gguf.GGUFWriter, missing, lambda self, values: None)
    with pytest.raises(UserError, match=r"model\.gguf"):
        converted_folder(write_gguf("llama", toy), torch.float32)


@pytest.mark.parametrize("broken", ["text", "id"])
def test_broken_metadata(write_gguf, toy, monkeypatch, broken):
    """A few wrong bytes give a token that is not UTF-8, or an end token beyond the vocabulary: one line each."""
    if broken == "id":
        add_eos = gguf.GGUFWriter.add_eos_token_id
        monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", lambda self, token_id: add_eos(self, 10**6))
    path = write_gguf("llama", toy)
    if broken == "text":
        content = path.read_bytes()
        assert content.count(b"[PAD299]") == 1
        path.write_bytes(content.replace(b"[PAD299]", b"[PAD\xff99]"))
    with pytest.raises(UserError, match=r"model\.gguf"):
        converted_folder(path, torch.float32)


def test_a_sentencepiece_tokenizer(write_gguf, toy, monkeypatch):
    """Llama 2's kind, converted by transformers: words begin with a space, unknown characters become bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * 5

    def add_sentencepiece(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(5)])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")

    monkeypatch.setattr(gguf_files, "add_tokenizer", add_sentencepiece)
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy))
    ids = tokenizer.encode(["ab", "ab é", "a  b"])
    assert ids[0] == [1, tokens.index("▁ab")]
    assert ids[1] == [1, tokens.index("▁ab"), tokens.index("▁"), 3 + 0xC3, 3 + 0xA9]
    assert [tokenizer.decode(i) for i in ids] == [" ab", " ab é", " a  b"]
    (chat,) = tokenizer.encode_chats([[{"role": "user", "content": "ab"}]])
    assert (chat[0], chat[-1]) == (1, 2)


@pytest.mark.parametrize("add_bos", [None, False])
@pytest.mark.parametrize("spaced", [None, False])
def test_flags_of_a_sentencepiece_tokenizer(write_gguf, toy, monkeypatch, add_bos, spaced):
    """A file that wants no space before a text, no BOS, or an EOS, was read as if it said nothing."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]

    def add_sentencepiece(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 5])
        writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(5)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_eos_token(True)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        if spaced is not None:
            writer.add_add_space_prefix(spaced)

    monkeypatch.setattr(gguf_files, "add_tokenizer", add_sentencepiece)
    tokenizer, _ = load_tokenizer(write_gguf("llama", toy))
    ab = tokens.index("▁ab" if spaced is None else "ab")
    assert tokenizer.encode(["ab"]) == [[*([1] if add_bos is None else []), ab, 2]]
    assert tokenizer.decode([ab]) == (" ab" if spaced is None else "ab")


SPACED = ["▁", "▁▁", "a", "b", "ab", "▁ab", "▁a", "c", "bc", "abc", "▁c"]


def add_words(writer, *, spaces=None, more=(), **flags):
    """A sentencepiece vocabulary. Gemma's files hold tokens of spaces as spaces, which users defined."""
    words = [spaces if spaces and word == "▁▁" else word for word in SPACED]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *more]
    kinds = [gguf.TokenType.USER_DEFINED if word == spaces else gguf.TokenType.NORMAL for word in words]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    control = gguf.TokenType.CONTROL
    writer.add_token_types([2, control, control, *[gguf.TokenType.BYTE] * 256, *kinds, *[control] * len(more)])
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(words) + len(more))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3"])
def test_ids_of_sentencepiece_are_transformers(write_gguf, monkeypatch, architecture):
    """Each family puts spaces before words in its own way, and Gemma none; its files spell tokens of spaces anew."""
    flags = {"spaces": "  ", "add_space_prefix": False} if architecture == "gemma3" else {}
    monkeypatch.setattr(gguf_files, "add_tokenizer", lambda writer: add_words(writer, **flags))
    models = {"llama": "llama", "phi3": "phi3-longrope", "gemma3": "gemma3"}
    path = write_gguf(architecture, families.model_of(models[architecture]) if architecture != "llama" else None)
    texts = [*TEXTS, "ab", " ab", "  ab  abc", "a bc\n\nab", "abcabc"]
    pieces = {"phi3": "phi", "gemma3": "gemma"}.get(architecture, "llama")
    tokens = read_tokenizer(Metadata(path, Reader(path)), path, pieces).backend
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert [tokens.encode(text).ids for text in texts] == [reference(text)["input_ids"] for text in texts]


def test_marks_of_phi_3_take_the_space_behind_them(write_gguf, monkeypatch):
    """As in the model's own tokenizer; the file does not say so."""
    monkeypatch.setattr(
        gguf_files, "add_tokenizer", lambda writer: add_words(writer, more=["<|user|>", "<|endoftext|>"])
    )
    path = write_gguf(architecture="phi3")
    backend = read_tokenizer(Metadata(path, Reader(path)), path, "phi").backend
    user, end, ab = map(backend.token_to_id, ["<|user|>", "<|endoftext|>", "▁ab"])
    assert backend.encode("<|user|>\n ab", add_special_tokens=False).ids == [user, ab]
    assert backend.encode("<|endoftext|>\nab", add_special_tokens=False).ids[:2] != [end, ab]


def test_ends_of_phi_3(write_gguf, monkeypatch):
    """Its generation_config.json has <|assistant|> too, and no key of the file has."""
    words = ["<|user|>", "<|assistant|>", "<|end|>"]
    monkeypatch.setattr(gguf_files, "add_tokenizer", lambda writer: add_words(writer, more=words))
    path = write_gguf(architecture="phi3")
    found = read_tokenizer(Metadata(path, Reader(path)), path, "phi")
    assert set(map(found.backend.token_to_id, words[1:])) < set(found.end_ids)
    assert found.backend.token_to_id("<|user|>") not in found.end_ids
