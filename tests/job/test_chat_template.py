"""Chats that a template cannot render whole: each is an error of its row, never a wrong prompt."""

import re

import pytest

from rosebatch.core.errors import RowError
from rosebatch.io.rows import Row, parse_row
from rosebatch.job.chat_rows import for_model
from rosebatch.text import bounded_jinja
from rosebatch.text.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
DEVELOPER = {"role": "developer", "content": "be brief"}
ANSWER = {"role": "assistant", "content": "yes"}
TOOL = {"role": "tool", "content": "42"}


def calls(arguments, content=None, name="f"):
    """An assistant's message with one tool call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


LITERAL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# Roles with a branch of their own; others are left out.
BRANCHES = (
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}{% elif m.role == 'system' %}S:{{ m.content }}"
    "{% elif m.role == 'assistant' %}A:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% elif m.role == 'tool' %}T:{{ m.content }}{% endif %}{% endfor %}"
)
# Whatever is not the user's is the assistant's.
TWO = "{% for m in messages %}{% if m.role == 'user' %}U:{% else %}A:{% endif %}{{ m.content }}{% endfor %}"
# Whatever is neither the user's nor the assistant's has no mark.
THREE = (
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}{% elif m.role == 'assistant' %}A:{{ m.content }}"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}"
)
# Only the first system message.
FIRST = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}:{{ m.content }}{% endif %}{% endfor %}"
)
# An older way: a call has no content, and its arguments are text.
JOINS = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}{% else %}{{ m.role + ':' + m.content }}"
    "{% endif %}{% endfor %}"
)


def render(template, *messages, **options):
    return ChatTemplate(template, {}).render(list(messages), options)


def failure(result):
    assert isinstance(result, RowError)
    assert result.code == "invalid_messages"
    return result.message


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (LITERAL, "<system>be brief<user>hi"),
        (BRANCHES, "S:be briefU:hi"),
        (THREE, "be brief U:hi"),
        (LITERAL.replace("<", "{% if m.role == 'developer' %}!{% endif %}<", 1), "!<developer>be brief<user>hi"),
    ],
)
def test_a_developer_is_the_system_where_the_template_has_no_such_role(template, text):
    """The message was left out, or had a role that the model has never seen, with status 200."""
    assert render(template, DEVELOPER, USER) == text


@pytest.mark.parametrize(
    "template", [BRANCHES, TWO, THREE, FIRST.replace("m.role !=", "m.role == 'user' and m.role !=")]
)
def test_a_role_without_a_place_in_the_template(template):
    """It was left out, or rendered as another role's message, with status 200."""
    assert "critic" in failure(render(template, USER, {"role": "critic", "content": "no"}))


@pytest.mark.parametrize("template", [TWO, THREE])
def test_a_tools_answer_that_is_rendered_as_another_roles(template):
    """The model would take it for its own words."""
    assert "'tool'" in failure(render(template, USER, ANSWER, TOOL))


def test_a_system_message_that_is_rendered_as_an_answer():
    """A template without a place for it; one that renders it unlike the other two has a place."""
    assert "'system'" in failure(render(TWO, SYSTEM, USER))
    assert render(THREE, SYSTEM, USER) == "be brief U:hi"


def test_a_message_that_the_template_leaves_out():
    """Only the message's place decides: the same role at the beginning is rendered."""
    assert render(FIRST, SYSTEM, USER) == "S:be briefuser:hi"
    assert "messages[1]" in failure(render(FIRST, USER, SYSTEM))
    assert "messages[0]" in failure(render("{{ messages[-1].content }}", USER, ANSWER))


def test_messages_without_content_leave_no_trace_anyway():
    """An empty system message is usual, and a template may leave it out."""
    template = "{% for m in messages if m.content | trim %}{{ m.role }}:{{ m.content }}{% endfor %}"
    for empty in ("", "  \n", None):
        assert render(template, {"role": "system", "content": empty}, USER) == "user:hi"


def test_null_content_is_empty():
    """It was rendered as the word None."""
    assert render(LITERAL, USER, {"role": "assistant", "content": None}) == "<user>hi<assistant>"
    assert render(LITERAL, USER, {"role": "assistant"}) == "<user>hi<assistant>"


@pytest.mark.parametrize("arguments", ['{"x": "é"}', {"x": "é"}])
def test_arguments_of_tool_calls_are_objects(arguments):
    """As text they were encoded twice: a JSON string in place of an object."""
    assert render(BRANCHES, USER, calls(arguments), TOOL) == 'U:hiA:[f {"x": "é"}]T:42'


