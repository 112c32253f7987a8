"""Whether a job's file has the same bytes whatever its rows meet, by the command line, and what that costs.

``python -m benchmarks.same_bytes --model MODEL [--dtype DTYPE] [--ways reversed alone …] [--flags=…]`` runs
``rosebatch generate --batch-invariant`` over rows of token ids in each way, and compares each row's line with that of
the first job. ``switch off`` is the same job without the switch: its rows may differ, and its seconds are the price.
The last line is JSON.
"""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.options import options

_KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"frequency_penalty": 0.8, "temperature": 0.7},
    {"n": 2, "temperature": 1.1},
]
_KILLS = 10
# The row's number in its file.
_INDEX = re.compile(rb'"index":\d+,')


@dataclass(frozen=True, slots=True)
class Way:
    """How a job is run.

    Attributes:
        flags: besides those of all jobs.
        step: over the rows: -1 reverses them, 8 takes every eighth.
        kills: how often its process is killed.
    """

    flags: Sequence[str] = ()
    step: int = 1
    kills: int = 0


WAYS = {
    "again": Way(),
    "reversed": Way(step=-1),
    "alone": Way(["--max-num-seqs", "1", "--no-prefix-cache"], step=8),
    "64 slots": Way(["--max-num-seqs", "64"]),
    "512 slots": Way(["--max-num-seqs", "512"]),
    "chunks of 512": Way(["--max-num-batched-tokens", "512"]),
    "chunks of 16384": Way(["--max-num-batched-tokens", "16384"]),
    "no prefix cache": Way(["--no-prefix-cache"]),
    "preempting": Way(["--kv-cache-memory", "{cramped}"]),
    "swapping": Way(["--kv-cache-memory", "{cramped}", "--swap"]),
    "killed": Way(kills=_KILLS),
    "two workers": Way(["-dp", "2"]),
    "switch off": Way(["--no-batch-invariant"]),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job wrote.

    Attributes:
        lines: each row's, by its id, without its number.
        seconds: of the job as its report has them; those of a killed job are of its last process.
        preemptions: of sequences.
        kills: that came before its end.
    """

    lines: dict[str, bytes]
    seconds: float | None
    preemptions: int | None
    kills: int


def make_rows(count: int, longest: int, vocab: int, max_tokens: int) -> list[dict[str, Any]]:
    """Rows of token ids of mixed lengths, over the ends of tiles and blocks; two in three begin like others."""
    numbers = random.Random(0)
    shared = [numbers.randrange(vocab) for _ in range(longest)]
    ends = [1, 2, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257]
    rows = []
    for index in range(count):
        length = min(numbers.choice([*ends, numbers.randint(1, longest), numbers.randint(1, longest)]), longest)
        begin = shared[: min(numbers.choice([0, 64, length]), length - 1)]
        own = [numbers.randrange(vocab) for _ in range(length - len(begin))]
        limits = {"max_tokens": max_tokens - index % (max_tokens // 2), "logprobs": 3, "ignore_eos": True}
        rows.append({"id": f"row {index}", "prompt_token_ids": begin + own, **limits, **_KINDS[index % len(_KINDS)]})
    return rows


def run(way: Way, rows: Sequence[dict[str, Any]], folder: Path, flags: Sequence[str], size: int = 0) -> Outcome:
    """Run a job from the start of its process, killed and resumed as often as its way has it.

    Args:
        way: the way.
        rows: of the job.
        folder: for its files, which replace those of the last job.
        flags: of all jobs.
        size: bytes of its answers, over which kills are spread.

    Raises:
        CalledProcessError: the command failed.
    """
    for each in folder.iterdir():
        each.unlink()
    source, target, report = (folder / name for name in ("rows.jsonl", "answers.jsonl", "report.json"))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows[:: way.step]), encoding="utf-8")
    command = [sys.executable, "-m", "rosebatch", "generate", str(source), "-o", str(target), "--report", str(report)]
    command += ["--seed", "0", "--return-token-ids", "--quiet", "--resume", *flags, *way.flags]
    numbers = random.Random(1)
    parts = way.kills + 1
    kills = sum([_is_killed(command, folder, size * (part + numbers.random()) / parts) for part in range(way.kills)])
    subprocess.run(command, check=True)
    # None is written if the job ended before its last kill could come.
    told = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    lines = {json.loads(line)["id"]: _INDEX.sub(b"", line, 1) for line in target.read_bytes().splitlines()}
    return Outcome(lines, told.get("elapsed_s"), told.get("preemptions"), kills)


def _is_killed(command: Sequence[str], folder: Path, wanted: float) -> bool:
    """Start a job, and kill its processes once so many bytes are written; False if it ends before."""
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None:
        if _written(folder) >= wanted:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.01)
    return False


def _written(folder: Path) -> int:
    """Bytes of answers so far, in whichever file they are."""
    return sum(each.stat().st_size for each in folder.glob("answers.jsonl*") if each.is_file())


def main() -> None:
    """Run the first job, and each way."""
    given = options(
        __doc__,
        model=str,
        dtype=("bfloat16", "float16", "float32"),
        device=("cuda", "cpu"),
        rows=400,
        longest=1000,
        max_tokens=64,
        vocab=1000,
        cramped="256MiB",
        ways=[*WAYS],
        flags="",
    )
    rows = make_rows(given.rows, given.longest, given.vocab, given.max_tokens)
    flags = ["--model", given.model, "--dtype", given.dtype, "--device", given.device, *shlex.split(given.flags)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rosebatch-") as made:
        folder = Path(made)
        expected = run(Way(), rows, folder, [*flags, "--batch-invariant"])
        size = sum(map(len, expected.lines.values()))
        for name in given.ways:
            way = WAYS[name]
            own = replace(way, flags=[each.format(cramped=given.cramped) for each in way.flags])
            switch = [] if name == "switch off" else ["--batch-invariant"]
            try:
                found[name] = compared(expected, run(own, rows, folder, [*flags, *switch], size))
            except subprocess.CalledProcessError as error:
                found[name] = {"failed": error.returncode}
            sys.stdout.write(f"{name}: {found[name]}\n")
            sys.stdout.flush()
    about = {"model": given.model, "dtype": given.dtype, "rows": given.rows, "seconds": expected.seconds}
    sys.stdout.write(json.dumps(about | {"ways": found}) + "\n")


def compared(expected: Outcome, outcome: Outcome) -> dict[str, Any]:
    """How many rows a way has, how many of them differ from those expected, which first, and what else it did."""
    wrong = [row for row, line in outcome.lines.items() if line != expected.lines[row]]
    did = {name: getattr(outcome, name) for name in ("seconds", "preemptions", "kills")}
    return {"rows": len(outcome.lines), "differ": len(wrong), "first": wrong[:3], **did}


if __name__ == "__main__":
    main()
