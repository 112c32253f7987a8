"""Tokenizer files of a model folder, encoding in groups, and chat templates."""

import json
import re
import subprocess
import sys

import pytest
from tokenizers import processors

from rosebatch.core.errors import RowError, UserError
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend, save_backend
from tests.helpers.marked_spaces import marked_spaces
from tests.helpers.waiting import PATIENCE_SECONDS

TEMPLATE = "{{ bos_token }}!{{ messages[0].content }}"
CHAT = [{"role": "user", "content": "hi"}]


def code(result):
    assert isinstance(result, RowError)
    return result.code


def test_encode_and_decode(tokenizer):
    """Each text gets its own ids, in order and without padding; special tokens do not decode to text."""
    assert tokenizer.encode(["ab", "", "é"]) == [[97, 98], [], [0xC3, 0xA9]]
    assert tokenizer.decode([104, 105, 256, 33]) == "hi!"
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode([]) == []


def test_padding_and_truncation_of_the_file_are_off(tmp_path):
    """Some tokenizer.json files cut to 512 tokens or pad: prompts would lose their end or gain noise."""
    backend = byte_backend()
    backend.enable_truncation(3)
    backend.enable_padding(pad_id=256, pad_token="<eos>")
    tokenizer = Tokenizer.load(save_backend(backend, tmp_path))
    assert tokenizer.encode(["abcdef", "a"]) == [[97, 98, 99, 100, 101, 102], [97]]


def test_text_that_is_not_unicode(tokenizer):
    """A lone surrogate fails only its own text of the group."""
    first, second, third = tokenizer.encode(["a", "\ud800", "b"])
    assert (first, code(second), third) == ([97], "invalid_prompt", [98])


def test_a_prompt_gets_the_models_bos_and_a_chat_only_the_templates(tmp_path):
    """A double BOS makes answers worse without any visible error."""
    backend = byte_backend()
    backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 256)])
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = Tokenizer.load(save_backend(backend, tmp_path, bos_token="<eos>", chat_template=template))
    assert tokenizer.encode(["hi"]) == [[256, *b"hi"]]
    assert tokenizer.encode_chats([CHAT]) == [[256, *b"hi"]]


