"""The life of one sequence, from a request to its completion."""

from array import array
from dataclasses import replace

import pytest

from rosebatch.core.request import Completion, Logprobs, Request
from rosebatch.core.sampling_params import MAX_SAMPLES, SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.plan import SequenceSpec
from rosebatch.engine.scheduling.sequence import SequenceState, Status, stop_ids_of


def start(prompt=(1, 2, 3), max_model_len=100, eos=frozenset(), matcher=None, constraint=None, sample=0, **sampling):
    given = SamplingParams(**sampling)
    return SequenceState.start(
        Request(7, tuple(prompt), given),
        id=70 + sample,
        sample=sample,
        max_model_len=max_model_len,
        stop_ids=stop_ids_of(given, eos, 100),
        stop_matcher=matcher,
        constraint=constraint,
    )


def feed(sequence, tokens):
    """Tokens one by one until the sequence is finished; how many it took."""
    for count, token in enumerate(tokens, 1):
        sequence.apply_token_ids([token])
        if sequence.finish_reason:
            return count
    return None


def test_tokens_that_end_it():
    """A set was made of each of three million ids, for each of ``n`` completions, of a vocabulary of 300."""
    given = SamplingParams(stop_token_ids=(8, 100, 2**40), n=2)
    assert stop_ids_of(given, frozenset({9, 100}), 100) == {8, 9, 100}
    assert stop_ids_of(replace(given, ignore_eos=True), frozenset({9}), 100) == {8}
    shared = frozenset({8})
    for sample in range(2):
        own = SequenceState.start(Request(0, (1,), given), id=0, sample=sample, max_model_len=9, stop_ids=shared)
        assert own.spec.stop_ids is shared
        assert own.spec.sampling.stop_token_ids is given.stop_token_ids


def test_the_token_ids_of_a_request_stay_as_they_are():
    """An answer was appended to the array that the request, its output and a step under way have."""
    prompt = TokenIds.of([1, 2, 3])
    sequence = SequenceState.start(Request(0, prompt), id=0, max_model_len=9)
    assert sequence.token_ids is prompt
    sequence.apply_token_ids([4])
    assert (list(prompt), list(sequence.token_ids), sequence.output_token_ids) == ([1, 2, 3], [1, 2, 3, 4], [4])


class MatchAt:
    """A stop string that appears with the n-th token."""

    def __init__(self, count):
        self.count, self.fed = count, []

    def feed(self, token_id):
        self.fed.append(token_id)
        return len(self.fed) == self.count


class CompleteAt(MatchAt):
    """A grammar that is complete with the n-th token."""

    error, forces = None, True

    def rest(self):
        return ()


@pytest.mark.parametrize("seed", [None, 0, 5, 2**64 - 1])
def test_samples_of_a_request(seed):
    """Seeds that differ, of as many as there can be, within 64 bits; the first has the request's own parameters."""
    samples = [start(sample=number, seed=seed, n=MAX_SAMPLES, top_k=5) for number in range(MAX_SAMPLES)]
    params = samples[0].request.sampling
    assert samples[0].sampling is params
    seeds = [sequence.sampling.seed or 0 for sequence in samples]
    assert len(set(seeds)) == MAX_SAMPLES
    assert all(0 <= seed < 2**64 for seed in seeds)
    # Part of the format of results: another step would change the answers of a file that is continued.
    assert seeds[1] == ((seed or 0) + 0x9E3779B97F4A7C15) % 2**64
    assert [sequence.sample for sequence in samples] == list(range(MAX_SAMPLES))
    assert all(sequence.request.sampling == params for sequence in samples)
    assert {replace(sequence.sampling, seed=seed) for sequence in samples} == {params}


def test_only_the_first_sample_reports_on_the_prompt():
    """The prompt is computed once, and so are its log-probabilities."""
    assert [start(sample=n, n=2, prompt_logprobs=3, logprobs=1).needs_prompt_logprobs for n in (0, 1)] == [True, False]
    assert start(sample=1, n=2, prompt_logprobs=3, logprobs=1).sampling.logprobs == 1


