"""Continuations of a row as requests: which tokens are scored, and which share a request."""

import pytest

from rosebatch.core.errors import RowError
from rosebatch.core.request import Completion, Logprobs, PackedLogprobs, Request
from rosebatch.core.sampling_params import GREEDY
from rosebatch.core.scoring import Scoring
from rosebatch.io.fields import NO_OPTIONS, PromptOptions
from rosebatch.io.results import Score
from rosebatch.io.rows import Row
from rosebatch.job.scored_prompts import scored_prompts, scores_of


def prompts_of(context, continuations, wholes=(), options=NO_OPTIONS):
    row = Row(index=0, where="row 1", metadata={}, sampling=GREEDY, continuations=continuations, options=options)
    return scored_prompts(row, [(context, "text"), *((whole, "text") for whole in wholes)], 1000)


def parts(prompts):
    return [(list(p.token_ids), p.scoring.start, p.scoring.next_token_ids, p.continuations) for p in prompts]


def test_labels_share_one_request():
    """Each label was a pass of its own over the prompt."""
    assert parts(prompts_of((5, 6), ((1,), (2,), (1,)))) == [([5, 6], 2, (1, 2, 1), (0, 1, 2))]


def test_a_long_prompt_is_not_put_before_each_continuation():
    """4,000,000 token ids before each of 1,024 continuations: 16 GB, until the engine refused the first."""
    with pytest.raises(RowError, match=r"^the prompt has 1002 tokens; 1000 are allowed$"):
        prompts_of((7,) * 1002, ((1,), (2,)))
    # One that is cut may be of any length, and one that is scored has a last token that is not computed.
    options = PromptOptions(truncate_prompt_tokens=2)
    assert parts(prompts_of((*(7,) * 5000, 5, 6), ((1, 2),), options=options)) == [([5, 6, 1], 2, (2,), (0,))]
    assert len(prompts_of((7,) * 1001, ())[0].token_ids) == 1000


def test_continuations_of_several_tokens():
    """The last token is not computed: nothing is asked of what comes after it."""
    found = parts(prompts_of((5, 6), ((1,), (2, 3, 4), (2, 3, 7), (9,))))
    assert found == [([5, 6], 2, (1, 9), (0, 3)), ([5, 6, 2, 3], 2, (4, 7), (1, 2))]


def test_a_token_that_holds_characters_of_both():
    """A prompt that ends with a blank: its last token does not exist in front of a word, and was scored as another."""
    found = parts(prompts_of((5, 6, 7), (" a", "b"), wholes=[(5, 6, 8), (5, 6, 7, 9)]))
    assert found == [([5, 6], 2, (8,), (0,)), ([5, 6, 7], 3, (9,), (1,))]
    # Nothing comes before the first token of all.
    assert parts(prompts_of((5,), ("a",), wholes=[(8, 9)])) == [([8], 1, (9,), (0,))]


def test_messages_name_the_field_of_the_row():
    """Choices were named as continuations."""
    row = Row(
        index=0, where="row 1", metadata={}, sampling=GREEDY, continuations=((1,), "a"), continuations_name="choices"
    )
    with pytest.raises(RowError, match=r"^choices\[1\] adds no token to the prompt$"):
        scored_prompts(row, [((5, 6), "text"), ((5, 6), "text")], 1000)


def test_the_prompt_itself():
    """Its first token has nothing before it."""
    assert parts(prompts_of((5, 6, 7), ())) == [([5, 6], 1, (7,), (0,))]
    with pytest.raises(RowError, match="single token"):
        prompts_of((5,), ())


def test_the_last_tokens_of_a_prompt_are_kept():
    """Truncation counts the prompt's tokens, and keeps the continuation whole."""
    options = PromptOptions(truncate_prompt_tokens=2)
    assert parts(prompts_of((4, 5, 6), ((1,), (2, 3)), options=options)) == [
        ([5, 6], 2, (1,), (0,)),
        ([5, 6, 2], 2, (3,), (1,)),
    ]
    assert parts(prompts_of((4, 5, 6), (), options=options)) == [([5], 1, (6,), (0,))]


@pytest.mark.parametrize(
    ("continuations", "wholes", "code"),
    [((" ",), [(5, 6)], "nothing_to_score"), (((-1,),), [], "invalid_token_id"), (((2**32,),), [], "invalid_token_id")],
)
def test_what_cannot_be_scored(continuations, wholes, code):
    """It is the row's error, with the number of the continuation."""
    with pytest.raises(RowError, match=r"continuations\[0\]") as error:
        prompts_of((5, 6), continuations, wholes)
    assert error.value.code == code


def test_scores_are_in_the_order_of_the_continuations():
    """Those that share a request come together from the engine."""
    prompts = prompts_of((5, 6), ((1,), (2, 3), (9,)))

    def done(prompt, *logprobs):
        packed = PackedLogprobs(Logprobs(0, value, rank=rank) for value, rank in logprobs)
        request = Request(0, prompt.token_ids, scoring=prompt.scoring)
        return Completion(
            request=request, sample=0, token_ids=(), finish_reason="scored", cached_tokens=0, arrival_time=0.0,
            finish_time=0.0, prompt_logprobs=packed,
        )  # fmt: skip

    completions = [done(prompts[0], (-1.0, 1), (-2.0, 2)), done(prompts[1], (-0.5, 1), (-0.25, 1))]
    assert scores_of(prompts, completions) == [Score(-1.0, 1, True), Score(-0.75, 2, True), Score(-2.0, 1, False)]
    assert prompts[0].scoring == Scoring(2, (1, 9))