@pytest.mark.parametrize("arguments", ["", "{}", {}, None])
def test_tool_calls_without_arguments(arguments):
    assert render(BRANCHES, USER, calls(arguments), TOOL).startswith("U:hiA:[f ")


@pytest.mark.parametrize(
    "call",
    ["x", 1, None, [], {}, {"function": 1}, {"function": {"name": 1}}, {"name": ""}, {"function": {"arguments": "{}"}}],
)
def test_calls_of_nothing(call):
    """They left no trace in the text, and the answer was to a chat without them."""
    error = render(BRANCHES, USER, {"role": "assistant", "content": "a", "tool_calls": [call]})
    assert (error.code, error.message) == ("invalid_messages", "messages[1].tool_calls[0]: has no name of a function")


@pytest.mark.parametrize("arguments", [[1], 5, False, "{", "[1]", "5", '"x"', "[" * 5000, '{"a": 1} x'])
def test_arguments_that_are_no_json_object(arguments):
    """The template would render them as if they were."""
    assert "messages[1].tool_calls[0]" in failure(render(BRANCHES, USER, calls(arguments), TOOL))


@pytest.mark.parametrize("arguments", ['{"x":1}', {"x": 1}])
def test_templates_that_join_the_arguments_as_text(arguments):
    """Templates of this kind look for a content that is null, and cannot take an object."""
    assert render(JOINS, USER, calls(arguments)) == 'user:hi[f {"x":1}]'


@pytest.mark.parametrize(
    "template", [LITERAL, BRANCHES.replace("| tojson", "and ''"), BRANCHES.replace("c.function.name", "''")]
)
def test_a_template_that_leaves_out_tool_calls(template):
    """An empty answer, a call without its arguments or without its name: a history that never was."""
    assert "tool call" in failure(render(template, USER, calls({"x": 1}), TOOL))


def test_no_tool_calls():
    """Clients write null for what a message does not have."""
    template = "{% for m in messages %}{{ m.content }}{% if 'tool_calls' in m %}CALLS{% endif %}{% endfor %}"
    assert render(template, {**USER, "tool_calls": None}) == "hi"