def test_what_a_runner_knows():
    """All of it, as plain values."""
    given = {"max_tokens": 5, "stop_token_ids": (8,), "seed": 3}
    spec = SequenceSpec(70, (1, 2, 3), SamplingParams(**given), max_len=8, stop_ids=frozenset({8, 9}))
    assert start(eos=frozenset({9}), **given).spec == spec
    assert start(eos=frozenset({9}), ignore_eos=True, stop_token_ids=(8,)).spec.stop_ids == {8}
    assert start(max_model_len=6).spec.max_len == 6
    assert start(constraint=CompleteAt(2)).spec.guided


@pytest.mark.parametrize(
    ("sampling", "has_features"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 3, "stop_token_ids": (3,), "prompt_logprobs": 2}, False),
        ({"presence_penalty": 0.5}, True),
        ({"logit_bias": ((5, 1.0),)}, True),
        ({"min_tokens": 1}, True),
        ({"logprobs": 0}, True),
    ],
)
def test_what_a_step_does_beside_sampling(sampling, has_features):
    """Not seen here, a penalty or a report is left out of the graph of the step."""
    assert start(**sampling).spec.has_features == has_features


def test_the_completion_of_a_sequence():
    """Every field of it, with what was reported and what went wrong."""
    constraint = CompleteAt(2)
    constraint.error = "cut off"
    sequence = start(sample=1, n=2, logprobs=0, constraint=constraint)
    sequence.num_cached_tokens = 2
    logprobs = (Logprobs(10, -1.0), Logprobs(11, -2.0))
    sequence.apply_token_ids([10, 11], logprobs, 7.5)
    completion = sequence.completion()
    assert (completion.error.code, completion.error.message) == ("grammar_failed", "cut off")
    assert completion == Completion(
        request=sequence.request,
        sample=1,
        token_ids=(10, 11),
        finish_reason="stop",
        cached_tokens=2,
        arrival_time=sequence.arrival_time,
        finish_time=7.5,
        token_times=[7.5, 7.5],
        logprobs=logprobs,
        error=completion.error,
    )
    with pytest.raises(AssertionError):
        start().completion()


@pytest.mark.parametrize("token_id", [2**32 + 1, 2**32, -1])
def test_no_id_is_taken_for_another(token_id):
    """The engine refuses such ids. Cut to 32 bits, one would be another, in the prompt and in the prefix cache."""
    with pytest.raises(OverflowError):
        SequenceState.start(Request(0, (token_id, 0)), id=0, max_model_len=9)


def test_a_new_sequence():
    sequence = start()
    assert (sequence.token_ids, sequence.output_token_ids) == (array("I", [1, 2, 3]), [])
    assert (sequence.num_prompt_tokens, sequence.num_computed_tokens, sequence.num_uncomputed_tokens) == (3, 0, 3)
    assert (sequence.status, sequence.block_ids) == (Status.WAITING, [])
    assert (sequence.finish_reason, sequence.num_cached_tokens) == (None, None)
    # The request keeps its own prompt.
    sequence.apply_token_ids([9])
    assert (sequence.request.prompt_token_ids, sequence.output_token_ids) == ((1, 2, 3), [9])


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "generated"), [(1, 100, 1), (5, 100, 5), (50, 10, 7), (50, 4, 1), (7, 10, 7)]
)
def test_length_is_bounded_by_the_request_and_by_the_model(max_tokens, max_model_len, generated):
    sequence = start(max_tokens=max_tokens, max_model_len=max_model_len)
    assert (feed(sequence, range(10, 80)), sequence.finish_reason) == (generated, "length")
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
    assert (feed(sequence, range(10, 30)), sequence.finish_reason) == (count, reason)
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
    assert (feed(sequence, range(10, 30)), sequence.finish_reason) == (count, reason)


def test_a_least_length_that_does_not_fit():
    """The model ends before it: no error, and not for ever."""
    sequence = start(max_tokens=50, min_tokens=50, max_model_len=10, eos=frozenset(range(100)))
    assert (feed(sequence, range(10, 80)), sequence.finish_reason) == (7, "length")


