"""Decode steps that find and verify drafts on the device: the tokens of the PyTorch runner's steps without any."""

import random
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.images import ImageEncoder
from rosebatch.engine.plan import DecodeWindow
from rosebatch_kernels.feedback.layout import LIMIT, NEXT, POSITION, TOKEN
from tests.engine import small_models
from tests.engine.small_models import VOCAB, device_engine, plain_engine
from tests.engine.test_triton_families import tokens
from tests.engine.test_triton_images import request as with_images
from tests.engine.test_triton_images import tower_of
from tests.helpers import running
from tests.helpers.marks import ON_TRITON_RUNNER

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER]

KINDS = [
    {"max_tokens": 20, "ignore_eos": True},
    {"max_tokens": 14},
    {"max_tokens": 17, "temperature": 0.05, "seed": 3, "ignore_eos": True},
    {"max_tokens": 9, "temperature": 0.7, "top_k": 9, "seed": 2**63 + 5},
    {"max_tokens": 1},
    {"max_tokens": 12, "stop_token_ids": (7, 15, 24, 27, 40), "ignore_eos": True, "n": 2},
]


class Varying:
    """In place of the drafter: any of some numbers of queries, as far as a step has rows for them."""

    def __init__(self, *queries):
        self.queries = queries
        self.numbers = random.Random(2)

    def propose(self, scheduler):
        rows = len(scheduler.queues.running)
        wanted = self.numbers.choice(self.queries)
        scheduler.planner.queries = wanted if rows * wanted <= scheduler.planner.max_num_seqs else 1


def requests():
    """Prompts that repeat themselves, some of them beginning alike."""
    numbers = random.Random(5)
    trunk = [numbers.randrange(VOCAB) for _ in range(5)]
    made = []
    for index in range(13):
        own = [numbers.randrange(VOCAB) for _ in range(numbers.randint(1, 6))]
        prompt = (trunk * (index % 3) + own * 3)[:18]
        made.append(Request(index, tuple(prompt), SamplingParams(**KINDS[index % len(KINDS)])))
    return made


def run(engine, given=None):
    """Request id and sample -> tokens and finish reason."""
    done = {}
    for request in requests() if given is None else given:
        engine.add(request)
    while engine.has_unfinished:
        for each in engine.step():
            done[each.request.id, each.sample] = each.token_ids, each.finish_reason
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0
    return done


MODELS = ["llama", "gpt2", "softmaxes", "uneven", "e4m3", "deepseek_v3", "gemma4_e"]


@pytest.fixture(scope="module")
def expected():
    """What the PyTorch runner generates, by model."""
    return {name: run(plain_engine(name)) for name in MODELS}


@pytest.fixture
def slots(monkeypatch):
    """More than the smallest models have elsewhere: rows of drafts take some."""
    monkeypatch.setattr(small_models, "SLOTS", 64)


def draft_answers(engine, answers, wrong=range(VOCAB)):
    """Let the device find what comes, three times of four, and as many drafts as that: small models repeat nothing."""
    numbers, sampler = random.Random(1), engine.runner.sampler
    propose = sampler.kernels.propose

    def of_answers(fields, tokens, firsts, pool, distances, drafted, *cuts):
        propose(fields, tokens, firsts, pool, distances, drafted, *cuts)
        queries = drafted.shape[1] // fields.shape[1]
        for sequence_id, slot in engine.runner.slots.slot_of.items():
            sequence = engine.scheduler.queues.started[sequence_id]
            whole = *sequence.request.prompt_token_ids, *answers[sequence.request.id, sequence.sample][0]
            position, limit = fields[POSITION, slot].item(), fields[LIMIT, slot].item()
            # Behind a stop token that only the host knows, others follow.
            known = tokens[slot, : position + 1].tolist()[: len(whole)]
            assert position >= limit or known == list(whole[: position + 1]), "the device knows all tokens"
            for j in range(1, min(numbers.randint(1, queries), limit - position)):
                place, there = slot * queries + j, position + j
                right = there < len(whole) and numbers.random() < 0.75
                drafted[TOKEN, place] = whole[there] if right else numbers.choice(wrong)
                drafted[[POSITION, NEXT, LIMIT], place] = torch.tensor([there, there + 1, limit]).to(drafted)

    sampler.kernels = replace(sampler.kernels, propose=of_answers)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("queries", "limits"),
    [
        ((1, 4, 2), {}),
        ((2,), {"on": ("batch_invariant",)}),
        ((4, 2), {"blocks": 15}),
        ((2, 4), {"off": ("fused_rotary",)}),
    ],
    ids=["turns", "two", "cramped", "apart"],
)
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs", "slots")
def test_tokens_are_those_without_drafts(name, queries, limits, expected):
    """Right drafts and wrong ones, behind an end, at a limit, in blocks that windows give back, in turns with none."""
    engine = device_engine(name, **{"blocks": 150} | limits)
    engine.drafter = Varying(*queries)
    draft_answers(engine, expected[name])
    assert run(engine) == expected[name]
    stats = engine.stats
    assert stats.drafted > 15 and 0.3 < stats.accepted / stats.drafted < 0.9
    assert (stats.preemptions > 0) is ("blocks" in limits)


