"""Tokens that a grammar leaves no choice for: no step samples them, and the next computes them all."""

from array import array

import pytest
from msgspec import structs

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.plan import NOT_FINITE, StepResult
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.triton_runner.slots import Slots
from tests.engine.schedulers import add, chunks, findable, make_scheduler

PROMPT = [7, 1, 8, 2, 8]


class Template:
    """Forces tokens at some places of the answer; complete after so many."""

    error, forces = None, True

    def __init__(self, forced, complete=99):
        self.by_place, self.complete, self.tokens = forced, complete, []

    def feed(self, token_id):
        assert self.by_place.get(len(self.tokens), token_id) == token_id
        self.tokens.append(token_id)
        return len(self.tokens) == self.complete

    @classmethod
    def feed_all(cls, constraints, token_ids):
        return [each.feed(token_id) for each, token_id in zip(constraints, token_ids, strict=True)]

    def follow(self, token_id):
        return [token_id], self.feed(token_id)

    def rest(self):
        return ()

    @classmethod
    def fill_all(cls, constraints, masks):
        for mask, each in zip(masks, constraints, strict=True):
            forced = each.by_place.get(len(each.tokens))
            mask[:] = -1 if forced is None else 1 << forced


def begun(constraint, max_tokens=12, stop_ids=(), restart_len=None, **sampling):
    """A scheduler and its only sequence, whose prompt is computed."""
    request = Request(0, TokenIds.of(PROMPT), SamplingParams(max_tokens=max_tokens, **sampling))
    sequence = SequenceState.start(request, id=0, max_model_len=99, stop_ids=frozenset(stop_ids), constraint=constraint)
    sequence.restart(structs.replace(sequence.spec, restart_len=restart_len))
    scheduler = make_scheduler(forces=32)
    add(scheduler, sequence)
    scheduler.commit(scheduler.schedule(), StepResult([[11]]))
    return scheduler, sequence


def test_the_next_step_computes_all_of_them():
    scheduler, sequence = begun(Template({1: 12, 2: 13, 3: 14, 5: 16}))
    assert sequence.output_token_ids == [11, 12, 13, 14] and len(sequence.token_times) == 4
    plan = scheduler.schedule()
    assert plan.chunks[0].token_ids == array("I", [11, 12, 13, 14])
    assert (chunks(plan), plan.chunks[0].decodes, plan.chunks[0].drafts) == ([(0, 5, 4, 1)], True, array("I"))
    assert findable(scheduler) == [0, 1]
    committed = scheduler.commit(plan, StepResult([[15]]))
    assert (sequence.output_token_ids, committed.forced) == ([11, 12, 13, 14, 15, 16], 1)
    scheduler.check_integrity()
    assert chunks(scheduler.schedule()) == [(0, 9, 2, 1)]


@pytest.mark.parametrize(
    ("constraint", "options", "output", "reason"),
    [
        (Template({1: 12, 2: 13}, complete=3), {}, [11, 12, 13], "stop"),
        (Template({1: 12, 2: 13}), {"stop_ids": [12]}, [11, 12], "stop"),
        (Template({1: 12, 2: 13, 3: 14}), {"max_tokens": 3}, [11, 12, 13], "length"),
    ],
)
def test_they_may_end_the_answer(constraint, options, output, reason):
    """Its blocks and its slot are given back, as after a token that was sampled."""
    scheduler, sequence = begun(constraint, **options)
    assert (sequence.output_token_ids, sequence.finish_reason) == (output, reason)
    assert not scheduler.has_unfinished and scheduler.blocks.num_used == 0


@pytest.mark.parametrize("options", [{"logprobs": 0}, {"min_tokens": 2, "stop_ids": [12]}])
def test_some_have_to_be_sampled(options):
    """A step has the log-probabilities; an end that comes too early is an error, which sampling finds."""
    scheduler, sequence = begun(Template({1: 12}), **options)
    assert sequence.output_token_ids == [11]
    assert chunks(scheduler.schedule()) == [(0, 5, 1, 1)]


