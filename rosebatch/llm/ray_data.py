"""Generation inside a Ray Data pipeline: a class for ``Dataset.map_batches``.

::

    import ray
    from rosebatch.ray import Generator

    answers = ray.data.read_parquet("prompts/").map_batches(
        Generator,
        fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B", "sampling": {"max_tokens": 256}},
        batch_format="pyarrow", batch_size=32, max_concurrency=8, num_gpus=1,
        compute=ray.data.ActorPoolStrategy(size=8, max_tasks_in_flight_per_actor=16),
    )
"""

import asyncio
import os
import platform
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError, RowError, UserError
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.io.columns import Columns
from rosebatch.io.images.policy import MediaPolicy
from rosebatch.io.output import Sink
from rosebatch.io.parse import Record, RowParser
from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.sampling_fields import fields_of, with_defaults
from rosebatch.io.table_values import BadValues, rows_of
from rosebatch.job.run_rows import run_rows
from rosebatch.job.sampling_defaults import check_sampling
from rosebatch.job.serve_options import ServeOptions
from rosebatch.launch.launch import Launched, default_sampling, launch
from rosebatch.llm.vllm_names import own_names

# A batch as Ray gives it: in the format "pyarrow" or "numpy".
Batch = Any
# The columns that are added.
_RESULTS = {
    "text": pa.string(),
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(),
    "error": pa.string(),
}
# What a row may want that these columns cannot hold.
_NOT_TOLD = ("logprobs", "prompt_logprobs")
# How long an idle engine waits for a batch before it looks for others.
_PAUSE_SECONDS = 0.05


class Generator:
    """Completes the rows of batches.

    A row has the fields of an input line as columns: ``prompt``, ``messages`` or ``prompt_token_ids``, and sampling
    fields of its own. All columns are kept. The columns ``text``, ``finish_reason``, ``prompt_tokens``,
    ``completion_tokens`` and ``error`` are added. A row that cannot be served has only its ``error``, which is null
    for all others.

    Rows of all batches that are under way run together, so give Ray several batches at a time: see
    ``max_concurrency`` and ``max_tasks_in_flight_per_actor`` above.

    Args:
        model: hub id, or a path that all nodes have.
        sampling: fields of a row, for the rows that do not say themselves.
        columns: the dataset's names of these columns, where they differ: ``{"prompt": "question", "text": "answer"}``;
            ``image`` is the one of images, see ``rosebatch.io.image_column``.
        seed: base seed. A row that samples gets the same result wherever it runs; without it, each run draws anew.
        settings: as of ``rosebatch.LLM``, without ``data_parallel_size``.

    Raises:
        RuntimeError: the model cannot be loaded, or takes no images, and a column has some; the message has the node's
            name.
        ValueError: a setting does not exist, or its value is impossible.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        sampling: Mapping[str, Any] | SamplingParams | None = None,
        columns: Mapping[str, str] | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        given = dict(fields_of(sampling) if isinstance(sampling, SamplingParams) else sampling or {})
        try:
            check_sampling(given, seed)
            others = own_names(settings)
            media = MediaPolicy.taken_from(others)
            config = RunConfig.of(model, **others)
            if config.data_parallel_size != 1:
                raise FlagError("data_parallel_size: an actor is one process; ActorPoolStrategy says how many run")
            launched = launch(config)
            own = default_sampling(launched.plan)
            if "image" in (columns or {}) and (why := launched.plan.no_images) is not None:
                raise UserError(f"columns has an image: {why}")
        except FlagError as error:
            raise ValueError(str(error)) from None
        except UserError as error:
            raise RuntimeError(f"{platform.node()}: {error}") from None
        self._columns = dict(columns or {})
        # Results go into columns of their own, which no field of a row has: the name keeps rows from being refused.
        named = Columns(image="image" if "image" in self._columns else None)
        self._parser = RowParser(False, with_defaults(given, own), result_column="", columns=named)
        self._inbox: SimpleQueue[_Rows] = SimpleQueue()
        # Without a seed, the place of a row decides its random numbers: no two actors may count alike.
        self._first = int.from_bytes(os.urandom(6), "little")
        serving = ServeOptions(_Columns(), seed, media=media)
        Thread(target=_run, args=(launched, self._inbox, serving, self._first), daemon=True).start()

    async def __call__(self, batch: Batch) -> AsyncIterator[Batch]:
        """Complete the rows of a batch; others may be under way.

        Raises:
            ValueError: a result's column is in the batch already, or the batch has another format.
        """
        if not isinstance(batch, pa.Table | dict):
            raise ValueError(f"batch_format must be pyarrow or numpy, got a batch of {type(batch).__name__}")
        names = batch.schema.names if isinstance(batch, pa.Table) else list(batch)
        taken = [name for name in map(self._name, _RESULTS) if name in names]
        if taken:
            raise ValueError(f"the dataset has a column {taken[0]} already; choose other names by columns={{...}}")
        loop = asyncio.get_running_loop()
        rows = _Rows(self._parser, self._requests(batch), loop, loop.create_future())
        if rows.left:
            self._inbox.put(rows)
            await rows.done
        yield self._with_results(batch, rows.results)

    def _name(self, own: str) -> str:
        return self._columns.get(own, own)

    def _requests(self, batch: Batch) -> list[dict[str, Any] | BadValues]:
        """The rows' fields, by our names."""
        ours = {self._name(own): own for own in self._columns if own not in _RESULTS}
        photos = self._columns.get("image", "")
        if isinstance(batch, pa.Table):
            if photos in batch.schema.names and isinstance(batch.schema.field(photos).type, pa.BaseExtensionType):
                # Ray's tensors become arrays, and Arrow's would become lists.
                column = batch.column(photos)
                of_arrow = isinstance(column.type, pa.FixedShapeTensorType)
                pictures = [each.to_numpy() if of_arrow and each.is_valid else each.as_py() for each in column]
                place = batch.schema.names.index(photos)
                rows = self._requests(batch.set_column(place, photos, pa.nulls(len(batch))))
                return [
                    row if isinstance(row, BadValues) else {**row, "image": each}
                    for row, each in zip(rows, pictures, strict=True)
                ]
            table = batch.select([name for name in batch.schema.names if name in ours or name not in self._columns])
            table = table.rename_columns([ours.get(name, name) for name in table.schema.names])
            return [row for part in table.to_batches() for row in rows_of(part)]
        columns = {
            ours.get(name, name): [_picture_or_plain(value) if name == photos else _plain(value) for value in values]
            for name, values in batch.items()
            if name in ours or name not in self._columns
        }
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _with_results(self, batch: Batch, results: Sequence[Mapping[str, Any]]) -> Batch:
        for name, kind in _RESULTS.items():
            values = pa.array([result.get(name) for result in results], kind)
            if isinstance(batch, pa.Table):
                batch = batch.append_column(self._name(name), values)
            else:
                batch = {**batch, self._name(name): values.to_numpy(zero_copy_only=False)}
        return batch