@pytest.mark.parametrize(
    ("template", "bos"),
    [
        (TEMPLATE, "<eos>"),
        (TEMPLATE, {"content": "<eos>", "lstrip": False}),
        ([{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": TEMPLATE}], "<eos>"),
    ],
    ids=["plain", "token-object", "named-templates"],
)
def test_chat_template_of_the_config(tmp_path, template, bos):
    """All forms that transformers has written over the years are read."""
    tokenizer = Tokenizer.load(save_backend(byte_backend(), tmp_path, chat_template=template, bos_token=bos))
    assert tokenizer.encode_chats([CHAT]) == [[256, *b"!hi"]]


def test_chat_template_of_its_own_file(tmp_path):
    """The newer form replaces that of the config."""
    folder = save_backend(byte_backend(), tmp_path, chat_template="old")
    (folder / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert Tokenizer.load(folder).encode_chats([CHAT]) == [list(b"new hi")]


def test_the_answer_begins_where_the_template_ends(tokenizer):
    """Without the generation prompt a model writes the user's next line."""
    assert tokenizer.encode_chats([CHAT]) == [[*b"u:hi", 256, *b"a:"]]


def test_a_chat_that_the_template_refuses(tokenizer):
    """Only its own row fails, wherever it is in the group."""
    bad = [{"role": "tool", "content": "x"}]
    first, second, third = tokenizer.encode_chats([bad, CHAT, bad])
    assert (code(first), code(third)) == ("invalid_messages", "invalid_messages")
    assert second == [*b"u:hi", 256, *b"a:"]
    assert "no tools" in first.message


@pytest.mark.parametrize("template", ["{{ messages[0].content + 5 }}", "{% for", "{{ messages[0].x.y }}", "{{ f() }}"])
def test_a_template_with_mistakes(tokenizer, template):
    """Any exception inside a template is an error of the row, not a traceback."""
    (result,) = Tokenizer(tokenizer.backend, template).encode_chats([CHAT])
    assert code(result) == "invalid_messages"


def test_a_folder_without_tokenizer(tmp_path):
    """The model still works on token ids."""
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize(
    ("broken", "content"),
    [
        ("tokenizer.json", b'{"cut'),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", b'{"cut'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"chat_template": [{"template": "no name"}]}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_tokenizer(tmp_path, broken, content):
    """A truncated or wrong file gives an error that names the folder, without a traceback."""
    (save_backend(byte_backend(), tmp_path) / broken).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        Tokenizer.load(tmp_path)


def test_a_template_of_ones_own(tmp_path):
    """It wins over the model's two places for one, with the model's special tokens and the library's own tags."""
    folder = save_backend(byte_backend(), tmp_path, chat_template="old", eos_token="!")
    (folder / "chat_template.jinja").write_text("old{{ messages[0].content }}")
    template = tmp_path / "mine.txt"
    template.write_text("{% generation %}new{% endgeneration %}{{ eos_token }}{{ messages[0].content }}")
    assert Tokenizer.load(folder, template).encode_chats([CHAT]) == [list(b"new!hi")]
    assert Tokenizer.load(folder).encode_chats([CHAT]) == [list(b"oldhi")]


def test_a_template_for_a_model_without_tokenizer(tmp_path):
    """There is nothing to render for."""
    (tmp_path / "template.jinja").write_text("fine")
    assert Tokenizer.load(tmp_path, tmp_path / "template.jinja") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "unreadable chat template"),
        (b"\xff", "unreadable chat template"),
        (b"line\n{% for", "mine.jinja, line 2: not a valid Jinja chat template"),
        (b"{{ x | nofilter }}", "line 1: not a valid Jinja chat template .*nofilter"),
    ],
    ids=["missing", "not-text", "syntax", "unknown-filter"],
)
def test_a_broken_template_of_ones_own(tmp_path, content, message):
    """One error that names the file and the line, before the model is loaded; not one error a row."""
    save_backend(byte_backend(), tmp_path)
    if content is not None:
        (tmp_path / "mine.jinja").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.load(tmp_path, tmp_path / "mine.jinja")
    assert str(tmp_path / "mine.jinja") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("tokenizer_config.json", "tokenizer_config.json: chat_template, line 2: "),
        ("chat_template.json", "chat_template.json: chat_template, line 2: "),
        ("chat_template.jinja", "chat_template.jinja, line 2: "),
    ],
)
@pytest.mark.parametrize(("source", "reason"), [("a\n{% for", "expected"), ("a\n{{ x | nofilter }}", "nofilter")])
def test_a_broken_template_of_the_model(tmp_path, name, place, source, reason):
    """Each chat failed with a word of Jinja's, and nothing said where. Prompts without a template are served."""
    folder = save_backend(byte_backend(), tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if name == "chat_template.jinja":
        (folder / name).write_text(source)
    else:
        (folder / name).write_text(json.dumps({**config, "chat_template": source}))
    tokenizer = Tokenizer.load(folder)
    (error,) = tokenizer.encode_chats([CHAT])
    assert error.message.startswith(f"{folder}/{place}not a valid Jinja template (") and reason in error.message
    assert tokenizer.encode(["hi"]) == [list(b"hi")]


def test_the_template_of_a_processor(tmp_path):
    """Models with images may have it there alone; it is the last place that is looked at."""
    folder = save_backend(byte_backend(), tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "own{{ messages[0].content }}"}))
    assert Tokenizer.load(folder).encode_chats([CHAT]) == [list(b"ownhi")]
    (folder / "chat_template.jinja").write_text("new{{ messages[0].content }}")
    assert Tokenizer.load(folder).encode_chats([CHAT]) == [list(b"newhi")]


