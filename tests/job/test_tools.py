"""Chats with tools, from the row to the result, for each family's form."""

import json

import jsonschema
import pytest

from rosebatch.core.errors import RowError
from rosebatch.text.chat_template import ChatTemplate
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import TEMPLATE, FakeModel
from tests.job.lines import choices_of, codes
from tests.job.tool_templates import TEMPLATES, both_tokenizers, chat_backend, chat_tokenizer, tool

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -99, "maximum": 99}, "b": {"$ref": "#/$defs/n"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS = [tool("get_weather", CITY), tool("add", SUM), tool("now")]
SCHEMAS = {"get_weather": CITY, "add": SUM, "now": {"maxProperties": 0}}
ASK = {"role": "user", "content": "What is <2 + 3> é?"}
CALLED = {"id": "abcdefgh1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CHATS = {
    "question": [ASK],
    "system": [{"role": "system", "content": "Be brief."}, ASK],
    "result": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "5"},
    ],
}
# What a model of each form writes to call add.
SUM_TEXT = '{"a": 2, "b": 3}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {SUM_TEXT}}}\n</tool_call>',
    "llama3": f'{{"name": "add", "parameters": {SUM_TEXT}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {SUM_TEXT}}}]',
    "gpt_oss": f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{SUM_TEXT}<|call|>",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
    "</function>\n</tool_call>",
}
# Ids of all marks are above those of bytes.
WIDTH = chat_backend().get_vocab_size()
ROOM = {"vocab_size": WIDTH, "blocks": 600, "max_model_len": 2000}


class Scripted(FakeModel):
    """Answers a chat by a text in it."""

    def __init__(self, answers):
        super().__init__()
        self._backend = chat_backend()
        self._scripts = {key: self._backend.encode(text).ids for key, text in answers.items()}

    def next_token(self, token_ids, prompt, seed):
        text = self._backend.decode(list(prompt), skip_special_tokens=False)
        script = next((ids for key, ids in self._scripts.items() if key in text), None)
        if script is None:
            return super().next_token(token_ids, prompt, seed)
        position = len(token_ids) - len(prompt)
        return script[position] if position < len(script) else 256

    def _sample(self, spec, token_ids, allowed):
        """The script goes on where it may."""
        token = self.next_token(token_ids, spec.prompt_token_ids, None if spec.sampling.greedy else spec.sampling.seed)
        is_long = len(token_ids) - len(spec.prompt_token_ids) >= 300
        return token if allowed and token in allowed and not is_long else super()._sample(spec, token_ids, allowed)


def line(text="Q1", **fields):
    return {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "max_tokens": 400, **fields}


def run(job, form, lines, answers=None, **options):
    options = {"tokenizer": chat_tokenizer(form), **ROOM} | options
    return job.results(lines, model=Scripted(answers or {}), **options)


def first_choices(job, form, bodies, answers):
    """The first answer to each request of a batch."""
    lines = job.answer(*bodies, model=Scripted(answers), tokenizer=chat_tokenizer(form), **ROOM)
    return [choices_of(line)[0] for line in lines]


