"""Every field of the clients' types and of other servers has a rule, and the page of the documentation says which."""

import re
from itertools import permutations
from pathlib import Path

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from rosebatch.io.openai.chat import CHAT
from rosebatch.io.openai.completions import COMPLETIONS
from rosebatch.io.openai.fields import IGNORED, REFUSED, GenerationBody
from rosebatch.io.openai.lines import parse_request
from rosebatch.io.rows import FailedRow
from tests.helpers.results import assert_failed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai_batch.md"
SERVED = frozenset(GenerationBody.__struct_fields__) | {"prompt"}
# Of vLLM 0.33's requests for chats and completions, and of SGLang 0.5's sampling parameters.
OTHERS = [
    *("add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt"),
    *("chat_template", "chat_template_kwargs", "continue_final_message", "custom_params", "documents"),
    *("ebnf", "echo", "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json"),
    *("guided_regex", "guided_whitespace_pattern", "ignore_eos", "include_reasoning", "include_stop_str_in_output"),
    *("json_schema", "length_penalty", "logits_processors", "logprob_token_ids", "max_new_tokens"),
    *("media_io_kwargs", "min_new_tokens", "min_p", "min_tokens", "mm_processor_kwargs", "no_stop_trim"),
    *("priority", "prompt_embeds", "prompt_logprobs", "regex", "repetition_detection", "repetition_penalty"),
    *("request_id", "return_token_ids", "return_tokens_as_token_ids", "sampling_seed", "session_id"),
    *("skip_special_tokens", "spaces_between_special_tokens", "stop_regex", "stop_token_ids", "stream_interval"),
    *("structural_tag", "structured_outputs", "thinking_token_budget", "top_k", "truncate_prompt_tokens"),
    *("truncation_side", "use_beam_search", "watermarking"),
]


def line(url, **body):
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if url == CHAT.url else {"prompt": "Hi"}
    values = {"custom_id": "a", "url": url, "body": {**prompt, **body}}
    return parse_request(values, index=0, where="line 1", defaults={})


def fields_of(params):
    return {name for kind in params.__mro__ for name in getattr(kind, "__annotations__", {})} | {"stream"}


@pytest.mark.parametrize(
    "names",
    [fields_of(chats.CompletionCreateParamsBase), fields_of(completions.CompletionCreateParamsBase), OTHERS],
    ids=["chats", "completions", "others"],
)
def test_every_known_field_has_a_rule(names):
    """A new field of the API would be an unknown one, and fail lines that its own service serves."""
    assert set(names) - SERVED - set(IGNORED) - set(REFUSED) == set()


def test_no_field_has_two_rules():
    """A field that is served and refused would be refused."""
    assert not SERVED & IGNORED.keys()
    assert not SERVED & REFUSED.keys()
    assert not IGNORED.keys() & REFUSED.keys()


def test_the_page_lists_the_rules():
    """What is ignored or refused, and why, is found there and nowhere else."""
    page = PAGE.read_text().partition("### Responses")[0]
    found = re.findall(r"^\| `(\w+)` \| (ignored|refused)[^|]*\| ([^|]+) \|$", page, re.MULTILINE)
    ignored = {name: why for name, rule, why in found if rule == "ignored"}
    refused = {name: why for name, rule, why in found if rule == "refused"}
    assert ignored == IGNORED
    assert refused == {name: field.why for name, field in REFUSED.items()}


@pytest.mark.parametrize("url", [CHAT.url, COMPLETIONS.url])
def test_null_is_as_if_absent(url):
    """A client's ``model_dump()`` writes null for everything that was not set."""
    names = (SERVED - {"messages", "prompt"}) | IGNORED.keys() | REFUSED.keys()
    assert line(url, **dict.fromkeys(names)) == line(url)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields(name):
    """The message says what to do; values that change nothing pass."""
    row = line(COMPLETIONS.url, **{name: "unheard of"})
    assert isinstance(row, FailedRow)
    assert (row.error.code, row.error.message) == ("unsupported_field", f"{name} is not supported: {REFUSED[name].why}")
    for neutral in REFUSED[name].neutral:
        assert line(COMPLETIONS.url, **{name: neutral}) == line(COMPLETIONS.url)


@pytest.mark.parametrize("names", [*permutations(["audio", "stop_regex", "ebnf"])])
def test_the_first_refused_field_is_told(names):
    """Which one it was depended on PYTHONHASHSEED: the error rows of two runs differed."""
    assert line(CHAT.url, **dict.fromkeys(names, "x")).error.message.startswith(f"{names[0]} is not supported")