def test_loading_is_quick(tmp_path):
    """The template engine takes 0.4 s to import, which plain prompts need not wait for."""
    save_backend(byte_backend(), tmp_path, chat_template="x")
    program = (
        "import sys, pathlib; from rosebatch.text.tokenizer import Tokenizer;"
        f"Tokenizer.load(pathlib.Path({str(tmp_path)!r})); assert not {{'jinja2', 'transformers'}} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_SECONDS, check=False).returncode == 0


def test_a_broken_tokenizer_of_an_older_format(tmp_path):
    """transformers converts it and may raise any kind of exception."""
    (tmp_path / "tokenizer.model").write_bytes(b"garbage")
    with pytest.raises(UserError, match="unreadable tokenizer"):
        Tokenizer.load(tmp_path)


def test_variables_of_the_template():
    """A row's variables, such as enable_thinking, join the special tokens and override the generation prompt."""
    template = "{{ eos_token }}{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    tokenizer = Tokenizer(byte_backend(), template, {"eos_token": "!"})
    options = [{}, {"style": "brief "}, {"add_generation_prompt": False}]
    encoded = tokenizer.encode_chats([CHAT] * 3, options)
    assert [tokenizer.decode(ids) for ids in encoded] == ["!hiTrue", "!brief hiTrue", "!hiFalse"]


def test_going_on_with_the_last_message(tokenizer):
    """Nothing follows the message, and the row's own messages are not changed."""
    chat = [*CHAT, {"role": "assistant", "content": "Well, "}]
    before = [dict(message) for message in chat]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    (ids,) = tokenizer.encode_chats([chat], [options])
    assert ids == [*b"u:hi", 256, *b"a:Well, "]
    assert chat == before


@pytest.mark.parametrize("options", [{"messages": []}, {"chat_template": "x"}, {"conversations": []}])
def test_variables_that_cannot_be_given(tokenizer, options):
    """Names that the renderer uses itself fail the row, without a crash or another template."""
    (found,) = tokenizer.encode_chats([CHAT], [options])
    assert code(found) == "invalid_messages"


def metaspace_backend():
    """A tokenizer like that of Llama 2: a mark for the space, and byte tokens for text without a token."""
    pieces = ["<unk>", "</s>", "<0x00>", "<0x0A>", "<0xE2>", "<0xE2>x", "<0xG0>"]
    pieces += ["\u2581", "\u2581the", "a\u2581b", "é"]
    backend = marked_spaces(pieces, [], ["<unk>", "</s>"])
    backend.add_tokens(["<think>"])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("<0x00>", b"\0"),
        ("<0x0A>", b"\n"),
        ("<0xE2>", b"\xe2"),
        ("\u2581", b" "),
        ("\u2581the", b" the"),
        ("a\u2581b", b"a b"),
        ("é", "é".encode()),
        # It only looks like a byte token.
        ("<0xE2>x", b"<0xE2>x"),
        ("<0xG0>", b"<0xG0>"),
        ("</s>", b"</s>"),
        # As in the text, where its normalizer puts a space in front of it: the mark itself was among its bytes.
        ("<think>", b" <think>"),
    ],
)
def test_bytes_of_tokens_with_a_mark_for_the_space(piece, expected):
    """A byte token is its byte, not its name; a word keeps its space even where decoding strips it."""
    tokenizer = metaspace_backend()
    assert tokenizer.token_bytes(tokenizer.backend.token_to_id(piece)) == expected


def test_bytes_of_byte_level_tokens():
    """Single bytes, several bytes, half characters, and special tokens, whose bytes are their names."""
    extra = [b"the END", b" it", "é\U0001f600".encode(), b"\xf0\x9f", b"\n\n\0"]
    tokenizer = Tokenizer(byte_backend(*extra))
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert [tokenizer.token_bytes(257 + i) for i in range(5)] == extra
    assert tokenizer.token_bytes(256) == b"<eos>"


def test_bytes_of_an_added_token_with_characters_beyond_ascii():
    """Added tokens are written as text, not with one character for each byte."""
    backend, name = byte_backend(), "<\uff5cend\u2581of\u2581sentence\uff5c>"
    backend.add_special_tokens([name])
    assert Tokenizer(backend).token_bytes(257) == name.encode()


def test_bytes_of_a_token_that_is_none():
    """Logits may be wider than the vocabulary: a likely id without a token has no text and must not crash."""
    assert Tokenizer(byte_backend()).token_bytes(300) == b""


def test_the_bytes_of_tokens_make_up_the_text(tokenizer):
    """Joined, the tokens' bytes must be the bytes of the decoded text."""
    text = "naïve 😀\tcafé"
    (ids,) = tokenizer.encode([text])
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "marks",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ],
)
def test_filling_in_the_middle(marks):
    """For each family of models the marks are single tokens of the prompt."""
    backend = byte_backend()
    backend.add_special_tokens(list(marks))
    tokenizer = Tokenizer(backend)
    (ids,) = tokenizer.encode([tokenizer.fill_in_middle("ab", "cd")])
    before, after, middle = (backend.token_to_id(mark) for mark in marks)
    assert ids == [before, *b"ab", after, *b"cd", middle]


@pytest.mark.parametrize("marks", [[], ["<|fim_prefix|>", "<|fim_suffix|>"], ["<fim_prefix>", "<|fim_middle|>"]])
def test_a_model_that_cannot_fill_in_the_middle(marks):
    """Without all of its tokens, the marks would be ordinary text that the model continues."""
    backend = byte_backend()
    backend.add_special_tokens(marks)
    assert code(Tokenizer(backend).fill_in_middle("ab", "cd")) == "unsupported_field"
