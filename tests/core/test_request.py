"""Sampling parameters, requests and completions: what the engine is asked and what it answers."""

import math

import pytest
from msgspec import structs

from rosebatch.core.request import LOGPROB_BYTES, Completion, Logprobs, PackedLogprobs, Request
from rosebatch.core.sampling_params import GREEDY, MAX_LOGPROBS, MAX_SAMPLES, SamplingParams
from rosebatch.core.structured_outputs import GrammarSpec


def test_defaults_are_greedy_without_filters():
    params = SamplingParams()
    assert (params.greedy, params.adjusts, params.penalizes) == (True, False, False)
    assert (params.n, params.min_tokens, params.logprobs, params.prompt_logprobs, params.grammar) == (1, 0, *[None] * 3)
    assert (params.top_k, params.top_p, params.min_p, params.seed, params.max_tokens) == (0, 1.0, 0.0, None, 512)
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be >= 0, got -0.1"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -2}, "top_k must be >= 0 (0 keeps all tokens), got -2"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"seed": -1}, "seed must be in [0, 2^64), got -1"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ("a", "")}, "stop must be made of non-empty strings, got ['a', '']"),
        ({"stop": ("a", 5)}, "stop must be made of non-empty strings, got ['a', 5]"),
        ({"stop": "\ud800"}, r"stop must be made of non-empty strings, got ['\ud800']"),
        ({"bad_words": ["\udcff"]}, "bad_words must be made of texts with more than white space"),
        ({"stop": ""}, "stop must be made of non-empty strings, got ['']"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids must be made of integers >= 0, got [3, -1]"),
        ({"stop_token_ids": (3, "4")}, "stop_token_ids must be made of integers >= 0, got [3, '4']"),
        ({"stop_token_ids": (3, True)}, "stop_token_ids must be made of integers >= 0, got [3, True]"),
        ({"n": 0}, f"n must be in [1, {MAX_SAMPLES}], got 0"),
        ({"n": MAX_SAMPLES + 1}, "n must be"),
        ({"min_tokens": -1}, "min_tokens must be in [0, max_tokens], got -1"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens must be in [0, max_tokens], got 4"),
        ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2], got -2.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in [1e-9, 1e9], got 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"logit_bias": ((5, math.inf),)}, "logit_bias must be made of numbers in [-1e28, 1e28]"),
        ({"logit_bias": ((5, math.nan),)}, "logit_bias"),
        # Their quotient or product with a logit is infinite in fp32, and its softmax NaN.
        ({"logit_bias": ((5, 1e29),)}, "logit_bias"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"logprobs": MAX_LOGPROBS + 1}, f"logprobs must be in [0, {MAX_LOGPROBS}], got {MAX_LOGPROBS + 1}"),
        ({"logprobs": -1}, "logprobs must be"),
        ({"prompt_logprobs": MAX_LOGPROBS + 1}, "prompt_logprobs must be"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be"),
    ],
)
def test_values_outside_their_range_are_named(values, message):
    with pytest.raises(ValueError, match="must be") as caught:
        SamplingParams(**values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "0.5"}, "temperature must be a number, got '0.5'"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"top_p": True}, "top_p must be a number, got True"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"n": True}, "n must be an integer, got True"),
        ({"n": None}, "n must be an integer, got None"),
        ({"max_tokens": "16"}, "max_tokens must be an integer or None, got '16'"),
        ({"seed": 1.0}, "seed must be an integer or None, got 1.0"),
        ({"logprobs": True}, "logprobs must be an integer or None, got True"),
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"logit_bias": [(5, 1.0)]}, "logit_bias must be a mapping of token ids to numbers, got [(5, 1.0)]"),
    ],
)
def test_values_of_another_type_are_named(values, message):
    """Scripts are not typed: a text would fail far from here, where nobody knows whose it is."""
    with pytest.raises(ValueError, match="must be") as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


def test_values_at_the_edge_of_their_range():
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, max_tokens=1, seed=0)
    SamplingParams(temperature=100.0, top_k=10**9, top_p=1e-9, min_p=1, seed=2**64 - 1)
    SamplingParams(n=1, min_tokens=0, presence_penalty=-2, frequency_penalty=-2, repetition_penalty=1e-9, logprobs=0)
    SamplingParams(n=MAX_SAMPLES, min_tokens=3, max_tokens=3, presence_penalty=2, frequency_penalty=2)
    SamplingParams(repetition_penalty=100, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)


