"""The order of a run's requests: the one in which a job hands its rows to the engine."""

from collections.abc import Iterable, Iterator, Sequence

from rosebatch.core.request import Request
from rosebatch.core.token_ids import packed
from rosebatch.engine.engine import Engine
from rosebatch.io.rows import Row
from rosebatch.job import order
from rosebatch.job.prepared import Prepared, PreparedPrompt


def in_job_order(requests: Sequence[Request], engine: Engine) -> Iterable[Request]:
    """``requests`` as ``rosebatch.job.order`` sorts them; as they are if all of them run at once."""
    return requests if len(requests) <= engine.max_num_seqs else _sorted(requests, engine)


def _sorted(requests: Sequence[Request], engine: Engine) -> Iterator[Request]:
    rows = map(_row, range(len(requests)), requests)
    swaps = engine.scheduler.planner.adapters.slots > 0
    for item in order.in_job_order(rows, engine.max_num_seqs, shares=engine.prefix_cache, by_adapter=swaps):
        assert isinstance(item, Prepared), "no request has failed"
        yield requests[item.row.index]


def _row(index: int, request: Request) -> Prepared:
    prompt, sampling = request.prompt_token_ids, request.sampling
    row = Row(index=index, where="", metadata={}, sampling=sampling, prompt_token_ids=prompt, lora=request.adapter)
    return Prepared(row, (PreparedPrompt(packed(prompt), sampling),))
