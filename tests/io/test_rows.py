"""One line of the input: what is accepted, what is refused, and with which code."""

import pytest

from rosebatch.io.rows import RESULT_FIELDS, FailedRow, PromptOptions, PromptRow, sampling_params
from rosebatch.request import SamplingParams


def failure(row):
    assert isinstance(row, FailedRow)
    return row.error.code, row.error.message


@pytest.mark.parametrize(
    ("values", "kind"), [([1], "list"), ("text", "str"), (3, "int"), (None, "NoneType"), (True, "bool")]
)
def test_a_line_that_is_no_object(parse, values, kind):
    """Valid JSON of another shape must cost one row, not raise AttributeError."""
    assert failure(parse(values)) == ("invalid_line", f"expected a JSON object, got {kind}")


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
    ],
)
def test_a_wrong_type_is_refused_and_named(parse, field, values):
    """No silent coercion, '5' to 5 or true to 1: the mistake is the user's to see, with the name of the field."""
    for value in values:
        code, message = failure(parse({"prompt": "x", field: value}))
        assert code == "invalid_field"
        assert field in message


@pytest.mark.parametrize(
    "field",
    ["id", "temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos"],
)
def test_null_means_absent(parse, field):
    """Exporters write null for fields that are not set; the run's default must hold then."""
    row = parse({"prompt": "x", "messages": None, "prompt_token_ids": None, field: None}, max_tokens=9, top_k=3)
    assert row.sampling == SamplingParams(max_tokens=9, top_k=3)
    assert (row.prompt, row.messages, row.prompt_token_ids, row.has_seed) == ("x", None, None, False)


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ({}, "none"),
        ({"prompt": None}, "none"),
        ({"id": 1, "text": "x"}, "none"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompt and prompt_token_ids"),
        ({"prompt": "", "messages": [{"role": "user"}]}, "prompt and messages"),
    ],
)
def test_exactly_one_prompt(parse, values, got):
    """One of several prompts must not win silently."""
    message = f"expected one of prompt, messages, prompt_token_ids; got {got}"
    assert failure(parse(values)) == ("missing_prompt", message)


@pytest.mark.parametrize("values", [{"prompt": ""}, {"messages": []}, {"prompt_token_ids": []}])
def test_empty_prompt(parse, values):
    """Nothing to compute the first token from."""
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
    ],
)
def test_an_impossible_sampling_value(parse, field, value):
    """Such a value would crash a kernel or loop for ever in the middle of a run; NaN passes most comparisons."""
    code, message = failure(parse({"prompt": "x", field: value}))
    assert code == "invalid_sampling"
    assert message.startswith(f"{field} must be ")


def test_an_impossible_default_is_refused_too():
    """The command line checks its flags with the same function."""
    assert sampling_params({"stop": "a", "top_k": -1}) == SamplingParams(stop=("a",), top_k=0)


def test_the_largest_seed_is_allowed(parse):
    """The off-by-one at 2^64."""
    assert parse({"prompt": "x", "seed": 2**64 - 1}).sampling.seed == 2**64 - 1


def test_sampling_fields_reach_the_parameters(parse):
    """A field left out of the table of sampling fields would be ignored without a word."""
    fields = {
        "temperature": 1,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.25,
        "max_tokens": 7,
        "seed": 8,
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
    }
    row = parse({"prompt": "x", **fields, "stop": ["a", "b"]})
    assert row.sampling == SamplingParams(**{**fields, "stop_token_ids": (3, 4), "stop": ("a", "b")})
    assert row.has_seed


def test_top_k_minus_one_keeps_all(parse):
    """vLLM's and SGLang's way to say so."""
    assert parse({"prompt": "x", "top_k": -1}, top_k=7).sampling.top_k == 0


def test_stop_as_string_or_list(parse):
    """A string must not be taken apart into its characters."""
    assert parse({"prompt": "x", "stop": "END"}).sampling.stop == ("END",)
    assert parse({"prompt": "x", "stop": ["END", "\n"]}).sampling.stop == ("END", "\n")


