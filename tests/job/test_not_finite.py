"""Rows without finite logits: error rows of their own code, and the end of a run that has nothing else."""

import pytest

from rosebatch.core.errors import UserError
from rosebatch.engine.plan import NOT_FINITE
from tests.job.fake_model import FakeModel
from tests.job.lines import codes


class BrokenModel(FakeModel):
    """Has no finite logits for prompts that begin with ``x``, from the third token on."""

    def next_token(self, token_ids, prompt, seed):
        if prompt[0] == ord("x") and len(token_ids) >= len(prompt) + 2:
            return NOT_FINITE
        return super().next_token(token_ids, prompt, seed)


def lines(*prompts):
    return [{"prompt": prompt, "max_tokens": 5} for prompt in prompts]


def test_such_a_row_fails_and_others_go_on(job):
    """It was an answer like any other: an empty text, and exit code 0."""
    rows, tally, _ = job.run(lines("a", "x", "b", "xyz"), model=BrokenModel())
    assert codes(rows) == [None, "non_finite_logits", None, "non_finite_logits"]
    assert rows[1]["error"]["message"] == "line 2: the model's logits for token 3 of the answer are not finite"
    assert tally.errors == {"non_finite_logits": 2}


def test_a_run_of_nothing_else_ends(job):
    """A million rows of a damaged model would all be computed, to fill the output with errors."""
    steps = []
    with pytest.raises(UserError, match=r"^all [0-9]+ rows so far failed: the model's logits are not finite"):
        job.run(lines(*["x"] * 1000), model=BrokenModel(before_step=steps.append))
    assert len(steps) < 200
    with pytest.raises(UserError, match=r"^all 3 rows so far failed"):
        job.run(lines("x", "x", "x"), model=BrokenModel())


def test_a_single_good_row_keeps_it_going(job):
    rows = job.results(lines("a", *["x"] * 200), model=BrokenModel())
    assert codes(rows) == [None, *["non_finite_logits"] * 200]


def test_rows_that_fail_for_other_reasons_do_not_keep_it_going(job):
    """One bad line among a million, and the whole file was computed."""
    with pytest.raises(UserError, match=r"^all [0-9]+ rows so far failed"):
        job.run([{"prompt": ""}, *lines(*["x"] * 1000)], model=BrokenModel())
    for good in ([], lines("x")):
        rows = job.results([{"prompt": ""}] * 3 + good, model=BrokenModel())
        assert codes(rows)[:3] == ["empty_prompt"] * 3
