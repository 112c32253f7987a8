"""What the parent of several worker processes takes for a row, and how many rows a second it can serve.

``python -m benchmarks.parent_load [--workers 8] [--rows 400000]`` runs a whole job, from a JSONL file to a
JSONL file, with the parent of ``--data-parallel-size``. The workers are fakes without a model: they answer rows with
lines made before, in messages as large as those of a fast model. So nearly all CPU time is the parent's.

The last line is JSON: CPU microseconds of the parent for each row by part, and bytes.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from benchmarks.options import options
from rosebatch.config.run import RunConfig
from rosebatch.core.request import Completion, Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.host import child_process
from rosebatch.job.config import JobConfig
from rosebatch.job.model_info import ModelInfo
from rosebatch.job.report.tally import Tally
from rosebatch.job.run import run_job
from rosebatch.job.workers import messages as m
from rosebatch.job.workers import service
from rosebatch.job.workers.pool import Pool
from rosebatch.job.workers.row_task import RowTask

# A fake in place of a worker; the process that reads the input is the real one.
_START = (
    "import sys, json, importlib; sys.path[:] = json.loads(sys.argv[2]); name = sys.argv[3];"
    "fake = name == 'rosebatch.job.workers.child';"
    "module = importlib.import_module('benchmarks.parent_load' if fake else name);"
    "module.fake_worker() if fake else module.main()"
)
# What a worker is told by the environment.
_RESULT_BYTES, _BATCH = "ROSEBATCH_FAKE_RESULT_BYTES", "ROSEBATCH_FAKE_BATCH"
_SLOTS = 256
_OUTPUT_TOKENS = 8


def write_input(path: Path, rows: int, line_bytes: int) -> None:
    """Rows with ids and prompts, each line about so long."""
    filler = "lorem ipsum dolor sit amet " * (line_bytes // 27 + 1)
    with path.open("w") as file:
        for number in range(rows):
            line = json.dumps({"id": f"row-{number:09}", "prompt": ""})
            file.write(line[:-2] + filler[: max(1, line_bytes - len(line))] + '"}\n')


def fake_worker() -> None:
    """A worker that answers at once. It has the protocol of ``rosebatch.job.workers.child``."""
    connection = Connection(int(sys.argv[1]))
    size, batch = int(os.environ[_RESULT_BYTES]), int(os.environ[_BATCH])
    connection.recv()
    connection.send(m.Planned(ModelInfo("fake", {}, {}, True), "as found"))
    while not isinstance(connection.recv(), m.Load):
        connection.send(m.Identified("0" * 64))
    connection.send(m.Ready(_SLOTS, {"model": "fake", "kv_cache_blocks": 0, "kv_cache_bytes": 0}, 0.0))
    encode = connection.recv().encode
    line = json.dumps({"text": "", "finish_reason": "length", "usage": {"prompt_tokens": 9, "completion_tokens": 8}})
    text = (line[: line.index('""') + 1] + "x" * (size - len(line)) + line[line.index('""') + 1 :]).encode()
    # Its line is made as that of any row, from values that are JSON already.
    text = msgspec.Raw(text)
    while not isinstance(message := connection.recv(), m.End):
        all_records = list(message.records)
        for at in range(0, len(all_records), batch):
            records = all_records[at : at + batch]
            # Different objects: pickle would send one object once.
            lines = [encode(record.number, text, failed=False) for record in records]
            numbers = [record.number for record in records]
            connection.send(m.Results(numbers, lines, frozenset(), _tally(len(records))))
    connection.send(m.Done(EngineStats(), {}, None))
    # Until the parent ends it.
    with suppress(EOFError):
        connection.recv()


@cache
def _tally(rows: int) -> Tally:
    """The counts of so many rows."""
    request = Request(0, (1,) * 9, SamplingParams(max_tokens=_OUTPUT_TOKENS))
    tally = Tally()
    for row in range(rows):
        tally.add(
            Completion(
                request=request,
                sample=0,
                token_ids=(1,) * _OUTPUT_TOKENS,
                finish_reason="length",
                cached_tokens=0,
                arrival_time=0.0,
                finish_time=1.0 + row / rows,
                token_times=(0.5,) * _OUTPUT_TOKENS,
            )
        )
    return tally


class Meter:
    """CPU seconds of this process by part. What a part calls and is a part too counts there alone."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._inner = threading.local()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the CPU time of this thread inside."""
        outer, self._inner.seconds = getattr(self._inner, "seconds", 0.0), 0.0
        began = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - began
            with self._lock:
                self.seconds[name] += spent - self._inner.seconds
            self._inner.seconds = outer + spent

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return counted


