"""Drafts inside of a decode step: what is found, what is kept of it, and nothing else is written."""

import random

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.shared_keys import Pieces
from rosebatch_kernels.common.tokens import NO_TOKEN, NOT_FINITE, WRONG_DRAFT
from rosebatch_kernels.drafts import reference
from rosebatch_kernels.feedback.layout import LIMIT, NEXT, NUM_FIELDS, POSITION, STOPS, TOKEN

IMPLEMENTATIONS = {"reference": reference, "kernel": Launchers("drafts.kernel")}


class State:
    """Sequences of a small vocabulary, so that endings recur; some are not live, some longer than what is kept."""

    def __init__(self, batch, width, seed, device, apart=3):
        numbers = random.Random(seed)
        self.tokens = torch.tensor([[numbers.randrange(3) for _ in range(width)] for _ in range(batch)])
        self.fields = torch.randint(1, 2**31 - 1, (NUM_FIELDS, batch), generator=torch.Generator().manual_seed(seed))
        # Some have a prediction before their own tokens.
        self.firsts = torch.tensor([numbers.choice([0, 0, 1, 7]) for _ in range(batch)], dtype=torch.int32).to(device)
        for row in range(batch):
            position = numbers.choice([0, 1, 5, width - 3, width - 1, width, width + 9, *range(10, width - 3, 7)])
            self.fields[POSITION, row], self.fields[NEXT, row] = position, position + 1
            self.fields[LIMIT, row] = position + numbers.choice([-1, 0, 1, 2, 3, 9, 9, 9])
            self.fields[TOKEN, row] = self.tokens[row, min(position + int(self.firsts[row]), width - 1)]
            self.fields[STOPS, row] = numbers.choice([0, 1])
        # What lies beyond is nobody's.
        pad = torch.nn.functional.pad
        self.all = [pad(each.int(), (0, apart), value=-9).to(device) for each in (self.tokens, self.fields)]
        self.tokens, self.fields = self.all[0][:, :width], self.all[1][:, :batch]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("queries", [2, 8])
def test_drafts_follow_the_longest_ending_of_which_the_last_place_counts(implementation, queries, alone, device):
    """By the definition, in lists: those of rows that end before them are not live."""
    state = State(23, 40, queries, device)
    drafted = torch.full((NUM_FIELDS, 23 * queries + 2), -9, dtype=torch.int32, device=device)
    distances = zeros(23, device)
    drafted_rows = drafted[:, : 23 * queries]
    # What lies behind the first tokens of answers is of older ones.
    shared = [0, 1, 2, 1, -1, 2, 2, 1, 0, 0, 2, 1, 0, 2, 0, 1, -1, 1, 1, 2, 2, 0, -1][: 0 if alone else 23]
    answers = torch.tensor([len(shared), *shared, *([1] * 9)], dtype=torch.int32, device=device)
    implementation.propose(state.fields, state.tokens, state.firsts, answers, distances, drafted_rows, zeros(1, device))
    assert (drafted[:, 23 * queries :] == -9).all()
    num_drafts = set()
    for row in range(23):
        own = state.fields[:, row].tolist()
        position, limit = own[POSITION], own[LIMIT]
        drafts = []
        place = position + int(state.firsts[row])
        if position < limit and place < 40:
            drafts = defined(shared, state.tokens[row, : place + 1].tolist(), min(queries, limit - position) - 1)
        num_drafts.add(len(drafts))
        for j in range(queries):
            found = drafted[:, row * queries + j].tolist()
            is_real = j <= len(drafts)
            expected = [*own]
            expected[POSITION], expected[NEXT] = (each + (j if is_real else 0) for each in (position, own[NEXT]))
            expected[TOKEN] = own[TOKEN] if not j else drafts[j - 1] if is_real else 0
            expected[LIMIT] = limit if is_real else 0
            assert found == expected
    assert {0, queries - 1} <= num_drafts