@pytest.mark.parametrize(
    ("count", "options", "tokens", "reason"),
    [(2, {}, 2, "stop"), (6, {}, 6, "stop"), (7, {}, 6, "length"), (9, {"eos": frozenset({13})}, 4, "stop")],
)
def test_a_complete_grammar_ends_it(count, options, tokens, reason):
    """With the token that completes it, not one later: nothing may follow that one."""
    constraint = CompleteAt(count)
    sequence = start(max_tokens=6, constraint=constraint, **options)
    assert (feed(sequence, range(10, 30)), sequence.finish_reason) == (tokens, reason)
    assert constraint.fed == list(range(10, 10 + tokens)), "each token once, the last one too"


def test_tokens_behind_the_one_that_ends_it():
    """Of several sampled at once, they are dropped, with what is known of them; watchers do not see them."""
    matcher, constraint = MatchAt(100), CompleteAt(100)
    sequence = start(max_tokens=9, eos=frozenset({12}), matcher=matcher, constraint=constraint)
    logprobs = [Logprobs(token, -float(token)) for token in range(10, 16)]
    assert sequence.apply_token_ids([10], logprobs[:1]) == 1
    assert sequence.apply_token_ids([11, 12, 13, 14], logprobs[1:5]) == 2
    assert (sequence.output_token_ids, sequence.logprobs) == ([10, 11, 12], logprobs[:3])
    assert matcher.fed == constraint.fed == [10, 11, 12]


def test_several_tokens_past_its_length():
    """A window of steps may sample more than there is room for."""
    sequence = start(max_tokens=3)
    assert sequence.apply_token_ids([10, 11, 12, 13, 14]) == 3
    assert (sequence.output_token_ids, sequence.finish_reason) == ([10, 11, 12], "length")


def test_logprobs_of_the_prompt_computed_twice():
    """In chunks of any size, and once more after a preemption: each of its tokens has one."""
    sequence = start(prompt=range(1, 8), prompt_logprobs=0, max_tokens=1)
    found = [Logprobs(token, -1.0) for token in range(2, 8)]
    assert sequence.needs_prompt_logprobs
    sequence.apply_prompt_logprobs(1, found[:2], 0.0)
    sequence.apply_prompt_logprobs(3, found[2:4], 0.0)
    assert sequence.needs_prompt_logprobs
    sequence.apply_prompt_logprobs(1, found[:3], 0.0)
    sequence.apply_prompt_logprobs(4, found[3:], 0.0)
    assert sequence.prompt_logprobs == found
    for done in sequence, start(), start(prompt=(1,), prompt_logprobs=5):
        assert not done.needs_prompt_logprobs
    sequence.apply_token_ids([1])
    assert sequence.completion().prompt_logprobs == tuple(found)


def test_end_tokens_in_the_prompt_do_not_end_it():
    sequence = start(prompt=(7, 7), eos=frozenset({7}), max_tokens=3)
    sequence.apply_token_ids([1])
    assert sequence.finish_reason is None


def test_the_matcher_sees_every_generated_token_once():
    """The one that ends it by another rule included, so that its text is complete."""
    matcher = MatchAt(100)
    feed(start(max_tokens=9, eos=frozenset({12}), matcher=matcher), range(10, 30))
    assert matcher.fed == [10, 11, 12]


def test_every_token_has_its_time():
    """Tokens that come together have one time; those behind the end have none."""
    sequence = start(max_tokens=4)
    sequence.apply_token_ids([1], (), 1.0)
    assert sequence.finish_time is None
    sequence.apply_token_ids([2, 3], (), 2.0)
    sequence.apply_token_ids([4, 5], (), 3.0)
    assert (list(sequence.token_times), sequence.finish_time) == ([1.0, 2.0, 2.0, 3.0], 3.0)


def test_uncomputed_tokens_while_decoding():
    sequence = start()
    sequence.num_computed_tokens = 3
    sequence.apply_token_ids([5])
    assert sequence.num_uncomputed_tokens == 1
