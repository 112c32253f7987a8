"""One line of the input: what is accepted, what is refused, and with which code."""

import pytest

from rosebatch.core.sampling_params import MAX_SAMPLES, SamplingParams
from rosebatch.io.fields import PromptOptions
from rosebatch.io.parse import Record, RowParser
from rosebatch.io.rows import FailedRow, Row, parse_row
from rosebatch.io.sampling_fields import sampling_params
from rosebatch.io.tasks.registry import TASKS
from tests.helpers.results import assert_failed


def failure(row):
    assert isinstance(row, FailedRow)
    return row.error.code, row.error.message


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_line_that_is_no_object(task):
    """Valid JSON of another shape must fail one row, not raise AttributeError."""
    parser = RowParser(False, {}, task=task)
    for line, kind in {b"[1]": "list", b'"text"': "str", b"3": "int", b"null": "NoneType", b"true": "bool"}.items():
        row = parser.parse(Record(0, "line 1", line, 1))
        assert failure(row) == ("invalid_line", f"expected a JSON object, got {kind}")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("id", [1.5, True, ["a"], {"a": 1}]),
        ("prompt", [1, ["a"], {"text": "a"}, True]),
        ("messages", ["hi", {"role": "user"}, ["hi"], [{"content": "no role"}], [{"role": 1, "content": "x"}]]),
        ("prompt_token_ids", ["1", 1, ["1"], [1.5], [True], [None]]),
        ("temperature", ["0.5", True, [0.5]]),
        ("top_k", ["1", 1.5, True]),
        ("top_p", ["0.5", True]),
        ("min_p", ["0.5", True]),
        ("max_tokens", ["5", 1.5, True]),
        ("seed", ["5", 1.5, True]),
        ("stop", [5, ["a", 5], {"a": 1}, True]),
        ("stop_token_ids", [5, ["a"], [1.5], "5"]),
        ("ignore_eos", [1, 0, "true"]),
        ("n", ["2", 1.5, True, [2]]),
        ("min_tokens", ["2", 1.5, True]),
        ("presence_penalty", ["1", True, [1]]),
        ("frequency_penalty", ["1", True]),
        ("repetition_penalty", ["1", True]),
        ("logit_bias", [5, [[5, 1]], {"5": "1"}, {"5": True}, {"5": None}]),
        ("logprobs", ["true", 1.5, {}]),
        ("top_logprobs", [True, "2", 1.5]),
        ("prompt_logprobs", [True, "2", 1.5]),
        ("response_format", ["json", {}, {"type": "xml"}, {"type": "json_schema", "json_schema": "{}"}]),
        ("structured_outputs", ["json", [], {"json": 5}, {"regex": 5}, {"choice": "yes"}, {"choice": [1]}]),
        ("structured_outputs", [{"grammar": 5}, {"regexp": "a"}, {"json_object": "yes"}]),
        ("suffix", [5, ["x"], True]),
    ],
)
def test_a_wrong_type_is_refused_and_named(parse, field, values):
    """'5' must not become 5, nor true 1: the error names the field."""
    for value in values:
        assert_failed(parse({"prompt": "x", field: value}), "invalid_field", field)


@pytest.mark.parametrize(
    "field",
    [
        *("id", "temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("n", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs"),
        *("top_logprobs", "prompt_logprobs", "response_format", "structured_outputs", "suffix"),
    ],
)
def test_null_means_absent(parse, field):
    """Exporters write null for unset fields: the run's default must apply."""
    row = parse({"prompt": "x", "messages": None, "prompt_token_ids": None, field: None}, max_tokens=9, top_k=3)
    assert row.sampling == SamplingParams(max_tokens=9, top_k=3)
    assert (row.prompt, row.messages, row.prompt_token_ids, row.sampling.seed) == ("x", None, None, None)


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ({"conversations": []}, "none; conversations is ShareGPT's form: write messages with role and content"),
        ({}, "none; --prompt-column or --prompt-template says which fields have it"),
        # A table has null for what a row of JSONL leaves out: their messages differed.
        ({"prompt": None}, "none; --prompt-column or --prompt-template says which fields have it"),
        (
            {"conversations": None, "messages": None},
            "none; --prompt-column or --prompt-template says which fields have it",
        ),
        ({"id": 1, "text": "x"}, "none; --prompt-column or --prompt-template says which fields have it"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompt and prompt_token_ids"),
        ({"prompt": "", "messages": [{"role": "user"}]}, "prompt and messages"),
    ],
)
def test_exactly_one_prompt(parse, values, got):
    """Of two kinds of prompts, one must not win silently. A prompt under another name had no way out."""
    message = f"expected one of prompt, messages, prompt_token_ids; got {got}"
    assert failure(parse(values)) == ("missing_prompt", message)


