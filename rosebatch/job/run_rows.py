"""The loop around ``serve``: rows in, results into a sink, counts into a tally. Every caller uses this one."""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.core.errors import RowError, unexpected
from rosebatch.io.output import Sink
from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.report.progress import Progress
from rosebatch.job.report.stopwatch import Stopwatch
from rosebatch.job.report.tally import Tally
from rosebatch.job.serve import serve
from rosebatch.job.serve_options import ServeOptions
from rosebatch.model.vision.vision import TEXT_ALONE

if TYPE_CHECKING:
    from rosebatch.launch.launch import Launched


def run_rows(
    rows: Iterable[Row | FailedRow | None],
    launched: "Launched",
    serving: ServeOptions,
    sink: Sink,
    tally: Tally | None = None,
    progress: Progress | None = None,
    check: Callable[[], None] = lambda: None,
    expects_rows: Callable[[], bool] = lambda: True,
) -> Generator[None, None, None]:
    """Serve rows. A sink has each result as soon as it is ready.

    However it ends, the engine is ready for other work then. Closing the iterator drops what is unfinished.

    Args:
        rows: those that have no result yet; None says that there is none at the moment.
        launched: the model.
        serving: how rows are served.
        sink: takes the results; the caller finishes it.
        tally: counts them; None if nobody asks.
        progress: counts those that are tallied, too.
        check: called before every step; what it raises ends the loop there.
        expects_rows: see ``rosebatch.job.order.in_good_order``.

    Yields:
        after every step, with its results flushed: a kill then loses none of them.
    """
    seconds = defaultdict[str, float](float) if tally is None else tally.host_seconds
    progress = progress or Progress(None, enabled=False)
    tokenizer, grammars = (launched.tokenizer, launched.grammars) if serving.decode else (None, None)
    shape, counted = serving.shape, "prompt_tokens" if progress.counts == "prompt" else "output_tokens"

    def write(result: Result | FailedRow) -> None:
        if not isinstance(result, FailedRow):
            try:
                written = shape.result(result)
            except RowError as error:
                result = result.row.failed(error)
            except Exception as error:
                result = result.row.failed(unexpected("telling the answer", error))
            else:
                sink.add(result.row.index, written, failed=False)
                if tally is not None:
                    before = getattr(tally, counted)
                    tally.add_row(result.completions, result.finish_reasons)
                    tally.add_fields(result.row.ignored, result.row.unclear)
                    progress.advance(tokens=getattr(tally, counted) - before)
                return
        sink.add(result.index, shape.failure(result), failed=True)
        if tally is not None:
            tally.add_error(result.error)
            progress.advance(failed=True)

    config = launched.plan.config
    batches = serve(
        launched.engine,
        tokenizer,
        grammars,
        rows,
        seed=serving.seed,
        in_order=serving.in_order,
        seconds=seconds,
        paused=lambda: sink.full,
        check=check,
        expects_rows=expects_rows,
        max_inflight_bytes=in_bytes(config.max_inflight_bytes),
        return_token_ids=serving.return_token_ids,
        whole_texts=serving.whole_texts,
        sight=launched.plan.sight if serving.decode else TEXT_ALONE,
        media=serving.media,
        limit_images=config.limit_images,
        max_pixels=config.max_pixels,
        adapters=launched.plan.row_adapters,
    )
    progress.watch(launched.engine.outlook)
    with closing(batches):
        for batch in batches:
            with Stopwatch(seconds, "writing"):
                for result in batch:
                    write(result)
                    # Before the next one is made.
                    del result
                sink.flush()
            progress.tick()
            yield
