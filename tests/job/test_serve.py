"""The loop that every way of using rosebatch shares: rows that come late, a caller that stops, bad rows without end."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from msgspec.structs import replace

from rosebatch.core.errors import RowError
from rosebatch.core.images import PromptImage
from rosebatch.engine.engine import Engine
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.io.rows import FailedRow, parse_row
from rosebatch.job.prepare import _GROUP, _GROUPS_AHEAD, prepare
from rosebatch.job.results import result_of
from rosebatch.job.serve import _MAX_FAILED, _steps, serve
from rosebatch.job.tickets import Tickets
from rosebatch.text.grammar.grammars import Grammars
from tests.helpers.byte_tokenizer import BYTES, EOS
from tests.job.conftest import require_clean
from tests.job.fake_model import FakeModel, make_engine


@pytest.fixture
def serve_rows(tokenizer):
    """Serves lines on an engine; a line of None stands for nothing to read at the moment."""
    grammars = Grammars(tokenizer, BYTES + 1, (EOS,))

    def run(engine, lines, **options):
        rows = (
            None if line is None else parse_row(line, index=i, where=f"line {i + 1}", defaults={})
            for i, line in enumerate(lines)
        )
        return serve(engine, tokenizer, grammars, rows, **options)

    return run


def text_of(result):
    """The text of a row that was served."""
    return result.choices[0].text


def test_token_ids_take_no_turn_of_a_thread():
    """Seven rows of 1,300 ids were a group, and each group waited for a thread with nothing to encode."""
    rows = [parse_row({"prompt_token_ids": [i, 7]}, index=i, where="here", defaults={}) for i in range(9)]
    prepared = [row for row in prepare(rows, None, None, pool=None) if row is not None]
    assert [list(row.prompts[0].token_ids) for row in prepared] == [[i, 7] for i in range(9)]


def test_rows_of_one_token_fill_the_steps(serve_rows):
    """Rows whose only token is under way were counted as if they had slots: other steps had 32 rows, not 64."""
    steps = []
    scheduler = Scheduler(
        BlockPool(2000, 4), max_num_seqs=64, max_num_batched_tokens=4096, policy=SeparateDecodes(8), prefix_cache=False
    )
    model = FakeModel(before_step=lambda plan: steps.append(plan.num_sequences))
    engine = Engine(scheduler, model, vocab_size=BYTES + 1, max_model_len=99, eos_token_ids=[EOS], async_depth=1)
    served = itertools.chain.from_iterable(
        serve_rows(engine, [{"prompt": f"row {i}", "max_tokens": 1} for i in range(320)])
    )
    assert len(list(served)) == 320
    assert steps == [64] * 5


@pytest.mark.parametrize(("sees", "taken"), [(True, [40, 60, 80, 100]), (False, [64, 96, 128, 128])])
def test_images_are_not_awaited_for_steps_to_come(sees, taken):
    """A device had nothing to do while the images of all slots were loaded, of which a step computes few.

    Steps compute 80 tokens, which are 20 rows, and 40 rows are enough that wait. Texts are there at once.
    """
    read, found = 0, []
    scheduler = Scheduler(
        BlockPool(2000, 4), max_num_seqs=64, max_num_batched_tokens=80, policy=SeparateDecodes(8), prefix_cache=False
    )
    engine = Engine(scheduler, FakeModel(), vocab_size=BYTES + 1, max_model_len=99, eos_token_ids=[EOS], async_depth=1)
    image = PromptImage(1, np.ones(2, bool), (1, 2), bytes(32), np.zeros((2, 3, 1, 1), np.uint8))

    def prepared():
        nonlocal read
        rows = (
            parse_row({"prompt_token_ids": [7] * 4, "max_tokens": 1}, index=i, where="", defaults={})
            for i in range(128)
        )
        for row in prepare(rows, None, None, pool=None):
            if row is not None:
                read += 1
                images = (image,) if sees else ()
                yield replace(row, prompts=tuple(replace(prompt, images=images) for prompt in row.prompts))

    tickets = Tickets(None, None, defaultdict(float), 1 << 30, lambda: None, return_token_ids=False, whole_texts=False)
    done = 0
    for batch in _steps(engine, prepared(), tickets, 128, lambda: False, lambda: None):
        found.append(read)
        done += len(list(batch))
    assert found[:4] == taken
    assert done + len(list(tickets.rest())) == 128


def test_rows_that_come_late_do_not_hold_back_finished_ones(serve_rows):
    """An agent sends its second prompt when it has the answer to the first: neither may wait for the other."""
    engine, done = make_engine(FakeModel()), []

    def lines():
        for number in range(3):
            yield {"prompt": f"row {number}", "max_tokens": 5}
            for _ in range(1000):
                if len(done) > number:
                    break
                yield None
            assert len(done) == number + 1, "the row before must be finished while there is nothing to read"

    for batch in serve_rows(engine, lines(), in_order=True):
        done += map(text_of, batch)
    assert done == [FakeModel().complete(f"row {number}", 5) for number in range(3)]
    require_clean(engine)


def test_rows_that_come_late_join_those_that_run(serve_rows):
    """The first row runs on while there is nothing to read, and the second runs beside it."""
    engine = make_engine(FakeModel())
    lines = [{"prompt": "first", "max_tokens": 20}, *[None] * 5, {"prompt": "second", "max_tokens": 3}]
    served = [text_of(row) for batch in serve_rows(engine, lines, in_order=True) for row in batch]
    assert served == [FakeModel().complete("second", 3), FakeModel().complete("first", 20)]
    assert engine.stats.max_running == 2


@pytest.mark.parametrize("steps", range(12))
def test_closing_it_early_drops_what_is_unfinished(serve_rows, steps):
    """A caller that takes no more rows must not find them in its next call, nor an engine that is full of them."""
    engine = make_engine(FakeModel(), blocks=24)
    kinds = [{"n": 3}, {"structured_outputs": {"regex": "[0-9]{9}"}}, {"stop": "never"}, {"logprobs": 1}]
    lines = [{"prompt": f"a long beginning, row {i}", "max_tokens": 9, **kinds[i % 4]} for i in range(40)]
    batches = serve_rows(engine, lines)
    for _ in range(steps):
        next(batches)
    assert engine.has_unfinished == (steps > 0)
    batches.close()
    require_clean(engine)
    again = [{"prompt": f"a long beginning, row {i}", "max_tokens": 4} for i in range(6)]
    texts = {row.row.index: text_of(row) for batch in serve_rows(engine, again) for row in batch}
    assert texts == {i: FakeModel().complete(line["prompt"], 4) for i, line in enumerate(again)}
    require_clean(engine)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_step_that_fails_leaves_the_engine_usable(serve_rows, step):
    """Ctrl-C strikes inside a step; what that step was to compute must not be taken for cached after it."""
    numbers = itertools.count(1)

    def before_step(plan):
        if next(numbers) == step:
            raise KeyboardInterrupt

    engine = make_engine(FakeModel(before_step=before_step))
    lines = [{"prompt": f"a long beginning, row {i}", "max_tokens": 9, "n": 2} for i in range(6)]
    with pytest.raises(KeyboardInterrupt):
        list(serve_rows(engine, lines))
    require_clean(engine)
    (row,) = itertools.chain(*serve_rows(engine, [lines[0]]))
    assert text_of(row) == FakeModel().complete(lines[0]["prompt"], 9)
    assert (row.completions[0].cached_tokens > 0) == (step > 1)
    require_clean(engine)


def test_a_check_that_raises_ends_it(serve_rows):
    """Signals reach the job this way, between two steps."""
    engine, checks = make_engine(FakeModel()), itertools.count()

    def check():
        if next(checks) == 20:
            raise StopError

    with pytest.raises(StopError):
        list(serve_rows(engine, itertools.repeat({"prompt": "x", "max_tokens": 9}), check=check))
    require_clean(engine)


class StopError(Exception):
    """Ends the loop."""


@pytest.mark.parametrize("in_order", [False, True])
def test_endless_bad_rows_are_handed_out_in_bounded_batches(tokenizer, in_order):
    """A file of the wrong format has millions of them: they must reach the caller as they come, not fill the memory."""
    engine, read = make_engine(FakeModel()), 0

    def rows():
        nonlocal read
        for read in itertools.count(1):
            yield FailedRow(index=read, where="", metadata={}, error=RowError("invalid_json", "not valid JSON"))

    batches, taken = serve(engine, tokenizer, None, rows(), in_order=in_order), 0
    for batch in map(list, itertools.islice(batches, 20)):
        assert 0 < len(batch) <= _MAX_FAILED
        taken += len(batch)
        assert read - taken <= 2 * engine.max_num_seqs + _GROUP * (_GROUPS_AHEAD + 1)
    batches.close()
    require_clean(engine)


def test_good_rows_are_served_among_endless_bad_ones(serve_rows):
    """Each batch of failures is followed by a step."""
    engine = make_engine(FakeModel())
    lines = itertools.chain([{"prompt": "good", "max_tokens": 3}], itertools.repeat({}))
    batches = serve_rows(engine, lines)
    found = next(row for batch in itertools.islice(batches, 6) for row in batch if not isinstance(row, FailedRow))
    assert text_of(found) == FakeModel().complete("good", 3)
    batches.close()
    require_clean(engine)


def test_results_are_made_one_by_one(serve_rows, monkeypatch):
    """Those of a whole step together took 47 MiB in place of 18 where rows had log-probabilities."""
    made = []
    monkeypatch.setattr("rosebatch.job.tickets.result_of", lambda *args, **kw: made.append(1) or result_of(*args, **kw))
    lines = [{"prompt": f"row {i}", "max_tokens": 3} for i in range(8)]
    taken, largest = 0, 0
    for batch in serve_rows(make_engine(FakeModel()), lines, in_order=True):
        before = taken
        for _ in batch:
            taken += 1
            assert len(made) == taken
        largest = max(largest, taken - before)
    assert taken == 8 and largest > 1, "several rows must finish in one step"