@dataclass(slots=True)
class _Rows:
    """The rows of a batch, and their results.

    Attributes:
        done: set on the loop once all results are there.
        left: rows without a result.
    """

    parser: RowParser
    contents: list[dict[str, Any] | BadValues]
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"
    results: list[Mapping[str, Any]] = field(default_factory=list)
    left: int = 0

    def __post_init__(self) -> None:
        self.left = len(self.contents)
        self.results = [{}] * self.left

    def put(self, number: int, result: Mapping[str, Any]) -> None:
        """The result of a row. The last one wakes the batch."""
        self.results[number] = result
        self.left -= 1
        if not self.left:
            self.loop.call_soon_threadsafe(_finish, self.done)


def _finish(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


def _run(launched: Launched, inbox: "SimpleQueue[_Rows]", serving: ServeOptions, first: int) -> None:
    """Serve rows for ever. An engine that has failed cannot go on, and Ray would give it batch after batch."""
    try:
        batches = _Batches(inbox, first)
        for _ in run_rows(batches.rows(), launched, serving, batches):
            pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class _Columns:
    """The columns that are added; see ``rosebatch.io.results.Shape``."""

    def result(self, result: Result) -> Mapping[str, Any]:
        """See ``Shape``."""
        first = result.choices[0]
        tokens = {"prompt_tokens": result.prompt_tokens, "completion_tokens": result.completion_tokens}
        return {"text": first.text, "finish_reason": first.finish_reason, **tokens}

    def failure(self, row: FailedRow) -> Mapping[str, Any]:
        """See ``Shape``."""
        return {"error": f"{row.error.code}: {row.error.message}"}


class _Batches(Sink):
    """The batches under way. They are the source of the loop's rows and, as ``Sink``, take the results.

    Args:
        inbox: brings them.
        first: number of the first row.
    """

    def __init__(self, inbox: "SimpleQueue[_Rows]", first: int) -> None:
        self._inbox = inbox
        self._numbers = count(first)
        self._places: dict[int, tuple[_Rows, int]] = {}

    def rows(self) -> Iterator[Row | FailedRow | None]:
        """The rows of all batches; None if there is none at the moment."""
        while True:
            try:
                batch = self._inbox.get(timeout=0 if self._places else _PAUSE_SECONDS)
            except Empty:
                yield None
                continue
            for place, content in enumerate(batch.contents):
                index = next(self._numbers)
                self._places[index] = batch, place
                yield _parse(batch.parser, Record(index, "row", content, 0))

    def add(self, index: int, row: Mapping[str, Any], *, failed: bool) -> None:
        batch, place = self._places.pop(index)
        batch.put(place, row)


def _parse(parser: RowParser, record: Record) -> Row | FailedRow:
    row = parser.parse(record)
    if isinstance(row, FailedRow):
        return row
    asked = [name for name in _NOT_TOLD if getattr(row.sampling, name) is not None]
    if row.sampling.n > 1:
        asked.append("n")
    if row.tool_use is not None and row.tool_use.choice != "none":
        asked.append("tools")
    if not asked:
        return row
    held = "one completion without log-probabilities and tool calls"
    error = RowError("unsupported_field", f"{asked[0]}: these columns hold {held}")
    return FailedRow(index=row.index, where=row.where, metadata={}, error=error)


def _picture_or_plain(value: Any) -> Any:
    """An array of pixels as it is, or a list of such; else as ``_plain``."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_picture_or_plain(each) for each in value]
    return value if isinstance(value, np.ndarray) and value.ndim > 1 else _plain(value)


def _plain(value: Any) -> Any:
    """A value of a numpy batch as Python's own; objects were structs, see ``rosebatch.io.table_values.rows_of``."""
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        return {name: plain for name, each in value.items() if (plain := _plain(each)) is not None}
    # What was null in a column of numbers.
    return None if isinstance(value, float) and value != value else value
