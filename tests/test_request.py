"""Sampling parameters and the life of one sequence."""

import dataclasses
import math
import time

import pytest

from rosebatch.request import Logprobs, Request, Sequence, Status
from rosebatch.sampling_params import MOST_LOGPROBS, MOST_SAMPLES, GrammarSpec, SamplingParams


def start(prompt=(1, 2, 3), max_model_len=100, eos=frozenset(), matcher=None, constraint=None, **sampling):
    request = Request(index=0, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling))
    return Sequence.start(
        request, max_model_len=max_model_len, eos_token_ids=eos, stop_matcher=matcher, constraint=constraint
    )


def feed(sequence, tokens):
    """Tokens one by one until the sequence is finished; how many it took."""
    for count, token in enumerate(tokens, 1):
        sequence.apply_token_ids([token])
        if sequence.finish_reason:
            return count
    return None


class MatchAt:
    """A stop string that appears with the n-th token."""

    def __init__(self, count):
        self.count, self.fed = count, []

    def feed(self, token_id):
        self.fed.append(token_id)
        return len(self.fed) == self.count


class CompleteAt:
    """A grammar that is complete with the n-th token."""

    error = None

    def __init__(self, count):
        self.count, self.fed = count, []

    def feed(self, token_id):
        self.fed.append(token_id)
        return len(self.fed) == self.count


def test_defaults_are_greedy_without_filters():
    params = SamplingParams()
    assert params.greedy
    assert (params.n, params.min_tokens, params.logprobs, params.prompt_logprobs, params.grammar) == (1, 0, *[None] * 3)
    assert not params.adjusts
    assert not params.penalizes
    assert (params.top_k, params.top_p, params.min_p, params.seed, params.max_tokens) == (0, 1.0, 0.0, 0, 512)
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be >= 0, got -0.1"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k must be >= 0 (0 keeps all tokens), got -1"),
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
        ({"stop_token_ids": (3, -1)}, "stop_token_ids must be >= 0, got [3, -1]"),
        ({"n": 0}, f"n must be in [1, {MOST_SAMPLES}], got 0"),
        ({"n": MOST_SAMPLES + 1}, "n must be"),
        ({"min_tokens": -1}, "min_tokens must be in [0, max_tokens], got -1"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens must be in [0, max_tokens], got 4"),
        ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2], got -2.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0, got 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"logit_bias": ((5, math.inf),)}, "logit_bias must be finite"),
        ({"logprobs": MOST_LOGPROBS + 1}, f"logprobs must be in [0, {MOST_LOGPROBS}], got {MOST_LOGPROBS + 1}"),
        ({"logprobs": -1}, "logprobs must be"),
        ({"prompt_logprobs": MOST_LOGPROBS + 1}, "prompt_logprobs must be"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be"),
    ],
)
def test_values_outside_their_range_are_named(values, message):
    with pytest.raises(ValueError, match="must be") as caught:
        SamplingParams(**values)
    assert message in str(caught.value)


def test_values_at_the_edge_of_their_range():
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, max_tokens=1, seed=0)
    SamplingParams(temperature=100.0, top_k=10**9, top_p=1e-9, min_p=1, seed=2**64 - 1)
    SamplingParams(n=1, min_tokens=0, presence_penalty=-2, frequency_penalty=-2, repetition_penalty=1e-9, logprobs=0)
    SamplingParams(n=MOST_SAMPLES, min_tokens=3, max_tokens=3, presence_penalty=2, frequency_penalty=2)
    SamplingParams(repetition_penalty=100, logprobs=MOST_LOGPROBS, prompt_logprobs=MOST_LOGPROBS)


def test_a_grammar_says_itself_where_it_ends():
    """A least length could bar the only token that it allows."""
    with pytest.raises(ValueError, match="min_tokens and a grammar exclude each other"):
        SamplingParams(min_tokens=1, grammar=GrammarSpec("regex", "a"))


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


