"""Rows wait here for their grammars, and those without one do not wait for them."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from msgspec import structs

from rosebatch.core.errors import RowError
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.host.threads import done_within, wait_for
from rosebatch.io.rows import FailedRow
from rosebatch.job.prepared import DEFAULT_BYTES, Prepared
from rosebatch.job.report.stopwatch import Stopwatch
from rosebatch.text.grammar.check import Tried
from rosebatch.text.grammar.compiled import Grammar
from rosebatch.text.grammar.grammars import Grammars

# How long others wait for a row's grammar. Nearly every grammar is ready when its row's turn comes, so that rows keep
# their order, and a second run takes the same steps. A grammar that takes longer usually fails.
_PATIENCE_SECONDS = 0.5
# Rows that others have overtaken, at a time.
_MAX_LATE = 256
# Between two looks at whether there is other work.
_PAUSE_SECONDS = 0.002
_SLICE_SECONDS = 0.1
_NOTHING = (None,)


def with_grammars(
    items: Iterator[Prepared | FailedRow | None],
    grammars: Grammars | None,
    check: Callable[[], None] = lambda: None,
    seconds: defaultdict[str, float] | None = None,
    max_bytes: int = DEFAULT_BYTES,
    *,
    in_order: bool = False,
) -> Iterator[Prepared | FailedRow | None]:
    """Compile the grammar of each row when its turn comes.

    Args:
        items: prepared rows; None says that there is none at the moment, and is handed on.
        grammars: None for a model without a tokenizer.
        check: called while waiting; what it raises ends the wait.
        seconds: time by kind of work is added there.
        max_bytes: of the rows that others have overtaken.
        in_order: a row waits for its grammar as long as it takes.

    Yields:
        rows with their grammars, or failed; None if only rows are left whose grammars are not ready.
    """
    seconds = defaultdict(float) if seconds is None else seconds
    late: list[_Waiting] = []
    for item in items:
        if late:
            yield from _ready(late)
        if grammars is None or not isinstance(item, Prepared) or item.tried is None:
            yield item
            # It must not be here while the next one is parsed.
            del item
            continue
        with Stopwatch(seconds, "compiling grammars"):
            row = _Waiting(item, grammars)
            wait_for(grammars.ready(row.spec), check)
            found = row.wait(_PATIENCE_SECONDS, check)
            while in_order and found is None:
                found = row.wait(_PATIENCE_SECONDS, check)
        if found is not None:
            yield found
            continue
        late.append(row)
        while len(late) > _MAX_LATE or sum(each.row.size for each in late) > max_bytes:
            yield from _ready(late, _PAUSE_SECONDS) or _NOTHING
    while late:
        yield from _ready(late, _PAUSE_SECONDS) or _NOTHING


def _ready(late: "list[_Waiting]", pause: float = 0) -> Sequence[Prepared | FailedRow | None]:
    """Take out the rows that need not wait any more."""
    found: list[Prepared | FailedRow] = []
    for each in list(late):
        done = each.poll(0 if found else pause)
        pause = 0
        if done is not None:
            late.remove(each)
            found.append(done)
    return found


@dataclass(slots=True, eq=False)
class _Waiting:
    """A row whose grammar is tried in another process, and then compiled in this one."""

    row: Prepared
    grammars: Grammars
    compiled: Future[Grammar | Tried] | None = None

    @property
    def spec(self) -> GrammarSpec:
        """Of its grammar."""
        spec = self.row.row.sampling.grammar
        assert spec is not None, "it was tried"
        return spec

    def wait(self, seconds: float, check: Callable[[], None]) -> Prepared | FailedRow | None:
        """The row as it goes on; None if its grammar is not ready by then."""
        end = time.monotonic() + seconds
        while (found := self.poll(min(_SLICE_SECONDS, seconds))) is None and time.monotonic() < end:
            check()
        return found

    def poll(self, seconds: float) -> Prepared | FailedRow | None:
        """The same, without a check."""
        row = self.row
        assert row.tried is not None
        if not done_within(row.tried, seconds):
            return None
        try:
            tried = row.tried.result()
            tried.require()
            self.compiled = self.compiled or self.grammars.compiled(self.spec, tried)
            if not done_within(self.compiled, seconds):
                return None
            grammar = self.compiled.result()
            if isinstance(grammar, Grammar):
                return structs.replace(row, tried=None, grammar=grammar)
            grammar.require()
        except RowError as error:
            return row.failed(error)
        raise AssertionError("a grammar compiles, or there is a reason")
