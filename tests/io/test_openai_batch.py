"""Requests of an OpenAI batch: what is accepted, what is refused, and that no field is ignored silently."""

import json

import pytest
from msgspec.structs import replace

from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.io.fields import PromptOptions
from rosebatch.io.openai.lines import is_request, parse_request
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow, Row
from tests.helpers.results import assert_failed

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def tool(name):
    return {"type": "function", "function": {"name": name}}


def chat(**body):
    body = {"model": "some-model", "messages": HELLO, **body}
    return {"custom_id": "request-1", "method": "POST", "url": CHAT, "body": body}


def text(prompt="Hello", **body):
    return {**chat(), "url": TEXT, "body": {"model": "some-model", "prompt": prompt, **body}}


def parse(values, **defaults):
    return parse_request(values, index=3, where="line 4", defaults=defaults)


def test_a_chat():
    """Without fields in the body the API's defaults apply: sampled, and as long as the model allows."""
    assert parse(chat()) == Row(
        index=3,
        where="line 4",
        metadata={"custom_id": "request-1", "url": "/v1/chat/completions", "model": "some-model"},
        sampling=SamplingParams(temperature=1.0, max_tokens=2**31 - 1),
        id="request-1",
        messages=HELLO,
        model="some-model",
    )


def test_every_sampling_field():
    """The API's names and those of other servers all reach the sampling parameters."""
    same = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "ignore_eos": True, "n": 3, "min_tokens": 2}
    same |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5}
    others = {"top_k": -1, "max_tokens": 7, "max_completion_tokens": 9, "stop": "x", "stop_token_ids": [5], "seed": -2}
    others |= {"logit_bias": {"50256": -100}, "logprobs": True, "top_logprobs": 4}
    expected = {"top_k": 0, "max_tokens": 9, "stop": ("x",), "stop_token_ids": (5,), "seed": 2**64 - 2}
    expected |= {"logit_bias": ((50256, -100.0),), "logprobs": 4}
    assert parse(chat(**same, **others)).sampling == SamplingParams(**same, **expected)


@pytest.mark.parametrize(
    ("values", "logprobs", "prompt_logprobs"),
    [
        (chat(logprobs=True), 0, None),
        (chat(logprobs=True, top_logprobs=2), 2, None),
        (chat(logprobs=False), None, None),
        (chat(logprobs=False, top_logprobs=0), None, None),
        (text(logprobs=0), 0, None),
        (text(logprobs=5), 5, None),
        (text(logprobs=5, echo=False), 5, None),
        (text(logprobs=5, echo=True), 5, 5),
        (text(logprobs=0, echo=True), 0, 0),
        (text(echo=True), None, None),
        (text(logprobs=1, echo=True, prompt_logprobs=3), 1, 3),
    ],
)
def test_logprobs(values, logprobs, prompt_logprobs):
    """Chats say whether and how many, completions how many. An echoed prompt gets as many."""
    sampling = parse(values).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (logprobs, prompt_logprobs)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}},
            GrammarSpec("json_schema", '{"type":"null"}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
    ],
)
def test_grammars(body, expected):
    """The API's spelling and that of other servers both work, for chats and completions."""
    assert [parse(make(**body)).sampling.grammar for make in (chat, text)] == [expected, expected]


def test_flags_are_the_defaults():
    """Flags replace the API's defaults, and the body replaces the flags."""
    assert parse(chat(), temperature=0.0, max_tokens=5).sampling == SamplingParams(max_tokens=5)
    assert parse(chat(temperature=0.5), temperature=0.0).sampling.temperature == 0.5
    assert parse(chat(), logprobs=2, n=3).sampling.logprobs == 2
    assert parse(text(logprobs=1), logprobs=2).sampling.logprobs == 1


def test_a_flags_logprobs_of_an_echoed_prompt():
    """The lists cover the whole text, even if a flag requested them."""
    assert parse(text(echo=True), logprobs=2).sampling.prompt_logprobs == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Hello", ("Hello", None)), (["Hello"], ("Hello", None)), ([1, 2], (None, (1, 2))), ([[1, 2]], (None, (1, 2)))],
)
def test_prompts_of_completions(prompt, expected):
    """A text or token ids, alone or in a list of one."""
    row = parse(text(prompt))
    assert (row.prompt, row.prompt_token_ids, row.messages) == (*expected, None)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "b"], ("a", "b")),
        (["a", "a", "a"], ("a", "a", "a")),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_several_prompts(prompt, expected):
    """Each text or list of token ids is a prompt of its own."""
    row = parse(text(prompt))
    assert (row.prompts, row.prompt, row.prompt_token_ids, row.messages) == (expected, None, None, None)