def require_valid(call):
    """The arguments of a call match the schema of its tool."""
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("form", TEMPLATES)
def test_prompts_are_those_of_transformers(tmp_path, form, chat):
    """A tool, a call or its result that is told otherwise than in training makes answers worse, without an error."""
    ours, theirs = both_tokenizers(tmp_path, chat_backend(), TEMPLATES[form])
    expected = theirs.apply_chat_template(CHATS[chat], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert "get_weather" in expected or (form, chat) == ("mistral", "")
    assert ours.render([CHATS[chat]], [{"tools": TOOLS}]) == [expected]


def test_a_template_that_leaves_the_tools_out():
    """The model would not know of them, and nobody would notice."""
    error = ChatTemplate(TEMPLATE, {"eos_token": ""}).render([ASK], {"tools": TOOLS})
    assert isinstance(error, RowError)
    assert (error.code, error.message) == ("invalid_messages", "the chat template leaves out the tools")


@pytest.mark.parametrize("form", TEMPLATES)
def test_calls_are_told_apart(job, form):
    """Marks are special tokens, which texts of other rows leave out."""
    (row,) = run(job, form, [line(id="a")], {"Q1": WRITTEN[form]})
    call = {"id": "call_0_0_0", "type": "function", "function": {"name": "add", "arguments": SUM_TEXT}}
    assert (row["text"], row["tool_calls"], row["finish_reason"]) == ("", [call], "tool_calls")
    assert row["id"] == "a"
    assert not {"tools", "tool_choice"} & set(row)


@pytest.mark.parametrize("form", TEMPLATES)
def test_answers_without_calls(job, form):
    """Words, a broken call, and an unknown tool are text; the finish reason is that of any text."""
    other = WRITTEN[form].replace("add", "subtract")
    written = {"Q1": "Just words.", "Q2": WRITTEN[form][:-18], "Q3": other}
    rows = run(job, form, [line(text) for text in written], written)
    assert [row["finish_reason"] for row in rows] == ["stop"] * 3
    assert not any("tool_calls" in row for row in rows)
    assert rows[0]["text"] == "Just words."
    assert WRITTEN[form][-40:-18] in rows[1]["text"]
    assert "subtract" in rows[2]["text"]


@pytest.mark.parametrize("form", TEMPLATES)
def test_tool_choice_none(job, form):
    """The tools are told, and the answer is text whatever it says."""
    (row,) = run(job, form, [line(tool_choice="none")], {"Q1": WRITTEN[form]})
    assert "tool_calls" not in row
    assert "add" in row["text"] and "3" in row["text"]


@pytest.mark.thorough
@pytest.mark.matrix
@pytest.mark.parametrize("spare", [600, 30], ids=["roomy", "preempted"])
@pytest.mark.parametrize("form", TEMPLATES)
def test_required_always_gives_calls_that_their_schemas_accept(job, form, spare):
    """Sampled, several completions a row, with a named tool or any, and one call or several."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    kinds = [{}, {"parallel_tool_calls": False}, {"tool_choice": named}]
    kinds = [{"tool_choice": "required", **kind} for kind in kinds]
    lines = [line(f"row {i}", temperature=1, n=3, **kinds[i % 3]) for i in range(9)]
    tokenizer = chat_tokenizer(form)
    (prompt,) = tokenizer.encode_chats([lines[0]["messages"]], [{"tools": TOOLS}])
    options = {"model": Scripted({}), "tokenizer": tokenizer, "vocab_size": WIDTH, "block_size": 16}
    rows, _, engine = job.run(lines, blocks=len(prompt) // 16 + spare, max_model_len=5000, seqs=9, **options)
    assert (engine.stats.preemptions > 0) == (spare == 30)
    assert codes(rows) == [None] * 9
    names = set()
    for i, row in enumerate(rows):
        for choice in row["choices"]:
            assert (choice["text"], choice["finish_reason"]) == ("", "tool_calls")
            assert len(choice["tool_calls"]) == 1 or i % 3 == 0
            for call in choice["tool_calls"]:
                require_valid(call)
                names.add((i % 3, call["function"]["name"]))
    assert {name for kind, name in names if kind == 2} == {"get_weather"}
    assert len({name for kind, name in names if kind < 2}) > 1


def test_a_newer_mistral_writes_name_and_arguments(job):
    """The token [ARGS] tells these models."""
    backend = chat_backend()
    backend.add_special_tokens(["[ARGS]"])
    tokenizer = Tokenizer(backend, TEMPLATES["mistral"], {"bos_token": "<s>", "eos_token": "<eos>"})
    lines = [line("Q1", tool_choice="required", parallel_tool_calls=False)]
    options = {"tokenizer": tokenizer, "vocab_size": WIDTH + 1, "return_token_ids": True}
    (row,) = run(job, "mistral", lines, **options)
    (call,) = row["tool_calls"]
    require_valid(call)
    assert WIDTH in row["token_ids"]


def test_rows_that_cannot_be_served(job):
    """Each is an error of its own, and its neighbours are served."""
    bad = [tool("f", {"type": "object", "properties": {"a": {"type": "integ"}}})]
    no_object = [tool("f", {"type": "string"})]
    lines = [
        line("Q1"),
        line(tools=bad, tool_choice="required"),
        line(tools=no_object, tool_choice="required"),
        line(tool_choice="required", min_tokens=3),
        {"prompt": "x", "tools": TOOLS},
        line(tools=[{"type": "function", "function": {"name": ""}}]),
    ]
    rows = run(job, "hermes", lines, {"Q1": "Yes."})
    assert codes(rows) == [None, *["invalid_grammar"] * 2, "invalid_sampling", "invalid_field", "invalid_field"]
    assert rows[1]["error"]["message"].startswith("line 2: the grammar cannot be used: ")
    assert rows[2]["error"]["message"].endswith("the parameters of f must be of type object")
    assert rows[0]["text"] == "Yes."


def test_calls_of_too_many_tools(job):
    """A row of 20,000 tools took 750 MB until llguidance refused their grammar. Without one, they are a long prompt."""
    forced = line(tools=[tool(f"f{i}") for i in range(8193)], tool_choice="required")
    rows = run(job, "hermes", [forced, line(), forced | {"tool_choice": "none"}])
    assert rows[0]["error"]["code"] == "invalid_grammar"
    assert rows[0]["error"]["message"].endswith("a grammar may have 8192 tools, and the row has 8193")
    assert "error" not in rows[1] and rows[2]["error"]["code"] == "prompt_too_long"


def test_a_model_of_an_unknown_form(job):
    """Its calls would pass for text."""
    template = "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}"
    (row,) = job.results([line()], tokenizer=Tokenizer(byte_backend(), template))
    assert row["error"]["code"] == "unsupported_field"
    assert "--tool-call-parser" in row["error"]["message"]


def test_chat_completions(job):
    """Names and values of the API; content is null beside calls alone."""
    answers = {"Q1": WRITTEN["hermes"], "Q2": "Well.\n" + WRITTEN["hermes"] + "\n" + WRITTEN["hermes"], "Q3": "No."}
    bodies = [line("Q1"), line("Q2"), line("Q2", parallel_tool_calls=False), line("Q3")]
    told = first_choices(job, "hermes", bodies, answers)
    assert [choice["finish_reason"] for choice in told] == ["tool_calls"] * 3 + ["stop"]
    assert [choice["message"]["content"] for choice in told] == [None, "Well.", "Well.", "No."]
    ids = [[call["id"] for call in choice["message"].get("tool_calls", [])] for choice in told]
    assert ids == [["call_0_0_0"], ["call_1_0_0", "call_1_0_1"], ["call_2_0_0"], []]


def test_functions(job):
    """The older spelling: a call comes back as it was asked for, and calls of earlier turns reach the template."""
    body = {
        "messages": [
            {"role": "user", "content": "Q1"},
            {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
            {"role": "function", "name": "now", "content": "noon"},
        ],
        "functions": [each["function"] for each in TOOLS],
        "max_tokens": 400,
    }
    forced = {**body, "function_call": {"name": "get_weather"}}
    told = first_choices(job, "hermes", [body], {"Q1": WRITTEN["hermes"]}) + first_choices(job, "hermes", [forced], {})
    assert [choice["finish_reason"] for choice in told] == ["function_call"] * 2
    assert told[0]["message"]["function_call"] == {"name": "add", "arguments": SUM_TEXT}
    assert told[1]["message"]["function_call"]["name"] == "get_weather"
    assert "tool_calls" not in told[0]["message"]


@pytest.mark.parametrize("spare", [600, pytest.param(30, marks=pytest.mark.thorough)], ids=["roomy", "preempted"])
@pytest.mark.parametrize("form", ["hermes", "mistral", "qwen3_coder"])
def test_strict_tools_where_the_model_decides(job, form, spare):
    """Calls match the schemas, text around them is free, and a model that calls nothing is served all the same."""
    # Free arguments of Qwen3-Coder are texts, which the fake model would write without an end.
    limit = 3 if form == "qwen3_coder" else 2
    strict = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS[:limit]] + TOOLS[limit:]
    opening = WRITTEN[form].partition("\n" if form != "mistral" else "[{")[0]
    # After the mark, a script goes on as it may, and then as the fake model likes.
    answers = {"Q1": f"Well. {opening}", "Q2": "No.", "Q3": WRITTEN[form], "Q4": f"{opening}x"}
    lines = [
        line(f"Q{1 + i % 4}", tools=strict, temperature=1, seed=i, max_tokens=1500, parallel_tool_calls=i % 3 > 0)
        for i in range(12)
    ]
    tokenizer = chat_tokenizer(form)
    (prompt,) = tokenizer.encode_chats([lines[0]["messages"]], [{"tools": strict}])
    options = {"tokenizer": tokenizer, "vocab_size": WIDTH, "block_size": 16}
    rows, _, engine = job.run(
        lines, model=Scripted(answers), blocks=len(prompt) // 16 + spare, max_model_len=5000, seqs=9, **options
    )
    assert (engine.stats.preemptions > 0) == (spare == 30)
    assert codes(rows) == [None] * 12
    names = set()
    for i, row in enumerate(rows):
        calls = [call["function"] for call in row.get("tool_calls", [])]
        assert len(calls) <= 1 or i % 3
        assert bool(calls) == (i % 4 != 1)
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), {**SCHEMAS, "now": {}}[call["name"]])
            names.add(call["name"])
    assert rows[0]["text"].startswith("Well.") and rows[1]["text"] == "No."
    assert len(names) > 1


@pytest.mark.parametrize(("form", "min_tokens"), [("llama3", 0), ("gpt_oss", 0), ("hermes", 3)])
def test_strict_tools_that_cannot_be_kept(job, form, min_tokens):
    """The row is served as if they were not strict, and the report says so."""
    strict = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS]
    options = {"model": Scripted({"Q1": WRITTEN[form]}), "tokenizer": chat_tokenizer(form), **ROOM}
    rows, tally, _ = job.run([line(tools=strict, min_tokens=min_tokens)], **options)
    assert rows[0]["tool_calls"][0]["function"]["name"] == "add"
    assert tally.ignored == {"strict": 1}