@pytest.mark.parametrize("windows", [(0,), (0, 9), (70, 64)])
def test_no_draft_has_its_keys_cut_at_other_places(implementation, windows, device):
    """Or its bits would not be those of a step alone: pieces begin with a window, and are longer in long rows."""
    pieces, queries, seen = Pieces(8, 4), 8, set()
    width = 160
    fields = torch.zeros(NUM_FIELDS, width, dtype=torch.int32, device=device)
    fields[POSITION], fields[LIMIT] = torch.arange(width, device=device).int(), 1000
    drafted = torch.empty(NUM_FIELDS, width * queries, dtype=torch.int32, device=device)
    given = torch.tensor(windows, dtype=torch.int32, device=device)
    # All tokens are equal: any number of drafts follows.
    none = zeros(width, device)
    implementation.propose(fields, zeros((width, width), device), none, none, none.clone(), drafted, given, pieces)
    live = (drafted[LIMIT] > 0).view(width, queries).sum(1).tolist()
    for position in range(4, width - 8):
        cuts = []
        for there in range(position, position + queries):
            origins = [max(there + 1 - window, 0) // 8 * 8 if window else 0 for window in windows]
            cuts.append([(origin, pieces.of(there - origin)) for origin in origins])
        same = next((j for j, cut in enumerate(cuts) if cut != cuts[0]), queries)
        assert live[position] == same
        seen.add(same)
    assert len(seen) > 6


def test_a_copy_with_a_changed_token_goes_on(implementation, device):
    """Behind each change, three steps had no draft: until the last three tokens were those of the original again."""
    document = list(range(100, 140))
    # Of rows: how many tokens are copied, the places of changes before the end, the distance before, and what follows.
    cases = [
        (20, (), 0, 40, [120, 121, 122]),
        (20, (1,), 40, 40, [120, 121, 122]),
        (20, (1, 2, 4), 40, 40, [120, 121, 122]),
        (20, (1, 2, 3, 5), 40, 0, []),
        (20, (1,), 0, 0, []),
        (20, (1,), 39, 0, []),
        (4, (1,), 40, 0, []),
        (20, (2,), 7, 0, []),
        # An ending of three counts, whatever the distance was.
        (20, (4,), 11, 40, [120, 121, 122]),
    ]
    width = 64
    tokens, fields = zeros((len(cases), width), device), zeros((NUM_FIELDS, len(cases)), device)
    for row, (copied, changes, *_) in enumerate(cases):
        own = document + document[:copied]
        for number, place in enumerate(changes):
            own[-place] = 900 + number
        tokens[row, : len(own)] = torch.tensor(own, dtype=torch.int32, device=device)
        fields[POSITION, row], fields[LIMIT, row] = len(own) - 1, 1000
    distances = torch.tensor([case[2] for case in cases], dtype=torch.int32, device=device)
    drafted = zeros((NUM_FIELDS, 4 * len(cases)), device)
    implementation.propose(
        fields, tokens, zeros(len(cases), device), zeros(1, device), distances, drafted, zeros(1, device)
    )
    assert distances.tolist() == [case[3] for case in cases]
    found = drafted[[TOKEN, LIMIT]].view(2, len(cases), 4)[:, :, 1:].tolist()
    drafts = [[token for token, limit in zip(*row, strict=True) if limit] for row in zip(*found, strict=True)]
    assert drafts == [case[4] for case in cases]


def zeros(shape, device):
    return torch.zeros(shape, dtype=torch.int32, device=device)


def defined(shared, own, most):
    """What came after the last place with the longest ending of three to eight tokens, again and again."""
    whole = [*shared, *own]
    for length in range(min(8, len(own)), 2, -1):
        for end in range(len(whole) - 2, length - 2, -1):
            first = end + 1 - length
            if whole[first : end + 1] == own[-length:] and (end < len(shared) or first >= len(shared)):
                drafts = [whole[end + 1 + j % (len(whole) - end - 1)] for j in range(most)]
                return drafts[: drafts.index(-1)] if -1 in drafts else drafts
    return []


@pytest.mark.parametrize("queries", [2, 4])
def test_tokens_are_kept_up_to_the_first_wrong_draft_or_the_end(implementation, queries, device):
    """Each row against a loop over single steps: the same fields, tokens and history."""
    batch, width, ends = 150, 30, [2]
    state = State(batch, width, 7 + queries, device)
    drafted = torch.empty(NUM_FIELDS, batch * queries, dtype=torch.int32, device=device)
    reference.propose(
        state.fields, state.tokens, state.firsts, zeros(1, device), zeros(batch, device), drafted, zeros(1, device)
    )
    numbers = random.Random(queries)
    before = state.fields.tolist(), state.tokens.tolist(), drafted.tolist()
    sampled = [
        numbers.choice([draft, draft, draft, draft, draft, numbers.randrange(4), NOT_FINITE])
        for draft in (
            before[2][TOKEN][place + 1] if place + 1 < batch * queries else 0 for place in range(batch * queries)
        )
    ]
    history = torch.full((3, batch * queries + 2), -9, dtype=torch.int32, device=device)
    step = torch.tensor([4], dtype=torch.int32, device=device)
    implementation.verify(
        torch.tensor(sampled, dtype=torch.int32, device=device),
        drafted,
        state.fields,
        state.tokens,
        state.firsts,
        history,
        step,
        torch.tensor(ends, dtype=torch.int32, device=device),
    )
    fields, tokens, rows = before
    shown = [NO_TOKEN] * (batch * queries)
    outcomes = set()
    for row in range(batch):
        start, limit, stopped = fields[POSITION][row], fields[LIMIT][row], False
        for j in range(queries):
            place = row * queries + j
            if start >= limit or start + j >= rows[LIMIT][place]:
                break
            if stopped or (j and rows[TOKEN][place] != sampled[place - 1]):
                last = next(i for i in range(j, queries + 1) if i == queries or start + i >= rows[LIMIT][place - j + i])
                shown[place : place - j + last] = [WRONG_DRAFT] * (last - j)
                outcomes.add("stopped" if stopped else "wrong")
                break
            shown[place] = sampled[place]
            known = max(sampled[place], 0)
            fields[TOKEN][row] = known
            fields[POSITION][row] += 1
            fields[NEXT][row] += 1
            if (there := int(state.firsts[row]) + start + j + 1) < width:
                tokens[row][there] = known
            stopped = sampled[place] == NOT_FINITE or (sampled[place] in ends and fields[STOPS][row] != 0)
            if stopped:
                fields[LIMIT][row] = 0
            outcomes.add(j)
    assert outcomes == {"stopped", "wrong", *range(queries)}, outcomes
    assert step.tolist() == [5]
    assert history[1, : batch * queries].tolist() == shown
    assert (history[[0, 2]] == -9).all() and (history[:, batch * queries :] == -9).all()
    assert state.fields.tolist() == fields
    assert state.tokens.tolist() == tokens
    assert all((each[:, -3:] == -9).all() for each in state.all)
