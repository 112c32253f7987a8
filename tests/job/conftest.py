"""Fixtures that run the job over the fake model and show its results."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from rosebatch.engine.engine import Engine
from rosebatch.io.openai_batch import BatchShape, parse_request
from rosebatch.io.output import FileOutput, StreamOutput, write_jsonl
from rosebatch.io.part_file import PartFile
from rosebatch.io.results import PlainShape
from rosebatch.io.rows import parse_row
from rosebatch.job.run import run_job
from rosebatch.report.progress import Progress
from rosebatch.report.tally import Tally
from rosebatch.text.tokenizer import Tokenizer
from tests.job.fake_model import TEMPLATE, FakeModel, byte_backend, make_engine


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


class Job:
    """Runs ``run_job`` on a fresh engine and checks the engine's integrity afterwards."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def engine(self, model: FakeModel, **limits: int) -> Engine:
        return make_engine(model, **limits)

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
        output: Any = None,
        shape: Any = None,
        defaults: dict[str, Any] | None = None,
        progress: Any = None,
        **limits: int,
    ) -> tuple[list[dict[str, Any]], Tally, Engine]:
        engine = self.engine(model or FakeModel(), **limits)
        output = output or ListOutput()
        tally = run_job(
            engine,
            None if without_tokenizer else tokenizer or self.tokenizer,
            self.rows(lines, **(defaults or {})) if rows is None else rows,
            output,
            progress=progress or Progress(None, enabled=False),
            shape=shape or PlainShape(),
            seed=seed,
            return_token_ids=return_token_ids,
        )
        engine.scheduler.check_integrity()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
        if isinstance(output, ListOutput):
            assert output.finished
            return output.rows, tally, engine
        return [], tally, engine

    def answer(self, *bodies: dict[str, Any], **run: Any) -> list[dict[str, Any]]:
        """The lines that answer requests of a batch. Greedy, unless a request says otherwise."""
        rows = [
            parse_request(
                {"custom_id": f"{index}", "body": body},
                index=index,
                where=f"line {index + 1}",
                defaults={"temperature": 0.0, "max_tokens": 4},
            )
            for index, body in enumerate(bodies)
        ]
        answers, _, _ = self.run(rows=rows, shape=BatchShape("toy", 5), **run)
        return answers


@pytest.fixture(scope="session")
def make_backend() -> Callable[..., tokenizers.Tokenizer]:
    return byte_backend


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend(), TEMPLATE, {"eos_token": "<eos>"})


@pytest.fixture
def job(tokenizer: Tokenizer) -> Job:
    return Job(tokenizer)


@pytest.fixture
def fake_model() -> type[FakeModel]:
    return FakeModel


@pytest.fixture
def list_output() -> type[ListOutput]:
    return ListOutput


@pytest.fixture
def open_results() -> Callable[[Path], FileOutput]:
    """Opens a JSONL file of results; resumes if there is a part file."""

    def open_output(path: Path) -> FileOutput:
        part = path.with_name(path.name + ".part")
        return FileOutput(PartFile.reopen(part) or PartFile.create(part, {"created": 0}), path, write_jsonl)

    return open_output
