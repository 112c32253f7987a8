"""Preempted sequences that sample their tokens again, from the prompt on, in steps of the kind that they came from."""

from itertools import pairwise

import numpy as np
import pytest

from rosebatch.engine.plan import NOT_FINITE, DecodeWindow, PackedStep
from rosebatch.engine.sampling.masks import fill_masks, only_allowed, only_mask
from rosebatch.engine.scheduling.step_planner import MIXED, SeparateDecodes
from tests.engine.constraint import EveryThird
from tests.engine.fake_runner import fake_completion, make_sequence
from tests.engine.schedulers import add, drain, make_scheduler, step


def preempted(fake_runner, **options):
    """Two sequences and room for one and a half, after the plan that preempts the second."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, replays=True, **options)
    a, b = add(scheduler, *(make_sequence([i, i, i], max_tokens=7, id=i) for i in range(2)))
    while not step(scheduler, fake_runner)[0].num_preempted:
        pass
    return scheduler, a, b


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("policy", [MIXED, SeparateDecodes(1), SeparateDecodes(2)])
def test_only_the_prompt_is_computed_as_one(policy, prefix_cache, fake_runner):
    """A generated token in a packed step has K and V of other bits, and so have all tokens after it."""
    scheduler, _, b = preempted(fake_runner, policy=policy, prefix_cache=prefix_cache)
    known = b.replayed
    assert known and [*b.token_ids] == [1, 1, 1]
    done, plans = drain(scheduler, fake_runner)
    assert done == {0: fake_completion([0] * 3, 7), 1: fake_completion([1] * 3, 7)}
    assert done[1][: len(known)] == known and not b.replayed
    chunks = [chunk for plan in plans if isinstance(plan, PackedStep) for chunk in plan.chunks]
    if policy is not MIXED:
        assert all(chunk.start + len(chunk.token_ids) <= 3 for chunk in chunks)
        rows = [row for plan in plans if isinstance(plan, DecodeWindow) for row in plan.rows if row.id == b.id]
        assert rows[0].start == 3 and all(x.start + x.length == y.start for x, y in pairwise(rows))


def test_times_and_logprobs_are_of_the_first_time(fake_runner):
    """A token counted twice would give a row more log-probabilities than tokens, and the report wrong gaps."""
    scheduler, _, b = preempted(fake_runner, policy=SeparateDecodes(2))
    times = list(b.token_times)
    drain(scheduler, fake_runner)
    assert list(b.token_times)[: len(times)] == times
    assert len(b.token_times) == len(b.output_token_ids) == 7


def test_a_result_with_known_and_new_tokens():
    sequence = make_sequence([1, 2], max_tokens=9)
    sequence.apply_token_ids([5, 6, 7], now=1.0)
    sequence.rewind()
    assert sequence.apply_token_ids([5], now=2.0) == 1
    sequence.rewind()
    assert (sequence.output_token_ids, sequence.replayed) == ([], [5, 6, 7])
    assert sequence.apply_token_ids([5, 6, 7, 8], now=3.0) == 4
    assert (sequence.output_token_ids, sequence.replayed) == ([5, 6, 7, 8], [])
    assert list(sequence.token_times) == [1.0, 1.0, 1.0, 3.0]


def test_logits_that_are_not_finite_the_second_time():
    """The step that had a token has none: the row ends, and hides nothing."""
    sequence = make_sequence([1, 2], max_tokens=9)
    sequence.apply_token_ids([5, 6])
    sequence.rewind()
    sequence.apply_token_ids([5, NOT_FINITE])
    assert (sequence.output_token_ids, sequence.finish_reason) == ([5], "error")


def test_a_constraint_that_is_ahead_allows_the_known_token_alone():
    """It has followed the tokens already: its own mask is that of a later place."""
    masks = fill_masks([EveryThird(70), EveryThird(70)], 70, {1: only_mask(63, 70)})
    assert masks[0].any() and masks.dtype == np.int32
    assert masks[1].view(np.uint32).tolist() == [0, 1 << 31, 0]
    assert only_allowed(masks) == [-1, 63]


def test_a_prompt_that_is_preempted_has_nothing_to_sample_again(fake_runner):
    sequence = make_sequence([1, 2], max_tokens=9)
    sequence.rewind()
    assert (list(sequence.token_ids), sequence.replayed) == ([1, 2], [])