def test_a_grammar_says_itself_where_it_ends():
    """A least length could bar the only token that it allows."""
    with pytest.raises(ValueError, match="min_tokens and a grammar exclude each other"):
        SamplingParams(min_tokens=1, grammar=GrammarSpec("regex", "a"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"jsn": {}}, "structured_outputs has no jsn: give one of json, regex, choice, grammar, json_object"),
        ({"choice": 5}, "choice must be a list of texts, got 5"),
        ({}, "give one of json, regex, choice, grammar, json_object; got none"),
    ],
)
def test_forms_that_are_none(given, told):
    """A misspelt name was a TypeError, which ``except ValueError`` does not catch."""
    with pytest.raises(ValueError, match=f"^{told}$"):
        SamplingParams(structured_outputs=given)


@pytest.mark.parametrize(
    ("values", "penalizes", "adjusts"),
    [
        ({"presence_penalty": 0.1}, True, True),
        ({"frequency_penalty": -0.1}, True, True),
        ({"repetition_penalty": 1.1}, True, True),
        ({"logit_bias": ((5, 1.0),)}, False, True),
        ({"min_tokens": 1}, False, True),
        ({"logprobs": 5, "n": 3, "grammar": GrammarSpec("json_object")}, False, False),
    ],
)
def test_what_changes_logits(values, penalizes, adjusts):
    """A field that is not looked at here has no effect at all."""
    params = SamplingParams(**values)
    assert (params.penalizes, params.adjusts) == (penalizes, adjusts)


def test_a_request_by_position_and_by_name():
    """Greedy by default. Equal requests are equal: completions are found by them."""
    assert Request(3, (1, 2)).sampling is GREEDY
    assert Request(3, (1, 2), GREEDY) == Request(id=3, prompt_token_ids=(1, 2), sampling=SamplingParams())
    assert Request(3, (1, 2)) != Request(4, (1, 2))


def completion(**fields):
    rest = {"sample": 0, "finish_reason": "stop", "cached_tokens": 0, "arrival_time": 1.0, "finish_time": 4.0}
    return Completion(request=Request(0, (1,)), **rest, **fields)


def test_a_completion_reports_nothing_by_default():
    done = completion(token_ids=(5,))
    assert (done.logprobs, done.prompt_logprobs, done.error) == ((), (), None)


def test_the_time_of_the_first_token():
    """A completion without tokens has one too: reports divide by what follows."""
    done = completion(token_ids=(5, 6, 7), token_times=(2.0, 2.0, 4.0))
    assert done.first_token_time == 2.0
    assert structs.replace(done, token_ids=(), token_times=()).first_token_time == 4.0


@pytest.mark.parametrize(
    ("value", "name"), [(SamplingParams(), "seed"), (Request(0, (1,)), "id"), (completion(token_ids=(5,)), "sample")]
)
def test_frozen(value, name):
    with pytest.raises(AttributeError):
        setattr(value, name, 1)


@pytest.mark.parametrize("limit", [0, 1, 20])
def test_packed_log_probabilities_are_the_same_again(limit):
    """Python's objects take 2 kB for a token with 20 likeliest ones; a row may have a million tokens."""
    given = [Logprobs(i, -i / 8, tuple((i + k, -k / 4) for k in range(limit))) for i in range(50)]
    packed = PackedLogprobs(given[:7])
    packed.extend(given[7:])
    assert (len(packed), list(packed), packed[3:5], packed[-1]) == (50, given, given[3:5], given[-1])
    assert packed == given
    assert packed != given[1:] and packed != [*given[1:], given[0]]
    with pytest.raises(IndexError):
        packed[50]
    assert sum(len(kept) * kept.itemsize for kept in (packed._ids, packed._values)) == LOGPROB_BYTES * 50 * (1 + limit)


def test_parts_of_packed_log_probabilities():
    """Tokens of a window are appended as they come, up to the one that ends the completion."""
    given = [Logprobs(i, -i / 8, ((i + 1, -1.0),), i) for i in range(6)]
    packed = PackedLogprobs(given[:1])
    packed.extend(PackedLogprobs(given[1:])[:3])
    assert packed == given[:4]
    assert packed[1:3] == given[1:3] and type(packed[1:3]) is PackedLogprobs
    assert packed.total() == sum(each.logprob for each in given[:4])
    assert PackedLogprobs().total() == 0
