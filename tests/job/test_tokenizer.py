"""Tokenizer files of a model folder, encoding in groups, chat templates."""

import json
import re

import pytest

from rosebatch.errors import RowError, UserError
from rosebatch.tokenizer import Tokenizer

TEMPLATE = "{{ bos_token }}!{{ messages[0].content }}"
CHAT = [{"role": "user", "content": "hi"}]


def write_folder(folder, backend, **config):
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def code(result):
    assert isinstance(result, RowError)
    return result.code


def test_encode_and_decode(tokenizer):
    """Ids of each text apart, in order, without padding; special tokens do not come out as text."""
    assert tokenizer.encode(["ab", "", "é"]) == [[97, 98], [], [0xC3, 0xA9]]
    assert tokenizer.decode([104, 105, 256, 33]) == "hi!"
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode([]) == []


def test_padding_and_truncation_of_the_file_are_off(make_backend, tmp_path):
    """Some tokenizer.json cut to 512 tokens or pad to the longest: a prompt would lose its end or gain noise."""
    backend = make_backend()
    backend.enable_truncation(3)
    backend.enable_padding(pad_id=256, pad_token="<eos>")
    tokenizer = Tokenizer.load(write_folder(tmp_path, backend))
    assert tokenizer.encode(["abcdef", "a"]) == [[97, 98, 99, 100, 101, 102], [97]]


def test_text_that_is_not_unicode(tokenizer):
    """A lone surrogate costs its own text; the others of the group are encoded all the same."""
    first, second, third = tokenizer.encode(["a", "\ud800", "b"])
    assert (first, code(second), third) == ([97], "invalid_prompt", [98])


def test_a_prompt_gets_the_models_bos_and_a_chat_only_the_templates(make_backend, tmp_path):
    """Twice the BOS makes answers worse without any error to see."""
    from tokenizers import processors

    backend = make_backend()
    backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 256)])
    template = "{{ bos_token }}{{ messages[0].content }}"
    folder = write_folder(tmp_path, backend, bos_token="<eos>", chat_template=template)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode(["hi"]) == [[256, *b"hi"]]
    assert tokenizer.encode_chats([CHAT]) == [[256, *b"hi"]]


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "{{ bos_token }}!{{ messages[0].content }}", "bos_token": "<eos>"},
        {
            "chat_template": "{{ bos_token }}!{{ messages[0].content }}",
            "bos_token": {"content": "<eos>", "lstrip": False},
        },
        {
            "chat_template": [
                {"name": "tool_use", "template": "wrong"},
                {"name": "default", "template": TEMPLATE},
            ],
            "bos_token": "<eos>",
        },
    ],
    ids=["plain", "token-object", "named-templates"],
)
def test_chat_template_of_the_config(make_backend, tmp_path, config):
    """All forms in which transformers has written it over the years."""
    tokenizer = Tokenizer.load(write_folder(tmp_path, make_backend(), **config))
    assert tokenizer.encode_chats([CHAT]) == [[256, *b"!hi"]]


def test_chat_template_of_its_own_file(make_backend, tmp_path):
    """The newer form; it wins."""
    folder = write_folder(tmp_path, make_backend(), chat_template="old")
    (folder / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert Tokenizer.load(folder).encode_chats([CHAT]) == [list(b"new hi")]


def test_the_answer_begins_where_the_template_ends(tokenizer):
    """The generation prompt is asked for: without it a model writes the user's next line."""
    assert tokenizer.encode_chats([CHAT]) == [[*b"u:hi", 256, *b"a:"]]


def test_a_chat_that_the_template_refuses(tokenizer):
    """It costs its own row, wherever it stands in the group."""
    bad = [{"role": "tool", "content": "x"}]
    first, second, third = tokenizer.encode_chats([bad, CHAT, bad])
    assert (code(first), code(third)) == ("invalid_messages", "invalid_messages")
    assert second == [*b"u:hi", 256, *b"a:"]
    assert "no tools" in first.message


@pytest.mark.parametrize("template", ["{{ messages[0].content + 5 }}", "{% for", "{{ messages[0].x.y }}", "{{ f() }}"])
def test_a_template_with_mistakes(tokenizer, template):
    """Whatever goes wrong inside a template is an error of the row, not a traceback."""
    (result,) = Tokenizer(tokenizer.backend, template).encode_chats([CHAT])
    assert code(result) == "invalid_messages"


def test_a_folder_without_tokenizer(tmp_path):
    """Token ids can still be worked on."""
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
def test_a_broken_tokenizer(make_backend, tmp_path, broken, content):
    """A download that was cut, or not what its name says: the folder is named, without a traceback."""
    write_folder(tmp_path, make_backend())
    (tmp_path / broken).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_of_an_older_format(tmp_path):
    """Converted by transformers, whose errors are of many kinds."""
    (tmp_path / "tokenizer.model").write_bytes(b"garbage")
    with pytest.raises(UserError, match="unreadable tokenizer"):
        Tokenizer.load(tmp_path)


def test_variables_of_the_template(make_backend):
    """Such as enable_thinking of Qwen3; beside the special tokens, and over the default of the generation prompt."""
    template = "{{ eos_token }}{{ style }}{% for m in messages %}{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    tokenizer = Tokenizer(make_backend(), template, {"eos_token": "!"})
    chat = [{"role": "user", "content": "hi"}]
    options = [{}, {"style": "brief "}, {"add_generation_prompt": False}]
    encoded = tokenizer.encode_chats([chat] * 3, options)
    assert [tokenizer.decode(ids) for ids in encoded] == ["!hiTrue", "!brief hiTrue", "!hiFalse"]


def test_going_on_with_the_last_message(tokenizer):
    """Nothing stands behind it, and the row's own messages are not changed on the way."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    before = [dict(message) for message in chat]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    (ids,) = tokenizer.encode_chats([chat], [options])
    assert ids == [*b"u:hi", 256, *b"a:Well, "]
    assert chat == before


@pytest.mark.parametrize("options", [{"messages": []}, {"chat_template": "x"}, {"conversations": []}])
def test_variables_that_cannot_be_given(tokenizer, options):
    """Names that the renderer itself uses: the row's error, not a crash, and not another template."""
    (found,) = tokenizer.encode_chats([[{"role": "user", "content": "hi"}]], [options])
    assert isinstance(found, RowError)
    assert found.code == "invalid_messages"