def measure(source: Path, target: Path, workers: int, environment: dict[str, str]) -> dict[str, Any]:
    """Run the job; gives what it took."""
    meter = Meter()

    class Counted(Connection):  # type: ignore[misc, valid-type, unused-ignore]
        def _send_bytes(self, buf: Any) -> None:
            meter.bytes["sent"] += len(buf)
            super()._send_bytes(buf)  # type: ignore[misc]

        def _recv_bytes(self, maxsize: int | None = None) -> Any:
            found = super()._recv_bytes(maxsize)  # type: ignore[misc]
            meter.bytes["received"] += found.getbuffer().nbytes
            return found

        send = meter.of("send", Connection.send)
        recv = meter.of("receive", Connection.recv)

    began = time.process_time()
    at: dict[str, float] = {}

    def run(self: service.Workers, work: Any) -> None:
        output = work.output
        output.finish = meter.of("finish", output.finish)
        output.flush = meter.of("flush", output.flush)
        at["begin"], at["begin clock"] = time.process_time(), time.perf_counter()
        real_run(self, work)
        at["end"], at["end clock"] = time.process_time(), time.perf_counter()

    real_run = service.Workers.run
    parts = {"_read_rows": "read", "_hand_out": "hand out", "take_results": "write"}
    methods: dict[str, Any] = {name: meter.of(part, getattr(RowTask, name)) for name, part in parts.items()}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(child_process, "_START", _START),
        mock.patch.object(child_process, "Connection", Counted),
        mock.patch.object(service.Workers, "run", run),
        mock.patch.multiple(RowTask, **methods),
        mock.patch.object(Pool, "_take_messages", meter.of("wait", Pool._take_messages)),
    ):
        job = JobConfig(input=str(source), output=str(target), quiet=True)
        report = run_job(job, RunConfig(device="cpu", data_parallel_size=workers)).report
    rows = report["completed"]
    assert rows == report["requests"], "all rows are served"
    seconds: dict[str, float] = dict(meter.seconds)
    seconds["other"] = at["end"] - at["begin"] - sum(seconds.values())
    seconds["before"] = at["begin"] - began
    during = at["end"] - at["begin"] - seconds["finish"]
    return {
        "workers": workers,
        "rows": rows,
        "us_per_row": {name: round(each / rows * 1e6, 2) for name, each in seconds.items()},
        "us_per_row_while_workers_run": round(during / rows * 1e6, 2),
        "rows_per_s_of_one_core": round(rows / during),
        "rows_per_s": round(rows / (at["end clock"] - at["begin clock"])),
        "bytes_per_row": {name: round(each / rows) for name, each in meter.bytes.items()},
    }


def main() -> None:
    """Make the input, run, and print what a row took."""
    batch = {"type": int, "default": 64, "help": "rows of a message"}
    given = options(__doc__, workers=4, rows=300_000, line_bytes=400, result_bytes=600, batch=batch)
    environment = {_RESULT_BYTES: str(given.result_bytes), _BATCH: str(given.batch)}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        write_input(source, given.rows, given.line_bytes)
        found = measure(source, Path(folder) / "out.jsonl", given.workers, environment)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