@pytest.mark.parametrize("seed", [0, 5, 2**64 - 1])
def test_samples_of_a_request(seed):
    """Seeds that differ, of as many as there can be, within 64 bits; the first is the request itself."""
    request = Request(index=3, prompt_token_ids=(1,), sampling=SamplingParams(seed=seed, n=MOST_SAMPLES), choice=7)
    samples = [request.sample(number) for number in range(MOST_SAMPLES)]
    assert samples[0] is request
    assert len({sample.sampling.seed for sample in samples}) == MOST_SAMPLES
    assert [sample.choice for sample in samples] == [7 + number for number in range(MOST_SAMPLES)]
    again = dataclasses.replace(samples[5], choice=7, sampling=dataclasses.replace(samples[5].sampling, seed=seed))
    assert again == request


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Request(index=0, prompt_token_ids=(1,)).index = 1


def test_a_new_sequence():
    sequence = start()
    assert (sequence.token_ids, sequence.output_token_ids) == ([1, 2, 3], [])
    assert (sequence.num_prompt_tokens, sequence.num_computed_tokens, sequence.num_uncomputed_tokens) == (3, 0, 3)
    assert (sequence.status, sequence.finish_reason, sequence.block_ids) == (Status.WAITING, None, [])
    assert sequence.num_cached_tokens is None
    # The request keeps its own prompt.
    sequence.apply_token_ids([9])
    assert sequence.request.prompt_token_ids == (1, 2, 3)
    assert sequence.output_token_ids == [9]


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "generated"), [(1, 100, 1), (5, 100, 5), (50, 10, 7), (50, 4, 1), (7, 10, 7)]
)
def test_length_is_bounded_by_the_request_and_by_the_model(max_tokens, max_model_len, generated):
    sequence = start(max_tokens=max_tokens, max_model_len=max_model_len)
    assert feed(sequence, range(10, 80)) == generated
    assert sequence.finish_reason == "length"
    assert sequence.output_token_ids == list(range(10, 10 + generated))


@pytest.mark.parametrize(
    ("options", "count", "reason"),
    [
        ({"eos": frozenset({12})}, 3, "stop"),
        ({"eos": frozenset({14, 11})}, 2, "stop"),
        ({"eos": frozenset({12}), "ignore_eos": True}, 6, "length"),
        ({"stop_token_ids": (13,)}, 4, "stop"),
        # Asked for by name, a token stops even if the model's own do not.
        ({"eos": frozenset({11}), "stop_token_ids": (13,), "ignore_eos": True}, 4, "stop"),
        ({"eos": frozenset({11}), "stop_token_ids": (13,)}, 2, "stop"),
        ({"matcher": MatchAt(2)}, 2, "stop"),
        ({"matcher": MatchAt(9)}, 6, "length"),
        # Stop and length with the same token: stop, or a complete answer would look cut off.
        ({"eos": frozenset({15})}, 6, "stop"),
        ({"matcher": MatchAt(6)}, 6, "stop"),
        ({}, 6, "length"),
    ],
)
def test_why_and_when_a_sequence_ends(options, count, reason):
    sequence = start(max_tokens=6, **options)
    assert feed(sequence, range(10, 30)) == count
    assert sequence.finish_reason == reason
    # The token that ends it is part of it.
    assert sequence.output_token_ids == list(range(10, 10 + count))


@pytest.mark.parametrize(
    ("options", "count", "reason"),
    [
        # The third token may not end it, the fourth may.
        ({"eos": frozenset({12})}, 6, "length"),
        ({"eos": frozenset({12, 13})}, 4, "stop"),
        ({"stop_token_ids": (10, 11, 12, 14)}, 5, "stop"),
        ({"matcher": MatchAt(3)}, 6, "length"),
        ({"matcher": MatchAt(4)}, 4, "stop"),
    ],
)
def test_a_least_length(options, count, reason):
    """Off by one, an end token that the sampler still bars would be waited for, or one that it lets through be lost."""
    sequence = start(max_tokens=6, min_tokens=3, **options)
    assert feed(sequence, range(10, 30)) == count
    assert sequence.finish_reason == reason