@pytest.mark.parametrize("name", IGNORED)
def test_ignored_fields(name):
    """They are named in the row, so that the report can count them."""
    assert line(CHAT.url, **{name: "anything"}).ignored == (name,)


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"max_new_tokens": 5}, "max_tokens", 5),
        ({"max_new_tokens": 5, "max_tokens": 6}, "max_tokens", 6),
        ({"min_new_tokens": 2}, "min_tokens", 2),
        ({"sampling_seed": -1}, "seed", 2**64 - 1),
        ({"no_stop_trim": True}, "include_stop_str_in_output", True),
        ({"thinking_token_budget": 9}, "max_reasoning_tokens", 9),
        ({"max_tokens": 128.0, "n": 2.0}, "max_tokens", 128),
        ({"seed": 5.0}, "seed", 5),
        ({"bad_words": ["a b"]}, "bad_words", ("a b",)),
        ({"allowed_token_ids": [1.0, 2]}, "allowed_token_ids", (1, 2)),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
    ],
)
def test_other_names_and_integral_floats(body, field, value):
    """Files written for other servers, or by writers that know no integers, mean the same here."""
    assert getattr(line(CHAT.url, **body).sampling, field) == value


def test_a_fraction_is_no_integer():
    """Rounding it would hide a mistake."""
    row = line(CHAT.url, max_tokens=1.5)
    assert (row.error.code, "max_tokens" in row.error.message) == ("invalid_field", True)


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type":"null"}'),
        ({"json_schema": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]'),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
    ],
)
def test_grammars_by_other_names(body, kind, source):
    """Each is one field of ``structured_outputs``."""
    grammar = line(CHAT.url, **body).sampling.grammar
    assert (grammar.kind, grammar.source) == (kind, source)


@pytest.mark.parametrize(
    "url",
    [
        "https://api.openai.com/v1/chat/completions",
        "http://localhost:8000/proxy/v1/chat/completions/",
        "/v1/chat/completions?api-version=2026-01-01",
        "/chat/completions",
    ],
)
def test_urls_are_cut_to_their_path(url):
    """Files written for a server name it."""
    values = {"custom_id": "a", "url": url, "body": {"messages": [{"role": "user", "content": "Hi"}]}}
    assert parse_request(values, index=0, where="line 1", defaults={}).metadata["url"] == CHAT.url


def test_a_url_that_is_none():
    """Splitting it raised a ValueError: an unexpected error."""
    row = line("http://[::1/v1/chat/completions")
    assert (row.error.code, row.error.message) == (
        "unsupported_url",
        "url http://[::1/v1/chat/completions is no URL (Invalid IPv6 URL)",
    )


@pytest.mark.parametrize("name", ["dimensions", "temperature"])
def test_nulls_do_not_tell_what_an_input_is_for(name):
    """A null is as if absent, but the body went to the endpoint that has the field."""
    row = parse_request({"custom_id": "a", "body": {"input": "x", name: None}}, index=0, where="line 1", defaults={})
    assert row.error.code == "unsupported_url"


def test_efforts_go_to_the_template():
    """The template decides whether they mean something; what a row says to the template itself wins."""
    row = line(CHAT.url, reasoning_effort="low", verbosity="high", chat_template_kwargs={"verbosity": "low", "x": 1})
    assert row.options.chat_template_kwargs == {"reasoning_effort": "low", "verbosity": "low", "x": 1}


@pytest.mark.parametrize("name", ["reasoning_effort", "verbosity"])
def test_a_completion_has_no_template_for_efforts(name):
    """They were dropped without a word."""
    assert_failed(line(COMPLETIONS.url, **{name: "low"}), "invalid_field", f"{name} needs messages")


def test_nulls_in_messages_are_left_out():
    """A template may ask whether a message has tool calls, and null is none."""
    message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None, "name": None}
    refusal = {
        "role": "assistant",
        "content": [{"type": "refusal", "refusal": "I won't"}, {"type": "text", "text": "a"}],
    }
    row = line(CHAT.url, messages=[message, refusal])
    assert row.messages == [{"role": "assistant", "content": None}, {"role": "assistant", "content": "I won't\na"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [("a b", "a b"), ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"), ("", ""), ([], "")],
)
def test_prediction(content, text):
    """A text, or parts of one; it was ignored."""
    row = line(CHAT.url, prediction={"type": "content", "content": content})
    assert (row.prediction, row.ignored) == (text, ())


@pytest.mark.parametrize("value", ["a b", {"type": "content"}, {"type": "image", "content": "a"}, {"content": 5}])
def test_a_prediction_of_another_shape_is_an_error(value):
    assert line(CHAT.url, prediction=value).error.code == "invalid_field"