@pytest.mark.parametrize("values", [{"prompt": ""}, {"messages": []}, {"prompt_token_ids": []}])
def test_empty_prompt(parse, values):
    """There is nothing to compute the first token from."""
    assert failure(parse(values)) == ("empty_prompt", f"{next(iter(values))} is empty")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 10**29),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("n", 0),
        ("n", -1),
        ("n", MAX_SAMPLES + 1),
        ("n", 10**29),
        ("min_tokens", -1),
        ("min_tokens", 10),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", float("inf")),
        ("logit_bias", {"5": float("inf")}),
        ("logit_bias", {"5": float("nan")}),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_an_impossible_sampling_value(parse, field, value):
    """It would crash a kernel or loop for ever in mid-run; NaN passes most comparisons."""
    code, message = failure(parse({"prompt": "x", field: value}, max_tokens=9))
    assert code == "invalid_sampling" and message.startswith(f"{field} must be ")


# Python's int() takes all but the first three, and the last two would be two biases of one token.
NO_TOKEN_IDS = ("a", "", "1.5", "10_0", "\u0661\u0660", " 7 ", "+7", "07", "05")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({"logit_bias": {"5": 1, key: 1}}, "logit_bias must be a mapping of token ids") for key in NO_TOKEN_IDS),
        ({"allowed_token_ids": []}, "allowed_token_ids must be made of integers >= 0, at least one"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs needs logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "logprobs must be in"),
        ({"top_logprobs": 3, "logprobs": 1}, "but logprobs is a number"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens must be in"),
        ({"min_tokens": 4, "structured_outputs": {"regex": "a+"}}, "min_tokens and a grammar"),
        ({"min_tokens": 4, "response_format": {"type": "json_object"}}, "min_tokens and a grammar"),
    ],
)
def test_values_that_are_impossible_together(parse, values, message):
    """Each is possible alone: one must not win silently."""
    assert_failed(parse({"prompt": "x", **values}), "invalid_sampling", message)


def test_an_impossible_default_is_refused_too():
    """The command line checks its flags with the same function."""
    assert sampling_params({"stop": "a", "top_k": -1}) == SamplingParams(stop=("a",), top_k=0)


def test_the_largest_seed_is_allowed(parse):
    """Guards against an off-by-one at 2^64."""
    assert parse({"prompt": "x", "seed": 2**64 - 1}).sampling.seed == 2**64 - 1


def test_sampling_fields_reach_the_parameters(parse):
    """A field missing from the table of sampling fields would be ignored silently."""
    fields = {"temperature": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "max_tokens": 7, "seed": 8, "ignore_eos": True}
    row = parse({"prompt": "x", **fields, "stop_token_ids": [3, 4], "stop": ["a", "b"]})
    assert row.sampling == SamplingParams(**fields, stop_token_ids=(3, 4), stop=("a", "b"))


def test_top_k_minus_one_keeps_all(parse):
    """vLLM and SGLang write it this way."""
    assert parse({"prompt": "x", "top_k": -1}, top_k=7).sampling.top_k == 0


def test_stop_as_string_or_list(parse):
    """A string must not be split into its characters."""
    assert parse({"prompt": "x", "stop": "END"}).sampling.stop == ("END",)
    assert parse({"prompt": "x", "stop": ["END", "\n"]}).sampling.stop == ("END", "\n")


def test_a_lines_own_fields_win_over_defaults(parse):
    """Falsy values count too: temperature 0, an empty stop list, ignore_eos false."""
    own = {"temperature": 0, "stop": [], "ignore_eos": False, "top_k": 0}
    row = parse({"prompt": "x", **own}, temperature=0.5, stop=["a"], ignore_eos=True, top_k=5, max_tokens=3)
    assert row.sampling == SamplingParams(max_tokens=3)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"n": 3}, {"n": 3}),
        ({"n": MAX_SAMPLES}, {"n": MAX_SAMPLES}),
        ({"min_tokens": 4, "max_tokens": 4}, {"min_tokens": 4, "max_tokens": 4}),
        ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
        ({"frequency_penalty": -2}, {"frequency_penalty": -2.0}),
        ({"repetition_penalty": 0.5}, {"repetition_penalty": 0.5}),
        ({"logit_bias": {"5": -100, "0": 0.5}}, {"logit_bias": ((5, -100.0), (0, 0.5))}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": True, "top_logprobs": 0}, {"logprobs": 0}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
        ({"prompt_logprobs": 20}, {"prompt_logprobs": 20}),
    ],
)
def test_fields_of_choices_penalties_and_logprobs(parse, values, expected):
    """The ends of the ranges are allowed, a count of 0 is a request, and no such field is carried through."""
    row = parse({"prompt": "x", **values})
    assert (row.sampling, row.metadata) == (SamplingParams(**expected), {})


def test_fields_with_values_that_change_nothing(parse):
    """Exporters write every field of the API at its neutral value: no error, and none carried through."""
    neutral = {"n": 1, "logprobs": False, "top_logprobs": 0, "prompt_logprobs": None, "min_tokens": 0, "suffix": ""}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
    neutral |= {"response_format": {"type": "text"}, "structured_outputs": {}}
    row = parse({"prompt": "x", "id": 7, **neutral})
    assert isinstance(row, Row)
    assert (row.metadata, row.sampling, row.options) == ({"id": 7}, SamplingParams(), PromptOptions())