@pytest.mark.parametrize("calls", [5, [5], [None], ["f"], [{}], [{"function": 5}], {"a": 1}, [[]], "f"])
def test_tool_calls_of_any_form_cost_one_row(calls):
    """Whatever the template says of them: it says it of one row."""
    result = render(BRANCHES, USER, {"role": "assistant", "content": "x", "tool_calls": calls})
    assert isinstance(result, (str, RowError))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].x | tojson }}{{ messages[0].content }}", "recursion"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ 10.0 ** 400 }}", "too large|out of range"),
        ("{{ 'a' * 2 ** 62 }}", "it makes more than 67108864 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_whatever_a_template_raises_is_the_rows_error(template, message):
    """RecursionError, ZeroDivisionError, OverflowError and MemoryError ended the job."""
    deep = 1
    for _ in range(2000 if "tojson" in template else 1):
        deep = {"a": deep}
    with pytest.raises(RowError, match=f"(?i){message}") as raised:
        raise render(template, {**USER, "x": deep})
    assert raised.value.code == "invalid_messages"


def test_rows_of_one_kind_are_checked_once():
    """The check renders a chat again: for every row it would double the cost of chats."""
    template, rendered = ChatTemplate(BRANCHES, {}), []
    inner = template._text
    template._text = lambda messages, options: rendered.append(1) or inner(messages, options)
    for i in range(10):
        assert template.render([SYSTEM, {"role": "user", "content": f"{i}"}], {}) == f"S:be briefU:{i}"
    assert len(rendered) <= 13
    assert "critic" in failure(template.render([{"role": "critic", "content": "x"}], {}))
    before = len(rendered)
    assert "critic" in failure(template.render([{"role": "critic", "content": "y"}], {}))
    assert len(rendered) == before
    assert template.render([{"role": "critic", "content": ""}], {}) == "", "it says nothing: another kind"


def test_options_decide_too():
    """A template may leave messages out if an option says so."""
    template = ChatTemplate(
        "{% for m in messages %}{% if not brief or loop.last %}{{ m.content }}{% endif %}{% endfor %}", {}
    )
    assert template.render([USER, ANSWER], {}) == "hiyes"
    assert "messages[0]" in failure(template.render([USER, ANSWER], {"brief": True}))
    assert template.render([USER, ANSWER], {"brief": False, "tools": [{"type": "function"}]}) == "hiyes"


def test_a_long_chat_marks_every_message():
    """Marks of different messages must not contain each other."""
    chat = [USER, ANSWER] * 60
    assert render(LITERAL, *chat) == "<user>hi<assistant>yes" * 60
    cut = "{% for m in messages %}{% if loop.index0 != 1 %}{{ m.content }}{% endif %}{% endfor %}"
    assert "messages[1]" in failure(render(cut, *chat))


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(s=SEED) %}{% for i in range(60) %}{% set n.s = NEXT %}{% endfor %}{{ n.s | length }}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ '%2000000000d' % 1 }}",
        "{{ '%*d' % (2000000000, 1) }}",
        "{{ '%.*f' % (2000000000, 1.5) }}",
        "{{ '%(a)s%(a)s%(a)s' % {'a': 'x' * 30000000} }}",
        "{{ '%2000000000d' | format(1) }}",
        "{{ '{:2000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 2000000000) }}",
        "{{ '{0:{w}}'.format_map({'0': 1, 'w': 2000000000}) }}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{{ [['x'] * 10000] * 10000 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 1 | round(-1000000000) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.center(10 ** 9) }}",
        "{{ 'x'.zfill(10 ** 9) }}",
        "{{ (1).to_bytes(1000000000, 'big') | length }}",
        "{{ ('\t' * 1000).expandtabs(1000000) }}",
        "{{ ('\n' * 1000) | indent(1000000, blank=true) }}",
        "{{ range(1000) | list | tojson(indent=1000000) }}",
        "{{ ('x ' * 10000) | wordwrap(1, wrapstring='y' * 10000) }}",
        "{{ ('x' * 10000) | replace('x', 'y' * 10000) }}",
        "{{ ('x' * 10000).replace('x', 'y' * 10000) }}",
        "{{ ('x' * 10000).translate({120: 'y' * 10000}) }}",
        "{{ range(10000) | join('x' * 10000) }}",
        "{{ ('x' * 10000).join('y' * 10000) }}",
        "{{ ['x'] | batch(10 ** 9, 'y') | list }}",
        "{{ range(99999) | map('center', 10000) | list | length }}",
        "{{ range(99999) | map('center', 10000) | join }}",
        NESTED,
        f"{{% macro m() %}}{NESTED}{{% endmacro %}}{{{{ m() | length }}}}",
        f"{{% set x %}}{NESTED}{{% endset %}}{{{{ x | length }}}}",
        DOUBLED.replace("SEED", "'x'").replace("NEXT", "n.s + n.s"),
        DOUBLED.replace("SEED", "'x'").replace("NEXT", "n.s ~ n.s"),
        DOUBLED.replace("SEED", "3").replace("NEXT", "n.s * n.s"),
        DOUBLED.replace("SEED", "['x']").replace("NEXT", "[n.s, n.s]").replace(" | length", ""),
        DOUBLED.replace("SEED", "['x']").replace("NEXT", "[n.s, n.s]").replace(" | length", " | tojson"),
    ],
)
def test_a_template_that_takes_memory(monkeypatch, template):
    """Gigabytes were taken for one row, and the run was killed with all others."""
    monkeypatch.setattr(bounded_jinja, "MAX_CHARACTERS", 1 << 17)
    assert re.search(r"it makes (more than \d+ characters|a number of more than)", failure(render(template, USER)))


EMPTY_LOOPS = "{% for a in RANGE %}{% for b in RANGE %}{% endfor %}{% endfor %}"
TWICE = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"


