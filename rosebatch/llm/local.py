"""An engine in this process."""

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.io.output import Sink
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.local import LocalService
from rosebatch.job.run_rows import run_rows
from rosebatch.job.serve_options import ServeOptions
from rosebatch.job.service import Service
from rosebatch.launch.launch import Launched, default_sampling


class LocalBackend:
    """See ``rosebatch.llm.backend.Backend``."""

    joins = True

    def __init__(self, launched: Launched) -> None:
        self._launched: Launched | None = launched
        self.tokenizer_folder: Path | None = None if launched.tokenizer is None else launched.plan.tokenizer_folder
        self.sampling: Mapping[str, Any] = default_sampling(launched.plan)
        self.classifies = launched.engine.pooling.classifier is not None

    @property
    def launched(self) -> Launched:
        """The engine."""
        assert self._launched is not None, "it is not closed"
        return self._launched

    def outlook(self) -> Outlook:
        """See ``Backend``."""
        return self.launched.engine.outlook()

    def run(
        self,
        rows: Iterable[Row | FailedRow | None],
        serving: ServeOptions,
        sink: Sink,
        expects_rows: Callable[[], bool],
    ) -> Generator[None, None, None]:
        """See ``Backend``."""
        return run_rows(rows, self.launched, serving, sink, expects_rows=expects_rows)

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
