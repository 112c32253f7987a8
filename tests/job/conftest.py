"""Fixtures that run the job over the fake model and show its results."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from rosebatch.engine.engine import Engine
from rosebatch.io.openai.lines import BatchShape
from rosebatch.io.output import StreamOutput
from rosebatch.io.results import PlainShape
from rosebatch.io.rows import parse_row
from rosebatch.job.report.progress import Progress
from rosebatch.job.report.tally import Tally
from rosebatch.job.run import JobResult
from rosebatch.job.run_rows import run_rows
from rosebatch.job.serve_options import ServeOptions
from rosebatch.job.service import Work
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import TEMPLATE, FakeModel, launch_fake, make_engine
from tests.job.lines import requests


class ListOutput(StreamOutput):
    """Keeps the rows as a reader of the output would see them."""

    def __init__(self) -> None:
        super().__init__(self)  # type: ignore[arg-type]
        self.rows: list[dict[str, Any]] = []
        self.finished = False

    def write(self, line: bytes) -> None:
        assert not self.finished
        self.rows.append(msgspec.json.decode(line))

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        assert not self.finished
        super().finish()
        self.finished = True

    def close(self) -> None:
        raise AssertionError("the job itself never gives up an output")


def require_clean(engine: Engine) -> None:
    """Nothing is left of earlier requests: the engine is ready for others."""
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    assert (engine.has_unfinished, engine.num_unfinished) == (False, 0)
    assert not engine._launched
    assert not engine._constraints


class Job:
    """Runs the job's loop on a fresh engine, which must be clean afterwards, also after an error."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # Of ``RunConfig``.
        self.settings: dict[str, Any] = {}

    def rows(self, lines: Iterable[Any], **defaults: Any) -> Iterable[Any]:
        for index, values in enumerate(lines):
            yield parse_row(values, index=index, where=f"line {index + 1}", defaults=defaults)

    def run(
        self,
        lines: Iterable[Any] = (),
        *,
        rows: Iterable[Any] | None = None,
        model: FakeModel | None = None,
        seed: int | None = None,
        tokenizer: Tokenizer | None = None,
        without_tokenizer: bool = False,
        return_token_ids: bool = False,
        output: ListOutput | None = None,
        shape: Any = None,
        defaults: dict[str, Any] | None = None,
        **limits: int,
    ) -> tuple[list[dict[str, Any]], Tally, Engine]:
        engine = make_engine(model or FakeModel(), **limits)
        output, tally = output or ListOutput(), Tally()
        serving = ServeOptions(shape or PlainShape(), seed, return_token_ids=return_token_ids)
        work = Work(Mock(), output, serving, tally, Progress(None, enabled=False), lambda: None)
        try:
            rows = self.rows(lines, **(defaults or {})) if rows is None else rows
            launched = launch_fake(engine, None if without_tokenizer else tokenizer or self.tokenizer, **self.settings)
            work.run(run_rows(rows, launched, work.serving, output, tally, work.progress))
        finally:
            require_clean(engine)
        assert output.finished
        return output.rows, tally, engine

    def results(self, lines: Iterable[Any] = (), **run: Any) -> list[dict[str, Any]]:
        """The rows of the output alone."""
        return self.run(lines, **run)[0]

    def run_file(
        self, source: Path, target: Path, *, model: FakeModel | None = None, limits: Any = None, **options: Any
    ) -> tuple[JobResult, Engine]:
        """The whole job, from file to file."""
        engine = make_engine(model or FakeModel(), **(limits or {}))
        try:
            launched = launch_fake(engine, self.tokenizer, **self.settings)
            return run_file(source, target, model=LLM.of(launched), **options), engine
        finally:
            require_clean(engine)

    def answer(self, *bodies: dict[str, Any], **run: Any) -> list[dict[str, Any]]:
        """The lines that answer requests of a batch. Greedy, unless a request says otherwise."""
        lines = ({"custom_id": f"{index}", "body": body} for index, body in enumerate(bodies))
        rows = requests(lines, temperature=0.0, max_tokens=4)
        return self.results(rows=rows, shape=BatchShape("toy", 5), **run)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(), TEMPLATE, {"eos_token": "<eos>"})


@pytest.fixture
def job(tokenizer: Tokenizer) -> Job:
    return Job(tokenizer)


@pytest.fixture(scope="module")
def module_job(tokenizer: Tokenizer) -> Job:
    """For answers that several tests look at."""
    return Job(tokenizer)
