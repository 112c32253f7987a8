"""Which drafts are proposed: what followed an ending before, as many as are free, fewer where they were wrong."""

from array import array
from itertools import cycle, islice

import numpy as np
import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.drafts.asked_head import AskedHead
from rosebatch.engine.drafts.drafter import Drafter
from rosebatch.engine.drafts.history import find_ending, goes_on, what_followed
from rosebatch.engine.scheduling.answer_pool import AnswerPool
from rosebatch.engine.scheduling.sequence import SequenceState
from tests.engine.fake_runner import VOCAB, fake_completion, make_sequence
from tests.engine.schedulers import add, make_scheduler, step

PROMPT = [7, 1, 8, 2, 8]


def by_hand(tokens, shortest, most):
    """The longest ending that is in the tokens before it, where it is last."""
    best = (0, 0)
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, 32) and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        best = max(best, (length, end))
    length, end = best
    return (length, [*islice(cycle(tokens[end:]), most)]) if length >= shortest and length else (0, [])


def test_what_followed_the_longest_ending():
    """Of all places, the longest ending counts, then the last; places may overlap the ending itself."""
    rng, lengths = np.random.default_rng(0), set()
    for size in (0, 1, 2, 3, 10, 100, 400):
        for kinds in (1, 2, 5):
            tokens = array("I", rng.integers(0, kinds, size).tolist())
            own = np.frombuffer(tokens, np.uint32)
            found, distance = find_ending(own)
            drafts = what_followed(own, distance, 4).tolist() if found else []
            assert (found, drafts) == by_hand(tokens.tolist(), 3, 4)
            lengths.add(found)
    assert {0, 32} < lengths


def test_a_copy_with_a_changed_token_goes_on():
    """Behind each change, three steps had no draft: until the last three tokens were those of the original again."""
    copy = np.arange(100, 120)
    cases = [((1,), 40, True), ((1, 2, 4), 40, True), ((1, 2, 3, 5), 40, False), ((1,), 39, False)]
    for changes, distance, expected in cases:
        own = np.concatenate((np.arange(100, 140), copy))
        for place in changes:
            own[-place] = 900 + place
        assert goes_on(own, distance) is expected
    assert not goes_on(own, 0) and not goes_on(own[:5], 4)


def test_the_distance_of_a_copy_is_kept_while_it_goes_on(fake_runner, monkeypatch):
    """Else only a step with an ending has drafts."""
    whole = PROMPT + fake_completion(PROMPT, 60)
    endings, going, asked = iter([(3, 4), (0, 0), (0, 0), (0, 0)]), iter([True, False]), []
    module = "rosebatch.engine.drafts.drafter"
    monkeypatch.setattr(f"{module}.find_ending", lambda own: next(endings))
    monkeypatch.setattr(f"{module}.goes_on", lambda own, distance: next(going))
    monkeypatch.setattr(
        f"{module}.what_followed",
        lambda own, distance, most: asked.append(distance) or np.array(whole[len(own) : len(own) + most]),
    )
    scheduler, drafter = make_scheduler(), Drafter(free_tokens=100, most=7)
    add(scheduler, make_sequence(PROMPT, max_tokens=60))
    for _ in range(4):
        drafter.propose(scheduler)
        step(scheduler, fake_runner)
    assert asked == [4, 4]


@pytest.fixture
def served(fake_runner):
    """Steps a sequence of a scheduler to some length with these drafts proposed; returns the lengths of its chunks."""

    def serve(drafter, sequences, steps):
        scheduler = make_scheduler()
        add(scheduler, *sequences)
        lengths = []
        for _ in range(steps):
            drafter.propose(scheduler)
            plan, _ = step(scheduler, fake_runner)
            scheduler.check_integrity()
            lengths.append([len(chunk.token_ids) for chunk in plan.chunks])
        return lengths

    return serve


def repeating(monkeypatch, drafts):
    """Each sequence's next drafts are these, whatever its tokens."""
    monkeypatch.setattr("rosebatch.engine.drafts.drafter.find_ending", lambda own: (3, 1))
    monkeypatch.setattr(
        "rosebatch.engine.drafts.drafter.what_followed", lambda own, distance, most: np.array(drafts(own)[:most])
    )