def test_too_many_answers():
    """A line of a million prompts took 2.5 GB and minutes, and its answers came at once at the end."""
    for most in (text(["a"] * 16_384), text(["a"] * 16, n=1024), text([[1]] * 16_384)):
        assert isinstance(parse(most), Row)
    inputs = {**text(), "url": "/v1/embeddings", "body": {"input": ["a"] * 16_385}}
    for more, answers in ((text(["a"] * 16_385), 16_385), (text(["a"] * 17, n=1024), 17_408), (inputs, 16_385)):
        assert_failed(parse(more), "invalid_field", f"prompts and n make {answers} answers, more than 16384")


def test_a_suffix_of_several_prompts():
    """The suffix must not be dropped silently."""
    assert isinstance(parse(text(["a", "b"], suffix="c")), FailedRow)


def test_without_method_and_url():
    """Other services leave both out: the body then decides."""
    for values, url in ((chat(), "/v1/chat/completions"), (text(), "/v1/completions")):
        short = {"custom_id": "a", "body": values["body"]}
        assert parse(short).metadata == {"custom_id": "a", "url": url, "model": "some-model"}


def test_options_of_the_prompt():
    """Options of chats and options of texts both reach the row."""
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"a": 1}, "truncate_prompt_tokens": 5}
    assert parse(chat(**options)).options == PromptOptions(**options)
    assert parse(text(echo=True)).options == PromptOptions(echo=True)
    assert parse(text(suffix="x")).options == PromptOptions(suffix="x")


