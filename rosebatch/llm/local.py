"""An engine in this process."""

import gc
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.local import LocalService
from rosebatch.job.run_rows import run_rows
from rosebatch.job.service import Service
from rosebatch.job.serving import Serving
from rosebatch.launch.launch import Launched, default_sampling
from rosebatch.llm.backend import Outputs
from rosebatch.llm.results import Collected

T = TypeVar("T")

# Between two looks at whether there is other work.
_PATIENCE_SECONDS = 0.002
_MAX_WAITING = 64


class LocalBackend:
    """See ``rosebatch.llm.backend.Backend``."""

    def __init__(self, launched: Launched) -> None:
        self._launched: Launched | None = launched
        self.tokenizer_folder: Path | None = None if launched.tokenizer is None else launched.plan.tokenizer_folder
        self.sampling: Mapping[str, Any] = default_sampling(launched.plan)

    @property
    def launched(self) -> Launched:
        """The engine."""
        assert self._launched is not None, "it is not closed"
        return self._launched

    def complete(self, rows: Iterable[Row | FailedRow | None], serving: Serving) -> Outputs:
        """See ``Backend``."""
        outputs = Collected()
        return outputs.after(run_rows(rows, self.launched, serving, outputs))

    def stream(self, rows: Iterable[Row | FailedRow], serving: Serving) -> Outputs:
        """See ``Backend``."""
        return self.complete(_live(rows), serving)

    @contextmanager
    def service(self) -> Iterator[Service]:
        """See ``Backend``."""
        yield LocalService(self.launched.plan, self.launched)

    def close(self) -> None:
        """See ``Backend``."""
        self._launched = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _live(rows: Iterable[T]) -> Iterator[T | None]:
    """Read rows on a thread; None if there is none at the moment."""
    ahead: queue.Queue[Callable[[], T] | None] = queue.Queue(maxsize=_MAX_WAITING)
    stopped = threading.Event()

    def put(item: Callable[[], T] | None) -> bool:
        while not stopped.is_set():
            try:
                ahead.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        def fail(error: BaseException) -> T:
            raise error

        try:
            for row in rows:
                if not put(lambda row=row: row):  # type: ignore[misc]
                    return
            put(None)
        except BaseException as error:
            put(lambda error=error: fail(error))  # type: ignore[misc]

    threading.Thread(target=read, name="rosebatch-stream", daemon=True).start()
    try:
        while True:
            try:
                item = ahead.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                yield None
                continue
            if item is None:
                return
            yield item()
    finally:
        stopped.set()