def test_a_lines_own_fields_win_over_defaults(parse):
    """Falsy values included: temperature 0, an empty stop list and ignore_eos false are choices too."""
    own = {"temperature": 0, "stop": [], "ignore_eos": False, "top_k": 0}
    row = parse({"prompt": "x", **own}, temperature=0.5, stop=["a"], ignore_eos=True, top_k=5, max_tokens=3)
    assert row.sampling == SamplingParams(max_tokens=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("logprobs", True),
        ("logprobs", 5),
        ("top_logprobs", 2),
        ("prompt_logprobs", 1),
        ("min_tokens", 4),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_unsupported_fields_are_refused(parse, field, value):
    """A sampling field that is ignored silently gives wrong data without a trace."""
    assert failure(parse({"prompt": "x", field: value})) == ("unsupported_field", f"{field} is not supported yet")


def test_unsupported_fields_with_values_that_change_nothing(parse):
    """Exporters write every field of the API, most at their neutral value; they are not carried into results."""
    neutral = {
        "n": 1,
        "best_of": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "prompt_logprobs": None,
        "min_tokens": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
    }
    row = parse({"prompt": "x", "id": 7, **neutral})
    assert isinstance(row, PromptRow)
    assert row.metadata == {"id": 7}


def test_carried_fields_are_untouched(parse):
    """Everything without a meaning comes through as it was, numbers of any size and all nesting included."""
    extra = {"id": "a", "big": 123456789012345678901234567890, "nested": {"a": [1, None, {"b": "é"}]}, "": 0}
    row = parse({**extra, "prompt": "x", "temperature": 1.0, "stop": "s", "logprobs": False})
    assert row.metadata == extra


def test_fields_of_an_earlier_result_are_not_carried(parse):
    """Feeding a run's output into the next: a stale text or error would stand beside the new result."""
    row = parse({"prompt": "x", "kept": 1, **dict.fromkeys(RESULT_FIELDS, "old")})
    assert row.metadata == {"kept": 1}


def test_a_failed_row_keeps_its_carried_fields(parse):
    """Without the id nobody finds the line again."""
    row = parse({"id": "a", "topic": "t", "prompt": "x", "max_tokens": "many"})
    assert isinstance(row, FailedRow)
    assert row.metadata == {"id": "a", "topic": "t"}


def test_message_content_as_text_parts(parse):
    """OpenAI's list form: the parts joined by line breaks; other keys of a message are for the template."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts, "name": "n"}, {"role": "assistant", "content": None}]
    assert parse({"messages": messages}).messages == [
        {"role": "user", "content": "one\ntwo", "name": "n"},
        {"role": "assistant", "content": None},
    ]


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"type": "text", "text": 5}, {}]
)
def test_message_parts_that_are_not_text(parse, part):
    """An image must not be dropped silently from the question about it."""
    row = parse({"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]})
    assert failure(row) == ("invalid_messages", "message content may hold text parts only")


def test_token_ids_are_a_tuple(parse):
    """Requests are hashable values; ids out of range are the engine's to refuse."""
    assert parse({"prompt_token_ids": [0, 5, -1]}).prompt_token_ids == (0, 5, -1)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**CHAT}, {}),
        ({**CHAT, "continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
        (
            {**CHAT, "chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"prompt": "a", "truncate_prompt_tokens": 3, "echo": True}, {"truncate_prompt_tokens": 3, "echo": True}),
        ({"prompt_token_ids": [1], "echo": False}, {}),
    ],
)
def test_options_of_the_prompt(parse, values, expected):
    """Understood, and not carried through to the result."""
    row = parse(values)
    assert row.options == PromptOptions(**expected)
    assert row.metadata == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**CHAT, "echo": True}, "echo has no meaning for messages"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message needs messages"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs needs messages"),
        ({**CHAT, "continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be >= 1"),
        ({**CHAT, "chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_options_that_do_not_go_together(parse, values, message):
    """Truncation and the like are never ignored silently."""
    row = parse(values)
    assert row.error.code == "invalid_field"
    assert message in row.error.message
