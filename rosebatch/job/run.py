"""The main job: rows in, the engine in the middle, result rows out.

Reading, encoding, decoding and the device work beside this; all that is Python happens here in turn with the engine's
steps, a little at a time, while the device computes.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from rosebatch.engine.engine import Engine
from rosebatch.errors import RowError
from rosebatch.io.output import Output
from rosebatch.io.reader import Row
from rosebatch.io.results import Shape
from rosebatch.io.rows import FailedRow
from rosebatch.job.answers import ROWS_A_STEP, Answers, failed_row
from rosebatch.job.prepare import Prepared, PreparedRow, by_prefix, prepare
from rosebatch.report.progress import Progress
from rosebatch.report.tally import Tally
from rosebatch.text.grammar import Grammars
from rosebatch.text.tokenizer import StopStrings, Tokenizer

# One encodes while the other decodes; each call uses all cores.
_TEXT_THREADS = 2
# Objects made before Python looks for cycles among them, of which a job makes few: by default it looks far more often,
# which took 7 % of the host's time.
_GARBAGE_THRESHOLD = 50_000


def run_job(
    engine: Engine,
    tokenizer: Tokenizer | None,
    rows: Iterable[Row],
    output: Output,
    *,
    progress: Progress,
    shape: Shape,
    seed: int | None = None,
    return_token_ids: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Tally:
    """Generate a completion for every row; a row that cannot be served becomes an error row.

    Args:
        engine: with nothing else to do.
        tokenizer: None for a model that works on token ids.
        rows: the input.
        output: gets one result for each row that it does not have yet, and is finished at the end.
        progress: told of every finished row.
        shape: of the result rows.
        seed: of the job (see ``rosebatch.job.seeds``).
        return_token_ids: add ``token_ids`` to the results.
        check: called before every step; what it raises ends the job there.

    Returns:
        what was counted.
    """
    tally = Tally()
    # Twice what runs at a time: there is always a next sequence, and memory does not grow with the file.
    window = 2 * engine.scheduler.max_num_seqs
    missing = (row for row in rows if row.index not in output)
    grammars = None if tokenizer is None else Grammars(tokenizer, engine.vocab_size, engine.eos_token_ids)
    with ThreadPoolExecutor(_TEXT_THREADS, "rosebatch-text") as pool, _few_collections():
        source = prepare(missing, tokenizer, grammars, pool, seed, tally.host_seconds)
        if engine.scheduler.prefix_cache:
            source = by_prefix(source, window)
        answers = Answers(tokenizer, output, progress, shape, return_token_ids, tally, pool)
        _run(engine, source, answers, output, tokenizer, window, check)
    return tally


def _run(
    engine: Engine,
    source: Iterator[Prepared],
    answers: Answers,
    output: Output,
    tokenizer: Tokenizer | None,
    window: int,
    check: Callable[[], None],
) -> None:
    exhausted, seats = False, engine.scheduler.max_num_seqs
    while not exhausted or engine.has_unfinished:
        # By numbers alone, never as far as threads happen to be: a second run is the same run. A few rows at a time, so
        # that the device does not wait while many are replaced at once; all of them where seats would stay empty.
        added = 0
        while not exhausted and engine.num_unfinished < (window if added < ROWS_A_STEP else seats):
            check()
            if output.full and engine.has_unfinished:
                break
            item = next(source, None)
            if item is None:
                exhausted = True
                break
            failed = item if isinstance(item, FailedRow) else _add(engine, item, tokenizer)
            if failed is not None:
                answers.fail(failed)
            added += 1
        check()
        answers.take(engine.step() if engine.has_unfinished else ())
        answers.write_some()
    answers.finish()


@contextmanager
def _few_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(_GARBAGE_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _add(engine: Engine, row: PreparedRow, tokenizer: Tokenizer | None) -> FailedRow | None:
    """Queue all of a row, or, where the engine refuses a part of it, nothing."""
    sampling, grammar = row.first.sampling, row.grammar
    matcher = (
        partial(StopStrings, tokenizer, sampling.stop, sampling.min_tokens) if sampling.stop and tokenizer else None
    )
    try:
        for request in row.requests[1:]:
            engine.require_servable(request)
        for request in row.requests:
            engine.add(request, stop_matcher=matcher, constraint=None if grammar is None else grammar.start)
    except RowError as error:
        return failed_row(row.first, error)
    return None