def test_right_drafts_double_up_to_the_most(served, monkeypatch):
    """A row that copies would get one draft a step."""
    whole = PROMPT + fake_completion(PROMPT, 60)
    repeating(monkeypatch, lambda own: whole[len(own) :])
    assert served(Drafter(free_tokens=100, most=7), [make_sequence(PROMPT, max_tokens=60)], 6) == [
        [5], [2], [3], [5], [8], [8],
    ]  # fmt: skip


def test_wrong_drafts_make_longer_and_longer_pauses(served, monkeypatch):
    """A row that never repeats itself would have drafts in every step, each computed for nothing."""
    whole = PROMPT + fake_completion(PROMPT, 90)
    repeating(monkeypatch, lambda own: [(whole[len(own)] + 1) % VOCAB] * 9)
    lengths = served(Drafter(free_tokens=100, most=7), [make_sequence(PROMPT, max_tokens=90)], 40)
    assert [n for n, each in enumerate(lengths) if each == [2]] == [1, 3, 6, 11, 20, 37]


def test_endings_that_are_nowhere_are_looked_for_less_and_less(served, monkeypatch):
    """Each step of open text searched all tokens of each row: 4 % of a small model's step on a CPU."""
    searched = []
    monkeypatch.setattr(
        "rosebatch.engine.drafts.drafter.find_ending", lambda own, *_: searched.append(len(own)) or (0, 0)
    )
    served(Drafter(free_tokens=100, most=7), [make_sequence(PROMPT, max_tokens=60)], 40)
    assert [length - len(PROMPT) for length in searched] == [1, 3, 6, 11, 16, 21, 26, 31, 36]


def test_sequences_share_what_is_free(served, monkeypatch):
    """Drafts of many rows would make a step longer than it saves."""
    whole = {len(p): p + fake_completion(p, 60) for p in ([1, 2, 3, 4, 5], [9] * 9)}
    repeating(monkeypatch, lambda own: whole[5 if own[0] == 1 else 9][len(own) :])
    sequences = [make_sequence([1, 2, 3, 4, 5], max_tokens=60, id=0), make_sequence([9] * 9, max_tokens=60, id=1)]
    lengths = served(Drafter(free_tokens=8, most=7), sequences, 6)
    assert lengths[0] == [5, 9] and max(map(sum, lengths[1:])) == 8
    assert all(min(each) >= 1 for each in lengths) and any(max(each) > 4 for each in lengths[1:])


def test_a_prediction_is_a_draft_from_the_first_token_on(served):
    """Nothing of an answer that copies nothing was drafted, though the row has it."""
    request = Request(0, TokenIds.of(PROMPT), SamplingParams(max_tokens=40), predicted=fake_completion(PROMPT, 40))
    sequence = SequenceState.start(request, id=0, max_model_len=10**6, stop_ids=frozenset())
    assert served(Drafter(free_tokens=100, most=7), [sequence], 6) == [[5], [2], [3], [5], [8], [8]]


def test_an_answer_of_another_row_is_a_draft(fake_runner):
    """Rows of one kind are answered alike, though none of them copies anything of its own."""
    scheduler, drafter, lengths = make_scheduler(), Drafter(free_tokens=100, most=7), []
    scheduler.planner.answers = AnswerPool(100)
    # Finished by nobody: the fake model would never give two rows of different prompts the same answer.
    scheduler.planner.answers.add(array("I", fake_completion(PROMPT, 40)))
    add(scheduler, make_sequence(PROMPT, max_tokens=40))
    for _ in range(9):
        drafter.propose(scheduler)
        plan, _ = step(scheduler, fake_runner)
        lengths.append(len(plan.chunks[0].token_ids))
    # Three tokens have to be alike, and looks pause meanwhile.
    assert lengths == [5, 1, 1, 2, 3, 5, 8, 8, 8]


def test_prompts_come_first(served):
    """Where prompts wait or are computed, a step is full without drafts."""
    drafter = Drafter(free_tokens=4, most=7)
    sequences = [make_sequence([1, 2] * 8, max_tokens=8, id=number) for number in range(6)]
    assert max(max(each) for each in served(drafter, sequences, 4)[1:]) == 1


