"""Traces of requests: when each came, how long its prompt and its answer were, and which prompts begin alike.

A trace is JSONL or CSV with the fields ``timestamp``, ``input_length`` and ``output_length``. ``hash_ids`` may name the
blocks of a prompt: equal ids are equal tokens, so prompts that begin with the same ids share a prefix. Two public
collections have this form, and their files are read as they are:

- Mooncake (github.com/kvcache-ai/Mooncake, arXiv 2407.00079): blocks of 512 tokens, time in milliseconds;
- Qwen-Bailian (github.com/alibaba-edu/qwen-bailian-usagetraces-anon): blocks of 16 tokens, time in seconds.

Without ``hash_ids``, or with blocks of another size, time is in seconds.
"""

import csv
import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rosebatch.bench.workload import Workload, token_range
from rosebatch.core.errors import FlagError, UserError

_BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
# Blocks of the collection that counts milliseconds.
_MOONCAKE_BLOCK = 512


class Line(msgspec.Struct, kw_only=True):
    """A request of a trace. Other fields are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests and when they come.

    Attributes:
        name: for people.
        times: seconds since the first, in order.
        workload: the requests of a run, in the same order. Tokens differ between runs, lengths do not.
        shares_prefixes: whether some prompts begin alike.
    """

    name: str
    times: Sequence[float]
    workload: Callable[[int], Workload]
    shares_prefixes: bool = False


def load_trace(path: Path, vocab_size: int, *, limit: int | None = None, seed: int = 0) -> Arrivals:
    """The arrivals of a trace.

    Args:
        path: of a ``.csv`` file, or of JSONL.
        vocab_size: of the model.
        limit: requests to take, from the beginning; None takes all.
        seed: of the token ids, which are random.

    Raises:
        FlagError: there is no such file.
        UserError: a line is broken, or the trace is empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise FlagError(f"--trace {path}: no such file") from None
    except (OSError, UnicodeError) as error:
        raise UserError(f"{path}: unreadable trace ({error})") from None
    lines = sorted(_lines(path, text), key=lambda line: line.timestamp)[:limit]
    if not lines:
        raise UserError(f"{path}: the trace has no requests")
    size = _block_size(path, lines)
    unit = 1e-3 if size == _MOONCAKE_BLOCK else 1.0
    times = [(line.timestamp - lines[0].timestamp) * unit for line in lines]

    def workload(run: int) -> Workload:
        prompts = [_prompt(line, size, token_range(vocab_size), f"{seed} {run}", number) for number, line in numbered]
        return Workload(prompts, [line.output_length for line in lines])

    numbered = list(enumerate(lines))
    return Arrivals(path.stem, times, workload, shares_prefixes=size is not None)


def equal_steps(name: str, seconds: float, workload: Callable[[int], Workload]) -> Arrivals:
    """A request each ``seconds``.

    Args:
        name: for people.
        seconds: between two requests.
        workload: the requests of a run.
    """
    count = len(workload(0).prompts)
    return Arrivals(name, [seconds * number for number in range(count)], workload)


def _lines(path: Path, text: str) -> list[Line]:
    if path.suffix.lower() == ".csv":
        rows: Sequence[Mapping[str, Any]] = list(csv.DictReader(io.StringIO(text)))
        return [_line(path, number, row, strict=False) for number, row in enumerate(rows, start=2)]
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                values = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise UserError(f"{path}: line {number} is no JSON: {error}") from None
            found.append(_line(path, number, values, strict=True))
    return found


def _line(path: Path, number: int, values: Any, *, strict: bool) -> Line:
    try:
        line = msgspec.convert(values, Line, strict=strict)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: line {number}: {error}; a trace has timestamp, input_length, output_length") from None
    if line.input_length < 1 or line.output_length < 1 or not abs(line.timestamp) < float("inf"):
        raise UserError(f"{path}: line {number}: lengths must be at least 1 and the time finite")
    return line


def _block_size(path: Path, lines: Sequence[Line]) -> int | None:
    """Tokens of a block; None without ``hash_ids``. The trace does not say it, but lengths and ids do."""
    if not any(line.hash_ids for line in lines):
        return None
    for size in _BLOCK_SIZES:
        if all(len(line.hash_ids) in (line.input_length // size, -(-line.input_length // size)) for line in lines):
            return size
    sizes = ", ".join(map(str, _BLOCK_SIZES))
    raise UserError(f"{path}: hash_ids and input_length fit no blocks of {sizes} tokens")


def _prompt(line: Line, size: int | None, ids: Sequence[int], seed: str, number: int) -> list[int]:
    """Random tokens, the same for the same block."""
    tokens: list[int] = []
    for block in line.hash_ids if size is not None else ():
        tokens += random.Random(f"{seed} block {block}").choices(ids, k=size or 0)
    rest = line.input_length - len(tokens)
    if rest > 0:
        tokens += random.Random(f"{seed} prompt {number}").choices(ids, k=rest)
    return tokens[: line.input_length]