def test_a_least_length_that_does_not_fit():
    """The model ends before it: no error, and not for ever."""
    sequence = start(max_tokens=50, min_tokens=50, max_model_len=10, eos=frozenset(range(100)))
    assert feed(sequence, range(10, 80)) == 7
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize(
    ("count", "options", "tokens", "reason"),
    [
        (2, {}, 2, "stop"),
        (6, {}, 6, "stop"),
        (7, {}, 6, "length"),
        (9, {"eos": frozenset({13})}, 4, "stop"),
    ],
)
def test_a_complete_grammar_ends_it(count, options, tokens, reason):
    """With the token that completes it, not one later: nothing may follow that one."""
    constraint = CompleteAt(count)
    sequence = start(max_tokens=6, constraint=constraint, **options)
    assert feed(sequence, range(10, 30)) == tokens
    assert sequence.finish_reason == reason
    assert constraint.fed == list(range(10, 10 + tokens)), "each token once, the last one too"


def test_tokens_behind_the_one_that_ends_it():
    """Of several sampled at once, they are dropped, with what is known of them; watchers do not see them."""
    matcher, constraint = MatchAt(100), CompleteAt(100)
    sequence = start(max_tokens=9, eos=frozenset({12}), matcher=matcher, constraint=constraint)
    logprobs = [Logprobs(token, -float(token)) for token in range(10, 16)]
    assert sequence.apply_token_ids([10], logprobs[:1]) == 1
    assert sequence.apply_token_ids([11, 12, 13, 14], logprobs[1:5]) == 2
    assert sequence.output_token_ids == [10, 11, 12]
    assert sequence.logprobs == logprobs[:3]
    assert matcher.fed == constraint.fed == [10, 11, 12]


def test_several_tokens_past_its_length():
    """A window of steps may sample more than there is room for."""
    sequence = start(max_tokens=3)
    assert sequence.apply_token_ids([10, 11, 12, 13, 14]) == 3
    assert (sequence.output_token_ids, sequence.finish_reason) == ([10, 11, 12], "length")


def test_logprobs_of_the_prompt_computed_twice():
    """In chunks of any size, and once more after a preemption: each of its tokens has one."""
    sequence = start(prompt=range(1, 8), prompt_logprobs=0)
    found = [Logprobs(token, -1.0) for token in range(2, 8)]
    assert sequence.needs_prompt_logprobs
    sequence.apply_prompt_logprobs(1, found[:2])
    sequence.apply_prompt_logprobs(3, found[2:4])
    assert sequence.needs_prompt_logprobs
    sequence.apply_prompt_logprobs(1, found[:3])
    sequence.apply_prompt_logprobs(4, found[3:])
    assert sequence.prompt_logprobs == found
    assert not sequence.needs_prompt_logprobs
    assert not start().needs_prompt_logprobs
    assert not start(prompt=(1,), prompt_logprobs=5).needs_prompt_logprobs


def test_end_tokens_in_the_prompt_do_not_end_it():
    sequence = start(prompt=(7, 7), eos=frozenset({7}), max_tokens=3)
    sequence.apply_token_ids([1])
    assert sequence.finish_reason is None


def test_the_matcher_sees_every_generated_token_once():
    """The one that ends it by another rule included, so that its text is complete."""
    matcher = MatchAt(100)
    feed(start(max_tokens=9, eos=frozenset({12}), matcher=matcher), range(10, 30))
    assert matcher.fed == [10, 11, 12]


def test_times_are_in_order_and_set_once():
    before = time.perf_counter()
    sequence = start(max_tokens=3)
    assert (sequence.first_token_time, sequence.finish_time) == (None, None)
    sequence.apply_token_ids([1])
    first = sequence.first_token_time
    assert sequence.finish_time is None
    feed(sequence, [2, 3])
    assert sequence.first_token_time == first
    assert before <= sequence.arrival_time <= first <= sequence.finish_time <= time.perf_counter()


def test_uncomputed_tokens_while_decoding():
    sequence = start()
    sequence.num_computed_tokens = 3
    sequence.apply_token_ids([5])
    assert sequence.num_uncomputed_tokens == 1