def test_fields_without_effect():
    """A hosted service's bookkeeping, and features that are switched off, must not fail a line."""
    service = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "flex"}
    off = {"stream": False, "n": 1, "best_of": 1, "logprobs": False, "top_logprobs": 0, "temperature": None}
    off |= {"tools": [], "tool_choice": "auto", "functions": [], "function_call": "none", "modalities": ["text"]}
    off |= {"logit_bias": {}, "frequency_penalty": 0, "repetition_penalty": 1, "presence_penalty": 0}
    row = parse(chat(**service, **off, response_format={"type": "text"}))
    assert row.ignored == ("user", "store", "metadata", "service_tier")
    assert replace(row, ignored=()) == parse(chat())


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ([], "invalid_field", "object"),
        ({"custom_id": 5, "body": {}}, "invalid_field", "custom_id"),
        ({"custom_id": "a", "body": []}, "invalid_field", "body"),
        ({**chat(), "method": "GET"}, "invalid_field", "method"),
        ({**chat(), "url": "/v1/moderations"}, "unsupported_url", "/v1/embeddings"),
        (chat(messages=[]), "missing_prompt", "messages"),
        (chat(messages="hi"), "invalid_field", "messages"),
        (chat(messages=[{"content": "no role"}]), "invalid_field", "role"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "video"}]}]),
            "invalid_messages",
            "content[0]: parts of type 'video' are not supported",
        ),
        (chat(temperature="warm"), "invalid_field", "temperature"),
        (chat(top_p=0), "invalid_sampling", "top_p"),
        (chat(stream=True), "unsupported_field", "stream"),
        (chat(tools=[{"type": "function"}]), "invalid_field", "tools"),
        (chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), "invalid_field", "custom"),
        (chat(tools=[tool("f"), tool("f")]), "invalid_field", "the name f is used twice"),
        (chat(tools=[tool("a b")]), "invalid_field", "a name has 1 to 64 letters"),
        (chat(tools=[tool("f")], tool_choice=tool("g")), "invalid_field", "no tool g"),
        (chat(tool_choice="required"), "invalid_field", "tool_choice"),
        (chat(functions=[{}]), "invalid_field", "name"),
        (chat(functions=[{"name": "f"}], tools=[tool("f")]), "invalid_field", "functions and tools"),
        (chat(function_call={"name": "f"}), "unsupported_field", "function_call"),
        (chat(modalities=["text", "audio"]), "unsupported_field", "modalities"),
        (text(best_of=2), "unsupported_field", "best_of"),
        (text(best_of=3, n=2), "unsupported_field", "best_of"),
        (chat(n=0), "invalid_sampling", "n must"),
        (chat(n="2"), "invalid_field", "n"),
        (chat(logprobs=2), "invalid_field", "logprobs of a chat must be true or false"),
        (text(logprobs=True), "invalid_field", "must be the number of likeliest tokens"),
        (chat(top_logprobs=2), "invalid_sampling", "top_logprobs needs logprobs"),
        (chat(logprobs=True, top_logprobs=21), "invalid_sampling", "logprobs must"),
        (text(logprobs=21), "invalid_sampling", "logprobs must"),
        (chat(presence_penalty=3), "invalid_sampling", "presence_penalty"),
        (chat(logit_bias={"the": 1}), "invalid_sampling", "logit_bias"),
        (chat(response_format={"type": "json_schema"}), "invalid_field", "json_schema.schema"),
        (chat(response_format={"type": "xml"}), "invalid_field", "response_format"),
        (chat(response_format={"type": "json_object"}, min_tokens=1), "invalid_sampling", "grammar"),
        (chat(guided_json={}, guided_regex="a"), "invalid_field", "keep one of guided_json, guided_regex"),
        (chat(guided_jsn={"type": "object"}), "unknown_field", "guided_jsn"),
        (chat(temprature=1), "unknown_field", "temprature"),
        (chat(prompt="hi"), "invalid_field", "prompt cannot be used with /v1/chat/completions"),
        (text(messages=HELLO), "invalid_field", "messages cannot be used with /v1/completions"),
        (text(""), "missing_prompt", "prompt"),
        (text(None), "missing_prompt", "prompt"),
        (text([]), "missing_prompt", "prompt"),
        (text(["a", ""]), "missing_prompt", "prompt"),
        (text([[1], []]), "missing_prompt", "prompt"),
        (text([1, "b"]), "invalid_field", "token ids"),
        (text([True]), "invalid_field", "token ids"),
        (text([[1], [1.5]]), "invalid_field", "token ids"),
        (text([[1], [[2]]]), "invalid_field", "token ids"),
        (text(["a", {"text": "b"}]), "invalid_field", "token ids"),
        (chat(echo=True), "invalid_field", "echo"),
        (chat(suffix="x"), "invalid_field", "suffix"),
        (text(suffix="x", echo=True), "invalid_field", "suffix"),
    ],
)
def test_refused(values, code, message):
    """The error has the line's own id and place, and its message names the field."""
    row = parse(values)
    assert_failed(row, code, message)
    assert (row.index, row.where) == (3, "line 4")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps(chat()), True),
        ("\n\n{broken\n" + json.dumps(chat()) + "\n", True),
        ('{"prompt":"a","custom_id":"b"}\n', False),
        ("{broken\n", False),
        ("", False),
        ("[1]", False),
    ],
)
def test_a_batch_is_told_by_its_first_line(tmp_path, content, expected):
    """Blank and broken lines before it do not count. Without a JSON line the file is not a batch."""
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    assert PromptReader(str(path), {}).is_batch is expected
    assert PromptReader(str(path), {}, "openai").is_batch
    assert not PromptReader(str(path), {}, "jsonl").is_batch


def test_a_batch_is_told_although_its_first_file_is_empty(tmp_path):
    """Only the first file was looked at: every request of the others then failed for want of a prompt."""
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").write_text(json.dumps(chat()))
    reader = PromptReader(str(tmp_path), {})
    assert reader.is_batch
    assert [row.id for row in reader] == ["request-1"]


