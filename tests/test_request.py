"""Sampling parameters and the life of one sequence."""

import dataclasses
import math
import time

import pytest

from rosebatch.request import Request, SamplingParams, Sequence, Status


def start(prompt=(1, 2, 3), max_model_len=100, eos=frozenset(), matcher=None, **sampling):
    request = Request(index=0, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling))
    return Sequence.start(request, max_model_len=max_model_len, eos_token_ids=eos, stop_matcher=matcher)


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


def test_defaults_are_greedy_without_filters():
    params = SamplingParams()
    assert params.greedy
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
    ],
)
def test_values_outside_their_range_are_named(values, message):
    with pytest.raises(ValueError, match="must be") as caught:
        SamplingParams(**values)
    assert message in str(caught.value)


def test_values_at_the_edge_of_their_range():
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, max_tokens=1, seed=0)
    SamplingParams(temperature=100.0, top_k=10**9, top_p=1e-9, min_p=1, seed=2**64 - 1)


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
