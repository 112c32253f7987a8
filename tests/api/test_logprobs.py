"""Log-probabilities of a library's outputs: made when they are read."""

import pickle

import pytest

from rosebatch.core.request import Logprobs, PackedLogprobs
from rosebatch.io.scored_tokens import ScoredTokens, TokenTable
from rosebatch.llm.outputs import Logprob, LogprobsOfTokens

FIRST = {7: Logprob(-0.5, 1), 9: Logprob(-1.5, 2)}
SECOND = {9: Logprob(-0.25, 1), 7: Logprob(-2.0, 2), 5: Logprob(-8.0, 30)}


@pytest.fixture
def logprobs():
    """Of two tokens with their two likeliest; the second one is not among them."""
    given = [Logprobs(7, -0.5, ((7, -0.5), (9, -1.5)), 1), Logprobs(5, -8.0, ((9, -0.25), (7, -2.0)), 30)]
    return LogprobsOfTokens(ScoredTokens(PackedLogprobs(given), TokenTable(None)))


def test_they_are_a_sequence_of_dictionaries(logprobs):
    """Python's objects of all tokens took half of the host's time, also where a script reads a few."""
    assert len(logprobs) == 2
    assert list(logprobs) == [FIRST, SECOND]
    assert (logprobs[0], logprobs[-1]) == (FIRST, SECOND)
    assert logprobs[1:] == [SECOND]
    assert logprobs == [FIRST, SECOND] and logprobs != [FIRST]
    assert repr(logprobs) == repr([FIRST, SECOND])
    with pytest.raises(IndexError):
        logprobs[2]


def test_pickled_they_are_a_list(logprobs):
    """A tokenizer would go along to another process."""
    assert pickle.loads(pickle.dumps(logprobs)) == [FIRST, SECOND]
    assert type(pickle.loads(pickle.dumps(logprobs))) is list
