"""The main job: rows in, the engine in the middle, result rows out.

Reading and tokenizing happen on a thread of their own, a group of rows at a time, bounded in how far they run ahead.
"""

import queue
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from rosebatch.engine.engine import Engine
from rosebatch.errors import RowError
from rosebatch.io.output import Output
from rosebatch.io.reader import Row
from rosebatch.io.rows import Answer, FailedRow, PromptRow, Shape
from rosebatch.progress import Progress
from rosebatch.report import Tally
from rosebatch.request import Completion, Request
from rosebatch.seeds import row_seed
from rosebatch.tokenizer import StopStrings, Tokenizer, cut_at_stop

# Rows tokenized in one call, and such groups waiting for the engine.
_GROUP = 64
_GROUPS_AHEAD = 8
# Between two looks at whether to go on, where there is nothing to do but wait for rows.
_PATIENCE_SECONDS = 0.1

Prepared = Request | FailedRow
T = TypeVar("T")


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
        seed: of the job (see ``rosebatch.seeds``).
        return_token_ids: add ``token_ids`` to the results.
        check: called before every step; what it raises ends the job there.

    Returns:
        what was counted.
    """
    tally = Tally()
    # Twice what runs at a time: there is always a next sequence, and memory does not grow with the file.
    window = 2 * engine.scheduler.max_num_seqs
    missing = (row for row in rows if row.index not in output)
    source = prepare(missing, tokenizer, seed, tally.host_seconds)
    if engine.scheduler.prefix_cache:
        source = _by_prefix(source, window)
    prepared = _in_background(source, check)
    exhausted = False
    while not exhausted or engine.has_unfinished:
        # Always filled up before a step, never as far as the thread happens to be: a second run is the same run.
        while not exhausted and engine.num_unfinished < window:
            check()
            if output.full and engine.has_unfinished:
                break
            item = next(prepared, None)
            if item is None:
                exhausted = True
                break
            try:
                if isinstance(item, FailedRow):
                    raise item.error
                stop = item.sampling.stop
                engine.add(item, StopStrings(tokenizer, stop) if stop and tokenizer else None)
            except RowError as error:
                failed = FailedRow(index=item.index, where=item.where, metadata=item.metadata, error=error)
                with _Stopwatch(tally.host_seconds, "writing"):
                    output.add(item.index, shape.failure(failed), failed=True)
                tally.add_error(error)
                progress.advance(failed=True)
        check()
        for completion in engine.step() if engine.has_unfinished else ():
            with _Stopwatch(tally.host_seconds, "detokenizing"):
                answer = _answer(completion, tokenizer, return_token_ids)
            with _Stopwatch(tally.host_seconds, "writing"):
                output.add(answer.index, shape.result(answer), failed=False)
            tally.add(replace(completion, finish_reason=answer.finish_reason))
            progress.advance(output_tokens=len(completion.token_ids))
        with _Stopwatch(tally.host_seconds, "writing"):
            output.flush()
    with _Stopwatch(tally.host_seconds, "writing"):
        output.finish()
    return tally


def prepare(
    rows: Iterable[Row],
    tokenizer: Tokenizer | None,
    seed: int | None = None,
    seconds: defaultdict[str, float] | None = None,
) -> Iterator[Prepared]:
    """Turn rows into requests, a group at a time; those that cannot be served whatever the engine are failed rows.

    Args:
        rows: of the input.
        tokenizer: None for a model that works on token ids.
        seed: of the job.
        seconds: what it takes is added there.
    """
    source = iter(rows)
    seconds = defaultdict(float) if seconds is None else seconds
    while True:
        with _Stopwatch(seconds, "reading"):
            group = list(islice(source, _GROUP))
        if not group:
            return
        with _Stopwatch(seconds, "tokenizing"):
            prompts = iter(_token_ids([row for row in group if isinstance(row, PromptRow)], tokenizer))
        for row in group:
            if isinstance(row, FailedRow):
                yield row
                continue
            yield _request(row, next(prompts), tokenizer, seed)


def _by_prefix(items: Iterator[Prepared], window: int) -> Iterator[Prepared]:
    """A window of rows at a time, such with the same beginning one behind the other.

    So its blocks are computed once and are still there for the next, however little the KV cache holds.
    """
    while group := list(islice(items, window)):
        yield from (item for item in group if isinstance(item, FailedRow))
        yield from sorted((item for item in group if isinstance(item, Request)), key=_prefix_order)


def _prefix_order(request: Request) -> bytes:
    """Bytes compare in no time; which order of tokens they stand for does not matter."""
    try:
        return array("q", request.prompt_token_ids).tobytes()
    except OverflowError:
        # No token ids of any model: the engine refuses them.
        return b""


def _token_ids(rows: Sequence[PromptRow], tokenizer: Tokenizer | None) -> list[Sequence[int] | RowError]:
    """The prompt of each row as token ids, all texts of the group encoded in one call."""
    ids: dict[int, Sequence[int] | RowError] = {}
    texts = [row for row in rows if row.prompt is not None]
    chats = [row for row in rows if row.messages is not None]
    if tokenizer is None:
        refusal = RowError("no_tokenizer", "the model has no tokenizer: give prompt_token_ids")
        ids = {row.index: refusal for row in [*texts, *chats]}
    else:
        ids |= zip((r.index for r in texts), tokenizer.encode([r.prompt or "" for r in texts]), strict=True)
        encoded = tokenizer.encode_chats([r.messages or [] for r in chats], [r.options.template for r in chats])
        ids |= zip((r.index for r in chats), encoded, strict=True)
    return [ids[row.index] if row.prompt_token_ids is None else row.prompt_token_ids for row in rows]


def _request(
    row: PromptRow, prompt: Sequence[int] | RowError, tokenizer: Tokenizer | None, seed: int | None
) -> Prepared:
    sampling, options = row.sampling, row.options
    if tokenizer is None and (sampling.stop or options.echo):
        prompt = RowError("no_tokenizer", "stop strings and echo need a model with a tokenizer")
    if isinstance(prompt, RowError):
        return FailedRow(index=row.index, where=row.where, metadata=row.metadata, error=prompt)
    prompt = tuple(prompt[-options.truncate_prompt_tokens :])
    if not row.has_seed:
        sampling = replace(sampling, seed=row_seed(seed, row.index, row.id, prompt))
    echo = ""
    if options.echo and tokenizer is not None:
        whole = row.prompt is not None and not options.truncate_prompt_tokens
        echo = row.prompt if whole and row.prompt else tokenizer.decode(prompt)
    return Request(
        index=row.index,
        prompt_token_ids=prompt,
        sampling=sampling,
        metadata=row.metadata,
        where=row.where,
        echo=echo,
    )


def _answer(completion: Completion, tokenizer: Tokenizer | None, return_token_ids: bool) -> Answer:
    request = completion.request
    text, finish_reason = None, completion.finish_reason
    if tokenizer is not None:
        whole = tokenizer.decode(completion.token_ids)
        text = cut_at_stop(whole, request.sampling.stop)
        # A stop string in the last characters of a completion that reached its length: only the whole text shows it.
        finish_reason = "stop" if len(text) < len(whole) else finish_reason
        text = request.echo + text
    return Answer(
        index=request.index,
        metadata=request.metadata,
        text=text,
        finish_reason=finish_reason,
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=len(completion.token_ids),
        cached_tokens=completion.cached_tokens,
        token_ids=list(completion.token_ids) if return_token_ids else None,
    )


class _Stopwatch:
    """Adds the seconds of a ``with`` block under a name."""

    __slots__ = ("_name", "_seconds", "_started")

    def __init__(self, seconds: defaultdict[str, float], name: str) -> None:
        self._seconds = seconds
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._started


def _in_background(items: Iterator[T], check: Callable[[], None]) -> Iterator[T]:
    """Run an iterator on a thread, a bounded number of items ahead; what it and ``check`` raise is raised here."""
    done = object()
    ahead: queue.Queue[Any] = queue.Queue(maxsize=_GROUP * _GROUPS_AHEAD)
    stopped = threading.Event()

    def put(item: Any) -> bool:
        while not stopped.is_set():
            try:
                ahead.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(done)
        except BaseException as error:
            put(error)

    threading.Thread(target=work, name="rosebatch-prepare", daemon=True).start()
    try:
        while True:
            try:
                item = ahead.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                check()
                continue
            if item is done:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