def test_best_of_is_refused(parse):
    """A sampling field that is ignored silently gives wrong data without a trace."""
    assert_failed(parse({"prompt": "x", "best_of": 3}), "unsupported_field")


def test_carried_fields_are_untouched(parse):
    """Unknown fields come through unchanged, with numbers of any size and all nesting."""
    extra = {"id": "a", "big": 123456789012345678901234567890, "nested": {"a": [1, None, {"b": "é"}]}, "": 0}
    assert parse({**extra, "prompt": "x", "temperature": 1.0, "stop": "s", "logprobs": False}).metadata == extra


def test_a_failed_row_keeps_its_carried_fields(parse):
    """Without the id nobody finds the line again."""
    row = parse({"id": "a", "topic": "t", "prompt": "x", "max_tokens": "many"})
    assert isinstance(row, FailedRow) and row.metadata == {"id": "a", "topic": "t"}


def test_message_content_as_text_parts(parse):
    """OpenAI's list form: parts are joined by line breaks; other keys go to the template."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts, "name": "n"}, {"role": "assistant", "content": None}]
    assert parse({"messages": messages}).messages == [
        {"role": "user", "content": "one\ntwo", "name": "n"},
        {"role": "assistant", "content": None},
    ]


def test_no_content_has_one_place(parse):
    """A null stood where JSON had it, and last where a table lost it: templates that print messages told them apart."""
    calls = [{"function": {"name": "f"}}]
    given = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "assistant", "tool_calls": calls}]
    null, absent = parse({"messages": given}).messages
    assert list(null.items()) == list(absent.items()) == list(given[0].items())


_TYPES = "types of parts are text, image_url, input_image, image, image_pil"


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "video_url", "video_url": {"url": "x"}}, f": parts of type 'video_url' are not supported: {_TYPES}"),
        ({"type": "file", "file": {}}, f": parts of type 'file' are not supported: {_TYPES}"),
        ({"type": ["image"]}, f": parts of type ['image'] are not supported: {_TYPES}"),
        ({"type": "text"}, ".text must be a text"),
        ({"type": "text", "text": 5}, ".text must be a text"),
        ({}, f": a part without a type is not supported: {_TYPES}"),
    ],
)
def test_message_parts_that_are_not_text(parse, part, told):
    """A film must not be dropped from a question about it. The place was not told, nor that images are read."""
    row = parse({"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]})
    assert failure(row) == ("invalid_messages", f"messages[0].content[1]{told}")


def test_token_ids_are_a_tuple(parse):
    """Requests are hashable values; the engine refuses ids out of range."""
    assert parse({"prompt_token_ids": [0, 5, -1]}).prompt_token_ids == (0, 5, -1)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**CHAT}, {}),
        ({**CHAT, "continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
        ({**CHAT, "chat_template_kwargs": {"a": False}}, {"chat_template_kwargs": {"a": False}}),
        ({"prompt": "a", "truncate_prompt_tokens": 3, "echo": True}, {"truncate_prompt_tokens": 3, "echo": True}),
        ({"prompt_token_ids": [1], "echo": False}, {}),
        ({"prompt": "a", "suffix": "b"}, {"suffix": "b"}),
    ],
)
def test_options_of_the_prompt(parse, values, expected):
    """Options are applied, and not carried through to the result."""
    row = parse(values)
    assert (row.options, row.metadata) == (PromptOptions(**expected), {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**CHAT, "echo": True}, "echo cannot be used with messages"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message needs messages"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs needs messages"),
        ({**CHAT, "continue_final_message": True, "add_generation_prompt": True}, "cannot be used together"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be >= 1"),
        ({**CHAT, "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({**CHAT, "suffix": "b"}, "suffix cannot be used with messages"),
        ({"prompt": "a", "suffix": "b", "echo": True}, "echo and suffix cannot be used together"),
        ({"prompt_token_ids": [1], "suffix": "b"}, "suffix needs a prompt given as text"),
    ],
)
def test_options_that_do_not_go_together(parse, values, message):
    """No option is ignored silently."""
    assert_failed(parse(values), "invalid_field", message)


def test_a_float_in_a_template_or_a_schema_stays_one():
    """4.0 in place of an integer elsewhere in the row made it 4 there too."""
    kwargs, schema = {"x": 4.0, "y": [5.0]}, {"type": "number", "const": 4.0}
    values = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": kwargs, "max_tokens": 4.0}
    row = parse_row(values | {"structured_outputs": {"json": schema}}, index=0, where="line 1", defaults={})
    assert row.sampling.max_tokens == 4
    assert repr(row.options.chat_template_kwargs) == repr(kwargs)
    assert '"const":4.0' in row.sampling.grammar.source
