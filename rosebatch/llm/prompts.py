"""From rows to the outputs of an ``LLM``."""

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.core.errors import unexpected
from rosebatch.io.output import Output
from rosebatch.io.parse import Row
from rosebatch.io.rows import FailedRow
from rosebatch.job.answers import answer
from rosebatch.job.serve import Served, serve
from rosebatch.llm.backend import Outputs
from rosebatch.llm.outputs import RequestOutput, failed_output, request_output
from rosebatch.report.tally import Tally
from rosebatch.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rosebatch.launch.launch import Launched


def complete(
    launched: "Launched",
    rows: Iterable[Row | None],
    seed: int | None,
    *,
    in_order: bool = False,
    tally: Tally | None = None,
    check: Callable[[], None] = lambda: None,
) -> Outputs:
    """Complete rows, as ``rosebatch.job.serve.serve`` does, and count them."""
    tally = Tally() if tally is None else tally
    batches = serve(
        launched.engine,
        launched.tokenizer,
        launched.grammars,
        rows,
        seed=seed,
        in_order=in_order,
        max_inflight_bytes=in_bytes(launched.plan.config.max_inflight_bytes),
        check=check,
        # Scripts for other engines' libraries look for all of it in the text. The messages have it apart.
        tell_apart=False,
    )
    try:
        for batch in batches:
            for served in batch:
                found = _output(served, launched.tokenizer, tally)
                if isinstance(found, FailedRow):
                    tally.add_error(found.error)
                    found = failed_output(found)
                yield found
    finally:
        batches.close()


def _output(served: Served, tokenizer: Tokenizer | None, tally: Tally) -> RequestOutput | FailedRow:
    """The output of a row, counted; a failed row if it cannot be told."""
    if isinstance(served, FailedRow):
        return served
    try:
        found = answer(served, tokenizer, return_token_ids=False)
        output = request_output(served, found, tokenizer)
    except Exception as error:
        return served.prepared.failed(unexpected("telling the answer", error))
    tally.add_row(served.completions, found.finish_reasons)
    return output


@dataclass(frozen=True, slots=True)
class PromptRows:
    """``complete`` in a worker process; see ``rosebatch.job.workers.serving.Serve``."""

    seed: int | None
    in_order: bool = False

    def __call__(
        self,
        rows: Iterable[Row | None],
        launched: "Launched",
        output: Output,
        tally: Tally,
        check: Callable[[], None],
    ) -> None:
        """See ``Serve``."""
        found: Any
        for found in complete(launched, rows, self.seed, in_order=self.in_order, tally=tally, check=check):
            output.add(int(found.request_id), found, failed=found.error is not None)
            output.flush()
        output.finish()


def pickled(index: int, row: Any, *, failed: bool) -> bytes:
    """An ``Encode`` of ``rosebatch.io.output`` for plain objects."""
    return pickle.dumps(row)