def test_ids_are_unique(tmp_path):
    """Two requests with one custom_id would have answers that nobody can tell apart."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps({**chat(), "custom_id": name}) for name in ("a", "b", "a")))
    rows = list(PromptReader(str(path), {}))
    assert [getattr(row, "error", None) and row.error.code for row in rows] == [None, None, "duplicate_id"]


def test_is_request():
    """A request is an object with both fields."""
    assert is_request(chat())
    assert not any(map(is_request, [{"custom_id": "a"}, {"body": {}}, [], None, "custom_id body"]))


def hello(model, role, **body):
    """The request with which guides to batch files begin."""
    messages = [{"role": "system", "content": f"Be {role}."}, {"role": "user", "content": "Hello!"}]
    return {"model": model, "messages": messages, **body}


def numbered(url, *bodies):
    """Requests with the ids that those guides use."""
    return [
        {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies, start=1)
    ]


STEPS = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
                "additionalProperties": False,
            },
        },
        "final_answer": {"type": "string"},
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
}
WORDS = {
    "type": "object",
    "properties": {"categories": {"type": "array", "items": {"type": "string"}}, "summary": {"type": "string"}},
    "required": ["categories", "summary"],
    "additionalProperties": False,
}
SOLVE = [{"role": "system", "content": "Solve it step by step."}, {"role": "user", "content": "8x + 7 = -23"}]
LLAMA, GPT = "meta-llama/Meta-Llama-3-8B-Instruct", "gpt-4o-mini"


# Requests with the fields of the documentation named; the texts in them are ours.
DOCUMENTED = {
    "the API's guide of batches": numbered(
        CHAT,
        hello("gpt-3.5-turbo-0125", "helpful", max_tokens=1000),
        hello("gpt-3.5-turbo-0125", "unhelpful", max_tokens=1000),
    ),
    "the API's reference of batches": numbered(CHAT, hello("gpt-4o-mini", "helpful")),
    "the API's reference of chats": numbered(
        CHAT,
        {"model": GPT, "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        {"model": GPT, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2},
        {"model": GPT, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stream": False},
    ),
    "the API's reference of completions": numbered(
        TEXT,
        {"model": "gpt-3.5-turbo-instruct", "prompt": "Say this is a test", "max_tokens": 7, "temperature": 0},
        {"model": "davinci-002", "prompt": ["One.", "Two."], "max_tokens": 5, "n": 2, "logprobs": 5, "stop": None},
    ),
    "the API's guide of structured outputs": numbered(
        CHAT,
        {
            "model": "gpt-4o-2024-08-06",
            "messages": SOLVE,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "math_reasoning", "strict": True, "schema": STEPS},
            },
        },
    ),
    "the API's cookbook of batches": [
        {
            "custom_id": f"task-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": GPT,
                "temperature": 0.1,
                "response_format": response_format,
                "messages": [{"role": "system", "content": "Answer in JSON."}, {"role": "user", "content": "A film."}],
            },
        }
        for number, response_format in enumerate(
            [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "film", "schema": WORDS}}]
        )
    ],
    "vLLM's example of a batch": numbered(
        CHAT, hello(LLAMA, "helpful", max_completion_tokens=1000), hello(LLAMA, "unhelpful", max_completion_tokens=1000)
    ),
    "vLLM's tests of batches": numbered(
        CHAT,
        hello("NousResearch/Meta-Llama-3-8B-Instruct", "helpful", max_tokens=1000),
        hello("a model that is not there", "unhelpful", max_tokens=1000),
    ),
    "vLLM's guide of structured outputs": numbered(
        CHAT,
        {"model": LLAMA, "messages": HELLO, "structured_outputs": {"choice": ["positive", "negative"]}},
        {"model": LLAMA, "messages": HELLO, "structured_outputs": {"regex": r"\w+@\w+\.com\n"}, "stop": ["\n"]},
    ),
}


@pytest.mark.parametrize("source", DOCUMENTED)
def test_documented_requests_are_understood(source, tmp_path):
    """Files that run on other services must run here unchanged."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in DOCUMENTED[source]))
    reader = PromptReader(str(path), {})
    assert reader.is_batch
    rows = list(reader)
    assert [getattr(row, "error", None) for row in rows] == [None] * len(DOCUMENTED[source])
    assert [row.id for row in rows] == [line["custom_id"] for line in DOCUMENTED[source]]


def test_documented_requests_mean_what_they_say():
    """Lengths, log-probabilities and grammars must not be lost on the way."""
    rows = {source: [parse(line) for line in lines] for source, lines in DOCUMENTED.items()}
    assert {row.sampling.max_tokens for row in rows["the API's guide of batches"]} == {1000}
    assert {row.sampling.max_tokens for row in rows["vLLM's example of a batch"]} == {1000}
    assert [row.sampling.logprobs for row in rows["the API's reference of chats"]] == [None, 2, None]
    first, second = rows["the API's reference of completions"]
    assert (first.prompt, first.sampling) == ("Say this is a test", SamplingParams(max_tokens=7))
    assert (second.prompts, second.sampling.n, second.sampling.logprobs) == (("One.", "Two."), 2, 5)
    (row,) = rows["the API's guide of structured outputs"]
    assert json.loads(row.sampling.grammar.source) == STEPS
    kinds = [row.sampling.grammar.kind for row in rows["the API's cookbook of batches"]]
    kinds += [row.sampling.grammar.kind for row in rows["vLLM's guide of structured outputs"]]
    assert kinds == ["json_object", "json_schema", "choice", "regex"]
