"""An engine in this process."""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rosebatch.host.threads import on_thread
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.local import LocalService
from rosebatch.job.run_rows import run_rows
from rosebatch.job.service import Service
from rosebatch.job.serving import Serving
from rosebatch.launch.launch import Launched, default_sampling
from rosebatch.llm.backend import Outputs
from rosebatch.llm.results import Collected

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
        return self.complete(on_thread(rows, _MAX_WAITING, _PATIENCE_SECONDS, "rosebatch-stream"), serving)

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
