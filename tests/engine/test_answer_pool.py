"""Finished answers, in which drafts for other rows are found."""

import random
from array import array

import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.plan import NO_ANSWER, DecodeWindow
from rosebatch.engine.scheduling.answer_pool import AnswerPool
from tests.engine import small_models
from tests.engine.small_models import device_engine, plain_engine
from tests.engine.test_triton_drafts import Varying
from tests.helpers.marks import ON_TRITON_RUNNER


def test_the_last_answers_are_kept():
    """Memory, and the time of a look, would grow with the job."""
    pool, answers = AnswerPool(40), [array("I", range(10 * n, 10 * n + n)) for n in (8, 9, 12, 3, 13, 60)]
    for count, answer in enumerate(answers[:5]):
        pool.add(answer)
        kept = [each for each in answers[: count + 1] if len(each) > 7]
        while sum(len(each) + 1 for each in kept) > 40:
            kept.pop(0)
        assert pool.tokens == array("I", [token for each in kept for token in (*each, NO_ANSWER)])
    assert pool.version == 4
    pool.add(answers[5])
    assert pool.tokens == answers[5][-39:] + array("I", [NO_ANSWER])


@pytest.mark.thorough
@pytest.mark.matrix
@pytest.mark.parametrize("marks", [pytest.param(None, marks=ON_TRITON_RUNNER)], ids=[""])
@pytest.mark.usefixtures("unwritten_is_nan", "few_programs")
def test_rows_find_drafts_in_answers_of_others(marks, monkeypatch):
    """The same prompt once more repeats nothing of its own. After an abort, the device has to get all answers again."""
    monkeypatch.setattr(small_models, "SLOTS", 24)
    numbers = random.Random(8)
    prompts = [tuple(numbers.randrange(small_models.VOCAB) for _ in range(3 + index)) for index in range(4)]

    def run(engine):
        sampling = SamplingParams(max_tokens=14, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add(Request(number, prompt, sampling))
        done = {}
        while engine.has_unfinished:
            done |= {each.request.id: each.token_ids for each in engine.step()}
        return done

    expected = run(plain_engine("llama"))
    engine = device_engine("llama")
    engine.drafter, engine.scheduler.planner.answers = Varying(4), AnswerPool(200)
    plans, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    accepted = []
    for _ in range(3):
        engine.restart_stats()
        assert run(engine) == expected
        accepted.append(engine.stats.accepted)
        engine.abort()
    assert accepted[1] > accepted[0] + 12 and accepted[2] > accepted[0] + 12
    sent = [len(plan.answers) for plan in plans if isinstance(plan, DecodeWindow) and plan.answers is not None]
    assert len(sent) >= 2