class LongFactors:
    """A policy of seven tokens."""

    def spec_for(self, spec, num_tokens):
        return structs.replace(spec, salt=b"long" if num_tokens > 6 else b"", restart_len=None)


@pytest.mark.parametrize("count", [1, 2])
def test_a_restart_that_they_jump_over(count):
    """Longrope computes all keys again from some length on: a sequence that came past it at once kept the old ones."""
    scheduler, sequence = begun(Template(dict.fromkeys(range(1, 1 + count), 12)), restart_len=7)
    scheduler.restarts = LongFactors()
    assert sequence.num_tokens == 6 + count
    plan = scheduler.schedule()
    assert (chunks(plan), plan.started[0].salt) == ([(0, 0, 6 + count, 1)], b"long")


def test_known_tokens_take_no_blocks_of_what_comes_back_in_the_same_plan():
    """A row that came back from the host was started and released in one plan, which ended the job."""
    options = {"num_blocks": 8, "block_size": 1, "host_blocks": 9, "policy": SeparateDecodes(1), "forces": 32}
    scheduler, slots = make_scheduler(**options), Slots(8, 8)
    kinds = [(0, 7, Template({3: 12, 4: 13, 5: 14})), (1, 3, None), (2, 7, None)]
    for number, most, constraint in kinds:
        request = Request(number, TokenIds.of([number]), SamplingParams(max_tokens=most))
        add(scheduler, SequenceState.start(request, id=number, max_model_len=99, constraint=constraint))
    restored = 0
    while (plan := scheduler.schedule()) is not None:
        assert not {kept for _, kept in plan.saves} & {kept for _, kept in plan.restores}
        slots.update(plan)
        restored += len(plan.restores)
        scheduler.commit(plan, StepResult([[5]] * len(plan.sampled_ids)))
        scheduler.check_integrity()
    assert restored and not scheduler.has_unfinished


def test_a_step_waits_only_for_what_may_be_forced():
    """Rows beside one with bad_words, or beside waiting ones with a grammar, lost the next step's head start."""
    scheduler, sequence = begun(Template({}), max_tokens=12)
    planner = scheduler.planner
    assert planner.forcing
    sequence.constraint.forces = False
    assert not planner.forcing
    sequence.constraint.forces = True
    planner.forces_up_to = 0
    assert not planner.forcing
    scheduler, _ = begun(Template({}), logprobs=1)
    assert not scheduler.planner.forcing


class Counted(Template):
    """Notes which constraints were fed together."""

    calls = []

    @classmethod
    def feed_all(cls, constraints, token_ids):
        cls.calls.append((list(constraints), list(token_ids)))
        return [each.feed(token_id) for each, token_id in zip(constraints, token_ids, strict=True)]


def test_rows_of_a_plan_are_followed_together(monkeypatch):
    """Grammars of many rows work on all cores only together: each token once, and none where logits are not finite."""
    monkeypatch.setattr(Counted, "calls", [])
    first, broken, last = (Counted({}, complete) for complete in (99, 99, 1))
    requests = [Request(i, TokenIds.of([i, *PROMPT]), SamplingParams(max_tokens=9)) for i in range(4)]
    sequences = [
        SequenceState.start(request, id=request.id, max_model_len=99, constraint=constraint)
        for request, constraint in zip(requests, (first, None, broken, last), strict=True)
    ]
    scheduler = make_scheduler(*sequences)
    finished = scheduler.commit(scheduler.schedule(), StepResult([[11], [12], [NOT_FINITE], [13]])).finished
    assert Counted.calls == [([first, last], [11, 13])]
    assert [(each.id, each.finish_reason) for each in finished] == [(2, "error"), (3, "stop")]
    assert [each.tokens for each in (first, broken, last)] == [[11], [], [13]]
    assert sequences[0].output_token_ids == [11] and sequences[3].output_token_ids == [13]