def test_drafts_are_judged_by_the_step_that_verified_them(fake_runner, monkeypatch):
    """Where the next steps had no room, tokens of these counted as right drafts."""
    whole = PROMPT + fake_completion(PROMPT, 60)
    repeating(monkeypatch, lambda own: [(whole[len(own)] + 1) % VOCAB] * 9)
    scheduler, drafter, lengths = make_scheduler(), Drafter(free_tokens=9, most=7), []
    add(scheduler, make_sequence(PROMPT, max_tokens=60))
    for free in (9, 9, 0, 0, 0, 9, 9):
        drafter.free_tokens = free
        drafter.propose(scheduler)
        plan, _ = step(scheduler, fake_runner)
        lengths.append(len(plan.chunks[0].token_ids))
    assert lengths == [5, 2, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (8, [[(0, 5, 1), (1, 5, 1), (2, 5, 1)], [(0, 7, 3), (1, 7, 3)], [(0, 11, 1), (1, 11, 1)]]),
        (12, [[(0, 5, 3), (1, 5, 3), (2, 5, 1)], [(0, 9, 3), (1, 9, 3)]]),
    ],
)
def test_rows_share_what_a_head_drafts(free, expected, served, monkeypatch):
    """The first row took all that was free, and a row near its end was asked for tokens that it cannot have."""
    monkeypatch.setattr("rosebatch.engine.drafts.drafter.find_ending", lambda own: (0, 0))
    prompts, asked = [[number, 2, 3, 4, 5] for number in range(3)], []
    whole = [prompt + fake_completion(prompt, 9) for prompt in prompts]

    def ask(requests):
        asked.append([(each.id, each.position, each.most) for each in requests])
        assert all(each.token_id == whole[each.id][each.position] for each in requests)
        return [whole[each.id][each.position + 1 :][: each.most] for each in requests]

    sequences = [make_sequence(prompt, max_tokens=9 - 6 * (n == 2), id=n) for n, prompt in enumerate(prompts)]
    drafter = Drafter(free_tokens=free, most=7, head=AskedHead(ask, 0.05))
    lengths = served(drafter, sequences, 1 + len(expected))
    assert asked == expected
    assert lengths == [[5] * 3, *([1 + most for *_, most in each] for each in expected)]


def test_as_many_drafts_of_a_head_as_are_worth_their_time():
    """After one wrong draft a row paused, as for copies: a head that is right in six of ten saved a third as much."""
    rng, most = np.random.default_rng(0), {}
    for share, cost in ((0.0, 0.05), (0.6, 0.05), (0.6, 0.2), (0.9, 0.05)):
        head, tries = AskedHead(lambda requests: [], cost), []
        for _ in range(2000):
            tries.append(drafts := head.most())
            if drafts:
                wrong = np.flatnonzero(rng.random(drafts) >= share)
                head.learn(int(wrong[0]) if len(wrong) else drafts, drafts)
        most[share, cost] = float(np.mean(tries[100:]))
    # One try in 32; then the counts that save the most, near 4, 2 and 10.
    assert most[0.0, 0.05] == pytest.approx(1 / 32, rel=0.1)
    assert 3 < most[0.6, 0.05] < 5 and 1 < most[0.6, 0.2] < 2.5 and most[0.9, 0.05] > 6.9


@pytest.mark.parametrize(("end", "learnt"), [(None, [(1, 2), (0, 1)]), (2, [(1, 1)])])
def test_what_a_head_learns_of_a_row(end, learnt, fake_runner):
    """Drafts behind the end of an answer counted as wrong ones."""
    whole, seen = PROMPT + fake_completion(PROMPT, 9), []
    # Right, wrong, right; then wrong.
    drafts = iter([[whole[6], (whole[7] + 1) % VOCAB, whole[8]], [(whole[8] + 1) % VOCAB]])
    head = AskedHead(lambda requests: [next(drafts, [])], 0.05)
    head.learn = lambda *told: seen.append(told)
    scheduler, drafter = make_scheduler(), Drafter(free_tokens=100, most=1, head=head)
    drafter._copy = lambda *_, **__: (0, [])
    add(scheduler, make_sequence(PROMPT, max_tokens=9, eos=frozenset() if end is None else {whole[4 + end]}))
    for _ in range(4):
        drafter.propose(scheduler)
        if scheduler.has_unfinished and len(seen) < len(learnt):
            step(scheduler, fake_runner)
    assert seen == learnt