@pytest.mark.parametrize(
    "template",
    [
        EMPTY_LOOPS.replace("RANGE", "range(99999)"),
        EMPTY_LOOPS.replace("RANGE", "('x' * 99999)"),
        EMPTY_LOOPS.replace("RANGE", "range(99999) | map('string')"),
        EMPTY_LOOPS.replace("RANGE", "range(99999) if true"),
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
        TWICE,
        "{% set t = 'x' * 9999 %}{% for a in range(9999) %}{{ t | upper | length }}{% endfor %}",
        "{% set t = 'x' * 9999 %}{% for a in range(9999) %}{{ t.upper() | length }}{% endfor %}",
        "{% set t = 'x' * 9999 %}{% for a in range(9999) %}{{ t[1:] | length }}{% endfor %}",
        "{% set t = 'x' * 9999 %}{% for a in range(2000) if 'y' in t %}{% endfor %}",
        "{% set t = 'x' * 9999 %}{% for a in range(2000) if 'x' not in t %}{% endfor %}",
        "{% set n = namespace(s='') %}{% for a in range(999) %}{% set n.s = n.s ~ 'x' * 99 %}{% endfor %}",
        "{% set n = namespace(s='') %}{% for a in range(999) %}{% set n.s = n.s + 'x' * 99 %}{% endfor %}",
    ],
)
def test_a_template_that_hardly_ends(monkeypatch, template):
    """It held the job for hours: the bound of range is one of each loop, not of loops in loops."""
    monkeypatch.setattr(bounded_jinja, "MAX_STEPS", 1 << 12)
    assert re.search(r"it takes more than \d+ steps", failure(render(template, USER)))


def test_each_rendering_has_steps_of_its_own(monkeypatch):
    """Else a job of many rows would end in errors."""
    monkeypatch.setattr(bounded_jinja, "MAX_STEPS", 100)
    template = ChatTemplate("{% for i in range(60) %}{% endfor %}{{ messages[0].content }}", {})
    assert [template.render([USER], {}) for _ in range(3)] == ["hi"] * 3


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("'a' + 'b' ~ 1 + 2 ~ 'c' + ('<' | escape + '<')", "ab12c&lt;&lt;"),
        ("1 + 2 + 3.5", "6.5"),
        ("[1] + [2] + [3]", "[1, 2, 3]"),
        ("'%5d|%-3s|%s' % (1, 'a', [2])", "    1|a  |[2]"),
        ("'%(a)s' | format(a='b')", "b"),
        ("'{:>4}{a}'.format(1, a=2)", "   12"),
        ("('a\nb' | indent(2)).replace('b', 'c') ~ 1 ~ none", "a\n  c1None"),
        ("[1, 'b'] + ['c'] * 2", "[1, 'b', 'c', 'c']"),
        ("(2 ** 10 % 1000) * 2 + 1", "49"),
        ("[1, 2] | map('string') | join(', ')", "1, 2"),
        ("{'a': [1]} | tojson(indent=1)", '{\n "a": [\n  1\n ]\n}'),
        ("2.5 | round(0, 'floor')", "2.0"),
        ("'a'.join(['x', 'y']) | center(7)", "  xay  "),
        ("'abcd'[1:3] ~ [1, 2, 3][::-1] ~ 'abcd'[0]", "bc[3, 2, 1]a"),
        ("('b' in 'abc') ~ ('x' not in {'x': 1}) ~ (2 in [1, 2])", "TrueFalseTrue"),
    ],
)
def test_bounds_change_no_value(expression, text):
    """Operators, filters and methods are Jinja's own."""
    assert render("{{ messages[0].content ~ (" + expression + ") }}", USER) == f"hi{text}"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("m.items is callable", "True"),
        ("m['items']", "mine"),
        ("m.nothing is defined", "False"),
        ("m.__class__ is defined", "False"),
        ("m.part.name", "inner"),
        ("m.part.keys() | list", "['name', 'keys']"),
    ],
)
def test_methods_of_objects_come_before_their_fields(expression, text):
    """As in Jinja: a field called items hides no method."""
    message = {**USER, "items": "mine", "part": {"name": "inner", "keys": 1}}
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ " + expression + " }}{% endfor %}", {})
    assert template.render([message], {}) == f"hi{text}"


def test_values_of_other_types_reach_no_template():
    """Their methods would; texts and numbers of other types are plain ones there."""

    class Text(str):
        def leak(self):
            return "leaked"

    class Number(int):
        def leak(self):
            return "leaked"

    values = {"a": [Text("t")], "b": {"c": Number(3)}, Text("d"): object(), "e": (Text("u"),)}
    source = (
        "{% for m in messages %}{{ m.content }}{% endfor %} {{ given.a[0] }} {{ given.b.c }} {{ given.d }}"
        " {{ given.a[0].leak is defined }} {{ given.b.c.leak is defined }} {{ given.e[0].leak is defined }}"
    )
    text = ChatTemplate(source, {}).render([USER], {"given": values})
    assert text == "hi t 3 <object> False False False"


