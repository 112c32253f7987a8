"""Salts and restarts: what changes the keys of a sequence, and is neither its tokens nor their positions."""

from array import array

import pytest
from msgspec import structs

from rosebatch.engine.long_rope import LongRope
from rosebatch.engine.scheduling.step_planner import MIXED, SeparateDecodes
from tests.engine.fake_runner import FakeRunner, fake_completion, make_sequence, next_token
from tests.engine.schedulers import add, chunks, drain, findable, make_scheduler, step

PROMPT = range(9)
SALT = b"another model"


class SaltedRunner(FakeRunner):
    """Its tokens depend on the salt, as with an adapter."""

    def next_token(self, token_ids, spec):
        return next_token((len(spec.salt), *token_ids))


def salted(sequence, salt=SALT):
    sequence.restart(structs.replace(sequence.spec, salt=salt))
    return sequence


@pytest.mark.parametrize("salts", [(b"", SALT), (SALT, b""), (SALT, b"yet another")])
def test_sequences_with_the_same_tokens_and_different_salts_share_no_block(salts):
    """An adapter would attend to keys of the model without it."""
    scheduler = make_scheduler()
    a, b = add(scheduler, *(salted(make_sequence(PROMPT, id=i), salt) for i, salt in enumerate(salts)))
    plan = scheduler.schedule()
    scheduler.check_integrity()
    assert (a.tables, b.tables) == ([[0, 1, 2]], [[3, 4, 5]])
    assert [chunk.start for chunk in plan.chunks] == [0, 0]
    assert findable(scheduler) == [0, 1, 3, 4]


@pytest.mark.parametrize("salt", [b"", SALT])
def test_sequences_with_the_same_tokens_and_salt_share_blocks(salt):
    scheduler = make_scheduler()
    a, b = add(scheduler, *(salted(make_sequence(PROMPT, id=i), salt) for i in range(2)))
    plan = scheduler.schedule()
    scheduler.check_integrity()
    assert (a.tables, b.tables) == ([[0, 1, 2]], [[0, 1, 3]])
    assert sorted((chunk.id, chunk.start) for chunk in plan.chunks) == [(0, 0), (1, 8)]


@pytest.mark.parametrize("policy", [MIXED, SeparateDecodes(1)])
def test_a_restart_in_mid_decode_gives_the_tokens_of_a_fresh_sequence(policy):
    """In blocks of its own: those of the old salt stay in the cache, under that salt."""
    runner, scheduler = SaltedRunner(), make_scheduler(policy=policy)
    (sequence,) = add(scheduler, make_sequence(PROMPT, max_tokens=9))
    for _ in range(4):
        step(scheduler, runner)
    known = list(sequence.token_ids)
    assert (len(known), findable(scheduler), sequence.tables) == (13, [0, 1, 2], [[0, 1, 2]])

    scheduler.restart(sequence, structs.replace(sequence.spec, salt=SALT))
    scheduler.check_integrity()
    assert (sequence.num_computed_tokens, sequence.tables, list(sequence.token_ids)) == (0, [], known)
    plan, _ = step(scheduler, runner)
    assert (plan.released, plan.started, plan.num_preempted) == ((0,), (sequence.spec,), 0)
    assert (chunks(plan), list(plan.chunks[0].token_ids)) == ([(0, 0, 13, 1)], known)
    assert sequence.tables == [[3, 4, 5, 6]]
    assert scheduler.pool.prefixes.find(b"", array("I", known), 3) == [0, 1, 2]
    assert scheduler.pool.prefixes.find(SALT, array("I", known), 3) == [3, 4, 5]
    drain(scheduler, runner)

    scheduler = make_scheduler(policy=policy)
    (fresh,) = add(scheduler, salted(make_sequence(known, max_tokens=5)))
    drain(scheduler, SaltedRunner())
    assert (list(sequence.token_ids), len(sequence.output_token_ids)) == (list(fresh.token_ids), 9)


@pytest.mark.parametrize(
    ("policy", "trained_len", "blocks", "lengths"),
    [
        (MIXED, 11, 8, [(5, 17), (8, 15)]),
        (SeparateDecodes(1), 13, 10, [(1, 19), (6, 11), (3, 22)]),
    ],
)
def test_restarts_in_a_full_cache_come_to_their_end(policy, trained_len, blocks, lengths):
    """One that restarted was the youngest then. So two took each other's blocks for ever, where tokens are replayed."""
    full = {"num_blocks": blocks, "block_size": 3, "prefix_cache": False}
    scheduler = make_scheduler(policy=policy, restarts=LongRope(trained_len, 100), replays=True, **full)
    prompts = [[number] * length for number, (length, _) in enumerate(lengths)]
    made = [
        make_sequence(prompt, max_tokens=most, id=number)
        for number, (prompt, (_, most)) in enumerate(zip(prompts, lengths, strict=True))
    ]
    add(scheduler, *made)
    runner, steps = FakeRunner(), 0
    while scheduler.has_unfinished and steps < 1000:
        step(scheduler, runner)
        scheduler.check_integrity()
        steps += 1
    assert [each.output_token_ids for each in made] == [
        fake_completion(prompt, most) for prompt, (_, most) in zip(prompts, lengths, strict=True)
    ]
