"""A member that nobody knows, at each place of a row and of a batch line: it goes on, is listed, or is refused."""

import json

import pytest

from rosebatch.io.openai.lines import parse_request
from rosebatch.io.rows import FailedRow, parse_row

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ],
    "chat_template_kwargs": {},
}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
CHOICE = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
# By what becomes of it: the fields of the row, and the path to the member.
GOES_ON = [
    ({}, "messages 0"),
    ({}, "messages 1 tool_calls 0"),
    ({}, "messages 1 tool_calls 0 function"),
    ({}, "messages 2"),
    ({}, "chat_template_kwargs"),
    (TOOLS, "tools 0"),
    (TOOLS, "tools 0 function"),
    (TOOLS, "tools 0 function parameters"),
    (TOOLS, "tools 0 function parameters properties a"),
    (FORMAT, "response_format json_schema schema"),
]
REFUSED = [
    ({}, "messages 0 content 0"),
    (FORMAT, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "text"}}, "response_format"),
    (FORMAT, "response_format json_schema"),
    (TOOLS | CHOICE, "tool_choice"),
    (TOOLS | CHOICE, "tool_choice function"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
]


def with_member(fields, path):
    row = json.loads(json.dumps(CHAT | fields))
    place = row
    for key in path.split():
        place = place[int(key) if key.isdigit() else key]
    place["unheard_of"] = 1
    return row


def plain(fields):
    return parse_row(fields, index=0, where="line 1", defaults={})


def batch(fields, **beside):
    line = {"custom_id": "1", "url": "/v1/chat/completions", "body": fields, **beside}
    return parse_request(line, index=0, where="line 1", defaults={})


READERS = [plain, batch]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("fields", "path"), GOES_ON)
def test_what_the_template_or_the_grammar_gets(read, fields, path):
    """Whoever reads it there decides: a template may name any member of a message or a tool."""
    assert "unheard_of" in repr(read(with_member(fields, path)))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("fields", "path"), REFUSED)
def test_what_nobody_reads_is_refused(read, fields, path):
    """It was dropped: the answer was to another request, such as any JSON object for a schema under a wrong name."""
    row = read(with_member(fields, path))
    assert isinstance(row, FailedRow)
    assert "unknown field" in row.error.message and "unheard_of" in row.error.message


def test_the_top_of_a_row_and_of_a_line():
    """A row's own fields are carried to its result; a line has no place for them, and a body none for others."""
    assert plain({"prompt": "a", "unheard_of": 1}).metadata["unheard_of"] == 1
    assert batch(CHAT, unheard_of=1).ignored == ("unheard_of",)
    assert batch(CHAT, unheard_of=None).ignored == ()
    assert batch({**CHAT, "unheard_of": 1}).error.code == "unknown_field"


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", ["images", "audio", "video_url"])
def test_inputs_that_are_no_text_in_a_message(read, name):
    """Ollama's messages have images beside the content: the text alone was answered."""
    (message, *_), value = CHAT["messages"], ["aGk="]
    assert read({"messages": [{**message, name: value}]}).error.code == "unsupported_field"
    assert not isinstance(read({"messages": [{**message, name: None}]}), FailedRow)


@pytest.mark.parametrize("read", READERS)
def test_what_servers_keep_beside_a_text(read):
    """A part's mark for a server's cache changes no answer; nulls are of tables, where all parts have all fields."""
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "image": None}
    assert read({"messages": [{"role": "user", "content": [part]}]}).messages == [{"role": "user", "content": "hi"}]