def test_fields_that_a_template_reads():
    """It names a field, or prints all; else that changes nothing. A chat that it refuses told that all are read."""
    literal, whole = ChatTemplate(LITERAL + "{{ messages[0].mood }}", {}), ChatTemplate("{{ messages | tojson }}", {})
    chat = [{**USER, "mood": "calm", "foo": 1}]
    assert literal.unread(["mood", "foo"], chat, {}) == ["foo"]
    assert whole.unread(["mood", "foo"], chat, {}) == []
    some = ChatTemplate(LITERAL + "{{ messages[0]['fo' ~ 'o'] }}", {})
    assert some.unread(["mood", "foo"], chat, {}) == ["mood"]
    picky = ChatTemplate(LITERAL + "{{ raise_exception('no') if messages | length > 1 }}", {})
    assert [picky.unread(["foo"], messages, {}) for messages in (chat * 2, chat)] == [[], ["foo"]]
    for number in range(100):
        assert literal.unread([f"name_{number}"], [{**USER, f"name_{number}": 1}], {}) == [f"name_{number}"]


@pytest.mark.parametrize(("end", "reads_all"), [("", False), ("{{ messages | tojson }}", True)])
def test_fields_are_tried_together(monkeypatch, end, reads_all):
    """One message with a million fields was rendered 129 times, 40 s, and all other rows waited."""
    template, texts = ChatTemplate(LITERAL + end, {}), []
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *args: texts.append(render(*args)) or texts[-1])
    names = [f"name_{number}" for number in range(1000)]
    chat = [{**USER, **dict.fromkeys(names, 1)}]
    assert template.unread(names, chat, {}) == ([] if reads_all else names)
    assert template.unread(names[:50], chat, {}) == ([] if reads_all else names[:50])
    assert len(texts) == 2, "those that were tried are known"


def test_too_many_messages(tokenizer):
    """The copies that a template gets of 300,000 messages took 660 MB."""

    def read(count):
        row = parse_row({"messages": [USER] * count}, index=0, where="line 1", defaults={})
        return for_model(row, tokenizer)

    assert isinstance(read(100_000), Row)
    error = read(100_001).error
    assert (error.code, error.message) == ("invalid_messages", "the chat has 100001 messages, more than 100000")


def test_too_many_variables(tokenizer):
    """A million of them took 750 MB on their way into the report."""

    def read(count):
        variables = {f"v{number}": 1 for number in range(count)}
        row = parse_row({"messages": [USER], "chat_template_kwargs": variables}, index=0, where="line 1", defaults={})
        return for_model(row, tokenizer)

    assert isinstance(read(10_000), Row)
    error = read(10_001).error
    assert (error.code, error.message) == ("invalid_field", "chat_template_kwargs has 10001 names, more than 10000")


def test_what_a_template_does_not_read_is_told(tokenizer):
    """Unknown fields of messages, and variables that no template has, changed nothing without a word."""
    message = {**USER, "foo": 1, "bar": None, "name": "Ada", "id": "7"}
    kwargs = {"enable_thinking": False, "enable_thinkng": False}
    row = parse_row({"messages": [message], "chat_template_kwargs": kwargs}, index=0, where="line 1", defaults={})
    row = for_model(row, tokenizer)
    assert row.unclear == ("chat_template_kwargs.enable_thinkng", "messages.foo")
    assert row.ignored == ("enable_thinking", "messages.name")
    plain = parse_row({"messages": [USER, ANSWER]}, index=0, where="line 1", defaults={})
    assert for_model(plain, tokenizer) is plain


# Of a text, or of parts.
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
IMAGE = {"type": "image"}


def seen(*texts):
    return {"role": "user", "content": [IMAGE, *({"type": "text", "text": text} for text in texts)]}


def test_texts_beside_images_are_rendered_as_they_are():
    """A mark stood for the whole content, and for no part of it."""
    assert render(PARTS, SYSTEM, seen("a", "b"), ANSWER) == "system:be briefuser:<image>abassistant:yes"


def test_a_template_that_leaves_out_texts_beside_images():
    """The model would see the image without the question."""
    first = PARTS.replace("for p in m.content", "for p in m.content[:2]")
    assert render(first, seen("a")) == "user:<image>a"
    assert "leaves out messages[0]" in failure(render(first, seen("a", "b")))


def test_chats_with_images_are_of_a_kind_of_their_own():
    """A chat with an empty text was tried before, so nothing was looked for in one with an image."""
    template = ChatTemplate(PARTS.replace("{{ p.text }}", ""), {})
    assert template.render([{"role": "user", "content": ""}], {}) == "user:"
    assert isinstance(template.render([seen("a")], {}), RowError)
