"""Chunks that sample several tokens: each draft is verified by the token sampled in its place."""

from array import array

import pytest

from rosebatch.engine.plan import Chunk
from tests.engine.fake_runner import VOCAB, fake_completion, make_sequence
from tests.engine.schedulers import add, drain, findable, make_scheduler, step

PROMPT = [7, 1, 8, 2, 8]


@pytest.fixture
def begun(fake_runner):
    """A scheduler whose only sequence has five prompt tokens and one more, which is not computed; all of its tokens."""
    scheduler, tokens = make_scheduler(), PROMPT + fake_completion(PROMPT, 9)
    (sequence,) = add(scheduler, make_sequence(PROMPT, max_tokens=9))
    step(scheduler, fake_runner)
    assert (list(sequence.token_ids), sequence.num_computed_tokens) == (tokens[:6], 5)
    return scheduler, sequence, tokens


def finish(scheduler, runner, sequence, tokens):
    drain(scheduler, runner)
    assert (list(sequence.token_ids), sequence.finish_reason) == (tokens, "length")


def test_three_tokens_are_sampled_of_which_two_are_kept(begun, fake_runner):
    """The block that the wrong draft filled was findable, with keys of a token that does not follow."""
    scheduler, sequence, tokens = begun
    wrong = (tokens[7] + 1) % VOCAB
    scheduler.propose(sequence, [tokens[6], wrong])
    plan = scheduler.schedule()
    scheduler.check_integrity()
    assert plan.chunks == (Chunk(0, 5, array("I", [tokens[5], tokens[6], wrong]), sampled=3, decodes=True),)
    assert plan.sampled_ids == [0]
    result = fake_runner.run(plan)
    assert [each[:2] for each in result.token_ids] == [tokens[6:8]] and len(result.token_ids[0]) == 3
    scheduler.commit(plan, result)
    scheduler.check_integrity()
    # The draft in position 7 is taken back: the slot is written again.
    assert (list(sequence.token_ids), sequence.num_computed_tokens) == (tokens[:8], 7)
    assert (sequence.num_pending_tokens, sequence.drafts, sequence.tables) == (0, (), [[0, 1]])
    assert findable(scheduler) == [0]
    plan, _ = step(scheduler, fake_runner)
    assert plan.chunks == (Chunk(0, 7, array("I", tokens[7:8]), sampled=1, decodes=True),)
    assert scheduler.pool.prefixes.find(b"", sequence.token_ids, 2) == findable(scheduler) == [0, 1]
    finish(scheduler, fake_runner, sequence, tokens)


def test_right_drafts_fill_blocks_that_are_findable_once_they_are_verified(begun, fake_runner):
    scheduler, sequence, tokens = begun
    scheduler.propose(sequence, tokens[6:9])
    plan = scheduler.schedule()
    scheduler.check_integrity()
    assert plan.chunks == (Chunk(0, 5, array("I", tokens[5:9]), 4, ((0, 2, (2,)),), decodes=True),)
    assert findable(scheduler) == [0]
    scheduler.commit(plan, fake_runner.run(plan))
    scheduler.check_integrity()
    assert (list(sequence.token_ids), sequence.num_computed_tokens) == (tokens[:10], 9)
    assert scheduler.pool.prefixes.find(b"", sequence.token_ids, 2) == findable(scheduler) == [0, 1]
    finish(scheduler, fake_runner, sequence, tokens)


def test_a_block_that_only_wrong_drafts_needed_is_kept_for_the_next_tokens(begun, fake_runner):
    scheduler, sequence, tokens = begun
    scheduler.propose(sequence, [(tokens[6] + 1) % VOCAB] * 4)
    step(scheduler, fake_runner)
    assert (list(sequence.token_ids), sequence.num_computed_tokens) == (tokens[:7], 6)
    assert sequence.tables == [[0, 1, 2]]
    assert findable(scheduler) == [0]
    plan, _ = step(scheduler, fake_runner)
    assert plan.chunks == (Chunk(0, 6, array("I", tokens[6:7]), 1, decodes=True),)
    finish(scheduler, fake_runner, sequence, tokens)


def test_no_more_is_sampled_than_can_follow(begun, fake_runner):
    """The last token is sampled and not computed, so there is a draft for each of the others at most."""
    scheduler, sequence, tokens = begun
    scheduler.propose(sequence, [*tokens[6:], 1, 2, 3])
    plan, _ = step(scheduler, fake_runner)
    assert [(chunk.end, chunk.sampled) for chunk in plan.chunks] == [(13, 8)]
    assert (list(sequence.token_ids), sequence.finish_reason) == (tokens, "length")
    assert not scheduler.has_unfinished