@pytest.mark.thorough
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs", "slots")
def test_drafts_are_found_in_the_tokens_of_rows_that_move(expected):
    """The device's own lookup, whatever it finds."""
    engine = device_engine("gpt2")
    engine.drafter = Varying(4, 2)
    assert run(engine) == expected["gpt2"]
    assert engine.stats.drafted > 0


class Always:
    """In place of the drafter: a number of queries, also where a step has no rows for them."""

    def __init__(self, queries):
        self.queries = queries

    def propose(self, scheduler):
        scheduler.planner.queries = self.queries


@pytest.mark.thorough
@pytest.mark.parametrize("slots", [1, 3, 5, 12])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_a_step_has_as_many_drafts_as_rows(slots, expected, monkeypatch):
    """Rows of drafts are slots, whose number may be odd: those of one sequence lay in the rows of the next."""
    monkeypatch.setattr(small_models, "SLOTS", slots)
    engine = device_engine("llama")
    engine.drafter = Always(4)
    assert run(engine) == expected["llama"]


@pytest.mark.parametrize("blocks", [60, 9])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_no_draft_is_behind_the_length_where_a_sequence_starts_over(blocks, monkeypatch):
    """Its keys have other rotations from there on."""
    prompts = [range(8), range(3, 12), range(14), range(9)]
    expected = tokens(plain_engine("phi3-longrope"), prompts)
    monkeypatch.setattr(small_models, "SLOTS", 16)
    engine = device_engine("phi3-longrope", blocks=blocks)
    engine.drafter = Always(4)
    draft_answers(engine, {(number, 0): (own, "length") for number, own in enumerate(expected)})
    assert tokens(engine, prompts) == expected
    assert engine.stats.accepted > 0


@pytest.mark.parametrize("on", [(), ("batch_invariant",)])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_drafts_behind_images_have_their_rotary_positions(on, monkeypatch):
    """A draft was turned by its place."""

    def completions(engine):
        engine.runner.images = ImageEncoder(lambda: tower_of(32), (0, 1, 2, 0, 1, 2, 0, 0) * 2, torch.device("cpu"))
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        prompts = [(5, "1", 6, 7), ("2", 8), (9, 10, 11), (12, "1", 13, "2", 14)]
        given = [structs.replace(with_images(i, parts), sampling=sampling) for i, parts in enumerate(prompts)]
        return {(i, 0): (each.token_ids, each.finish_reason) for i, each in running.run(engine, given).items()}

    expected = completions(plain_engine("llama"))
    monkeypatch.setattr(small_models, "SLOTS", 16)
    engine = device_engine("llama", on=on)
    engine.drafter = Always(4)
    draft_answers(engine, expected)
    assert completions(engine) == expected
    assert engine.stats.accepted > 0


@pytest.mark.thorough
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs", "slots")
def test_after_an_abort_no_draft_comes_from_dropped_rows(expected):
    """Their slots go to others, whose tokens the device does not have yet."""
    engine = device_engine("gpt2", blocks=150)
    engine.drafter = Always(4)
    for each in requests()[::-1]:
        engine.add(each)
    while not engine.stats.drafted:
        engine.step()
    engine.abort()
    draft_answers(engine, expected["gpt2"])
    assert run(engine) == expected["gpt2"]


@pytest.mark.thorough
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs", "slots")
def test_a_wrong_draft_with_keys_that_are_not_finite_harms_no_answer(expected):
    """Its value times a weight of zero made the rows before it fail: tokens that were right ended as an error."""
    answers = expected["llama"]
    used = {token for ids, _ in answers.values() for token in ids}
    used |= {token for request in requests() for token in request.prompt_token_ids}
    unused = min({*range(VOCAB)} - used)
    engine = device_engine("llama", blocks=150)
    engine.drafter = Varying(2, 4)
    engine.runner.model.embedding[unused] = float("nan")
    draft_answers(engine, answers, wrong=[unused])
    plans, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    assert run(engine) == answers
    assert sum(isinstance(plan, DecodeWindow) and len(plan.rows[0].known) > 0 for plan in plans) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("blocks", [150, 15], ids=["plenty", "cramped"])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs", "slots")
def test_a_predicted_answer_takes_fewer_steps(blocks, expected):
    """They were used on a CPU alone. Some are of another row, and slots go from one row to another."""
    answers, predicted = expected["llama"], device_engine("llama", blocks=blocks)
    predicted.drafter = Varying(4)
    plain = device_engine("llama", blocks=blocks)
    plain.drafter = Varying(4)
    given = [structs.replace(each, predicted=answers[each.id - (each.id % 4 == 1), 0][0]) for each in requests()]
    assert run(predicted, given) == run(plain) == answers
    assert predicted.stats.accepted > 1.5 * plain.stats.accepted
