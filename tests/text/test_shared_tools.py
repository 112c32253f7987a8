"""Equal tools of many rows are one object: no row may get another one's tools, and what is remembered is bounded."""

import copy
import json

import pytest

from rosebatch.io.rows import parse_row
from rosebatch.job.memory_estimate import row_bytes
from rosebatch.text import shared_tools
from rosebatch.text.chat_template import ChatTemplate
from rosebatch.text.shared_tools import SharedTools

ASK = [{"role": "user", "content": "hi"}]
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.content }}{% endfor %}{% for t in tools %}{{ t | tojson }}"
    "{{ t | tojson(indent=4) }}{{ t | tojson(sort_keys=true) }}{{ t.function.parameters | tojson }}{% endfor %}",
    {},
)


@pytest.fixture(autouse=True)
def nothing_remembered():
    for table in (shared_tools._SHARED, shared_tools._SEEN, shared_tools._PARTS, shared_tools._TEXTS):
        table.clear()


def weather(**parameters):
    return [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]


def tools_of(tools):
    """Those of a row that has them."""
    values = {"messages": ASK, "tools": copy.deepcopy(tools)}
    return parse_row(values, index=0, where="line 1", defaults={}).tool_use.tools


def rendered(tools):
    return TEMPLATE.render(ASK, {"tools": tools})


def expected(tools):
    def texts(tool):
        forms = ({}, {"indent": 4}, {"sort_keys": True})
        return [json.dumps(tool, **form) for form in forms] + [json.dumps(tool["function"]["parameters"])]

    return "hi" + "".join(text for tool in tools for text in texts(tool))


def test_rows_with_equal_tools_have_one_object_from_the_second_on():
    first, second, third = (tools_of(weather(type="object")) for _ in range(3))
    assert not isinstance(first, SharedTools)
    assert isinstance(second, SharedTools)
    assert third is second
    assert list(first) == list(second) == weather(type="object")


@pytest.mark.parametrize(
    "others",
    [
        [weather(default=1), weather(default=1.0), weather(default=True)],
        [weather(default=0.0), weather(default=-0.0), weather(default=False)],
        [weather(a=1, b=2), weather(b=2, a=1)],
        [weather(enum=[]), weather(enum={}), weather(enum=""), weather(enum=None)],
        [weather(enum=["ab", "c"]), weather(enum=["a", "bc"])],
    ],
)
def test_tools_that_only_look_equal_stay_apart(others):
    """Equal for Python or as a set of names, but another text."""
    for _ in range(4):
        for tools in others:
            assert rendered(tools_of(tools)) == expected(tools)
    assert len(shared_tools._SHARED) == len(others)


def test_what_a_caller_changes_later_is_another_rows_tools():
    """The shared object is a copy: a list that its owner changes is looked at again."""
    tools = weather(type="object")
    values = {"messages": ASK, "tools": tools}
    for _ in range(3):
        before = parse_row(values, index=0, where="line 1", defaults={}).tool_use.tools
        rendered(before)
    tools[0]["function"]["parameters"]["type"] = "string"
    after = parse_row(values, index=0, where="line 1", defaults={}).tool_use.tools
    assert rendered(before) == expected(weather(type="object"))
    assert rendered(after) == expected(weather(type="string"))


def test_the_tables_are_bounded_and_rows_that_are_under_way_keep_their_tools(monkeypatch):
    monkeypatch.setattr(shared_tools, "_MAX_TOOLS", 4)
    monkeypatch.setattr(shared_tools, "_MAX_TEXTS", 5)
    monkeypatch.setattr(shared_tools, "_MAX_SEEN", 6)
    under_way = []
    for number in range(20):
        for _ in range(3):
            under_way.append((number, tools_of(weather(number=number))))
            rendered(under_way[-1][1])
        assert len(shared_tools._SHARED) <= 4
        assert len(shared_tools._PARTS) <= 4 * 3
        assert len(shared_tools._TEXTS) <= 5
        assert len(shared_tools._SEEN) <= 6
    for number, tools in under_way:
        assert rendered(tools) == expected(weather(number=number))


def test_large_tools_and_their_texts_are_not_kept():
    for _ in range(3):
        assert not isinstance(tools_of(weather(description="x" * shared_tools._LONGEST)), SharedTools)
    assert not shared_tools._SHARED
    # Short as bytes, long as a text.
    deep: dict = {}
    for _ in range(300):
        deep = {"items": deep}
    for _ in range(3):
        tools = tools_of(weather(deep=deep))
        assert rendered(tools) == expected(weather(deep=deep))
    assert isinstance(tools, SharedTools)
    assert all(len(text) <= shared_tools._LONGEST for text in shared_tools._TEXTS.values())


@pytest.mark.parametrize("value", [b"bytes", (1, 2), {1: 2}, {1, 2}, type("Text", (str,), {})("a"), object()])
def test_values_that_json_has_not_are_not_shared(value):
    """Bytes and arrays of NumPy have the same bytes, and templates show them as other texts."""
    for _ in range(3):
        assert not isinstance(shared_tools.shared_tools(weather(value=value)), SharedTools)


def test_a_row_takes_as_much_memory_with_shared_tools():
    values = {"messages": ASK, "tools": weather(type="object", properties={"city": {"type": "string"}})}
    sizes = [row_bytes(parse_row(copy.deepcopy(values), index=0, where="", defaults={})) for _ in range(4)]
    assert sizes[1] == sizes[2] == sizes[3]


def test_a_template_cannot_change_shared_tools():
    """It would change those of later rows."""
    tools = [tools_of(weather(type="object")) for _ in range(2)][1]
    for change in ("update(name='other')", "pop('function')", "clear()", "function.parameters.update(a=1)"):
        template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0]." + change + " }}", {})
        template.render(ASK, {"tools": tools})
    assert list(tools) == weather(type="object")
