"""The loop that the command line and the library share: rows in, the engine in the middle, finished rows out.

Reading, encoding and decoding run on threads. Our own Python runs in this loop, a little at a time between the engine's
steps, while the device computes.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain

from rosebatch.engine.engine import Engine
from rosebatch.host.garbage import searched_rarely
from rosebatch.host.threads import DaemonPool
from rosebatch.io.images.policy import NO_MEDIA, MediaPolicy
from rosebatch.io.results import Result
from rosebatch.io.row_adapters import NO_ADAPTERS, RowAdapters
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.await_grammars import with_grammars
from rosebatch.job.images import with_images
from rosebatch.job.order import in_job_order
from rosebatch.job.prepare import prepare
from rosebatch.job.prepared import DEFAULT_BYTES, END, Prepared, size_of
from rosebatch.job.tickets import Tickets
from rosebatch.model.vision.vision import TEXT_ALONE, Sight
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer

# Rows that are added, and rows whose texts are decoded, between two steps: about what a decode window finishes. More
# where slots would stay empty, or many rows have finished at once.
_ROWS_A_STEP = 32
# Steps that waiting rows with images are enough for. The loop waits until each image is loaded.
_STEPS_AHEAD = 2
# Rows that fail one after the other before the caller gets them.
_MAX_FAILED = 1024


def serve(
    engine: Engine,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    rows: Iterable[Row | FailedRow | None],
    *,
    seed: int | None = None,
    in_order: bool = False,
    seconds: defaultdict[str, float] | None = None,
    paused: Callable[[], bool] = lambda: False,
    check: Callable[[], None] = lambda: None,
    expects_rows: Callable[[], bool] = lambda: True,
    max_inflight_bytes: int = DEFAULT_BYTES,
    return_token_ids: bool = False,
    whole_texts: bool = False,
    sight: Sight = TEXT_ALONE,
    media: MediaPolicy = NO_MEDIA,
    limit_images: int | None = None,
    max_pixels: int | None = None,
    adapters: RowAdapters = NO_ADAPTERS,
) -> Generator[Iterable[Result | FailedRow], None, None]:
    """Complete every row; a row that cannot be served becomes a failed one.

    Closing the iterator early drops what is unfinished, and leaves the engine ready for other work.

    Args:
        engine: with nothing else to do.
        tokenizer: None for a model that works on token ids.
        grammars: compiles what completions have to match; None for such a model.
        rows: the input; None says that there is none at the moment.
        seed: of the job (see ``rosebatch.job.seeds``).
        in_order: take rows as they come, see ``rosebatch.job.order``.
        seconds: host time by kind of work is added there.
        paused: whether the caller wants rows finished before more are begun.
        check: called before every step, and while texts or grammars keep it waiting; what it raises ends the loop.
        expects_rows: see ``rosebatch.job.order.in_good_order``.
        max_inflight_bytes: about what rows may take from being read to being handed out. A larger row runs alone.
        return_token_ids, whole_texts, media: see ``rosebatch.job.serve_options.ServeOptions``.
        sight: how the model sees, or why it does not.
        limit_images, max_pixels: see ``rosebatch.job.images.with_images``.
        adapters: of the run.

    Yields:
        after every step the rows that are finished, perhaps none, in any order. They are to be taken before the next
        step, one by one.
    """
    seconds = defaultdict(float) if seconds is None else seconds
    # Twice what runs at a time: there is always a next sequence, and memory does not grow with the input.
    max_unfinished = 2 * engine.max_num_seqs
    # Half of the bytes are for the engine. A quarter is for rows that are sorted, and the rest for those around them.
    max_bytes = max_inflight_bytes
    # One encodes while the other decodes; each call uses all cores.
    encoder, decoder = DaemonPool(1, "rosebatch-encode"), DaemonPool(1, "rosebatch-decode")
    with encoder, decoder, searched_rarely():
        limit = engine.max_model_len
        source = prepare(rows, tokenizer, grammars, encoder, seed, seconds, check, max_bytes, limit, sight, adapters)
        if not in_order and engine.generates:
            # Prompts of an encoder share nothing, and none takes long: they need not wait for a window of others.
            source = in_job_order(
                source,
                engine.max_num_seqs,
                max_bytes // 4,
                shares=engine.prefix_cache,
                by_adapter=engine.scheduler.planner.adapters.slots > 0,
                expects_rows=expects_rows,
            )
        if grammars is not None:
            source = with_grammars(source, grammars, check, seconds, max_bytes // 8)
        source = with_images(
            source, sight, tokenizer, media, check, seconds, max_bytes // 8, limit, limit_images, max_pixels
        )
        tickets = Tickets(tokenizer, decoder, seconds, max_bytes // 2, check, return_token_ids, whole_texts)
        try:
            yield from _steps(engine, source, tickets, max_unfinished, paused, check)
        except BaseException:
            engine.abort()
            raise
        yield tickets.rest()


def _steps(
    engine: Engine,
    source: Iterator[Prepared | FailedRow | None],
    tickets: Tickets,
    max_unfinished: int,
    paused: Callable[[], bool],
    check: Callable[[], None],
) -> Iterator[Iterable[Result | FailedRow]]:
    exhausted = sees = False
    no_room_yet: Prepared | None = None
    while not exhausted or no_room_yet is not None or engine.has_unfinished:
        # By numbers alone, never by how far a thread happens to be: a second run takes the same steps. Only a few rows
        # at a time, so that the device does not wait while many are replaced; all of them if slots would stay empty.
        # Behind a row with images only as many as are computed next: others probably have some, too.
        added, failed, failed_bytes = 0, list[Result | FailedRow](), 0
        unfinished, waits = engine.num_unfinished - engine.num_ending, paused()
        while no_room_yet or not exhausted:
            limit = max_unfinished if added < _ROWS_A_STEP else engine.max_num_seqs
            if unfinished >= limit:
                break
            if sees and engine.has_waiting(_ROWS_A_STEP, _STEPS_AHEAD * engine.max_num_batched_tokens):
                break
            check()
            if waits and engine.has_unfinished:
                break
            if tickets.full and no_room_yet is None:
                # The next one is not even parsed: it may be as large as one that runs alone.
                break
            if len(failed) == _MAX_FAILED or failed_bytes > tickets.max_bytes // 8:
                break
            item, no_room_yet = no_room_yet or next(source, END), None
            if isinstance(item, Prepared):
                if not tickets.has_room(item):
                    no_room_yet = item
                    break
                refused, sees = tickets.add(engine, item), any(prompt.images for prompt in item.prompts)
                unfinished += item.num_completions if refused is None else 0
            elif isinstance(item, FailedRow):
                refused = item
            else:
                # Nothing to read at the moment, or ever.
                exhausted = item is not None
                break
            if refused is not None:
                failed.append(refused)
                failed_bytes += size_of(refused)
            added += 1
        # Our references go: a row's bytes are freed when its result is written.
        item = refused = None
        check()
        tickets.take(engine.step() if engine.has_unfinished else ())
        yield chain(failed, tickets.finished(_ROWS_A_STEP))
