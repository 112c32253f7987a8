"""Random kills of whole jobs: the parent, a worker, a rank or all, at moments spread evenly over the processor time.

    python -m tests.cli.random_kills --kinds generate ray --kills 20 --seed 1

Each job is continued until it ends, and killed again meanwhile. Its output has to be that of an unbroken run, with no
file and no process left. Jobs are forks: signals during imports are those of test_signals_at_any_moment.py.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, LlamaForTokenClassification

from benchmarks.options import options
from tests.cli.test_workers import lines
from tests.helpers.checkout import environment
from tests.helpers.forked_jobs import ForkedJob
from tests.helpers.json_lines import write_lines
from tests.helpers.process_tree import command, of_job, running_seconds, tree
from tests.helpers.small_llama import save_llama, save_tokenizer
from tests.helpers.waiting import PATIENCE_SECONDS, until

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# Some rows of the input have failed.
ENDED = 3


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    Attributes:
        flags: of the command.
        part: of the command line of processes below the parent that are killed too.
        survives: whether the job goes on without one of them.
        rows: of the input.
        result: the output's name; none is a folder of Parquet.
    """

    flags: tuple[str, ...]
    part: str | None = None
    survives: bool = True
    rows: int = 90
    result: str = "out.jsonl"


WORKER, RANK, ACTOR = "rosebatch.job.workers.child", "rosebatch.launch.tp_worker", "ray::WorkerActor"
KINDS = {
    "generate": Kind(("generate",)),
    "parquet": Kind(("generate", "--rows-per-file", "20"), result=""),
    "embed": Kind(("embed",)),
    "encode": Kind(("embed",)),
    "score": Kind(("score",)),
    "classify": Kind(("classify",)),
    "merge": Kind(("merge",), rows=400),
    "dp": Kind(("generate", "-dp", "2"), WORKER),
    "tp": Kind(("generate", "-tp", "2"), RANK, survives=False, rows=30),
    "dp_tp": Kind(("generate", "-dp", "2", "-tp", "2"), RANK, rows=30),
    "ray": Kind(("generate", "--ray", "local", "-dp", "2"), ACTOR),
}
KINDS |= {f"{name}_parquet": replace(KINDS[name], result="out.parquet") for name in ("dp", "tp", "ray")}


class Jobs:
    """Runs of one kind.

    Args:
        kind: name of it.
        folder: for all of their files; its path is short, because Ray's sockets are in it.
        rng: chooses the victims, the signals and the moments.
    """

    def __init__(self, kind: str, folder: Path, rng: random.Random) -> None:
        self.kind, self._name, self._rng = KINDS[kind], kind, rng
        self._folder, self._work, self._output = folder, folder / "work", folder / "out"
        self._temporary = self._work / "tmp"
        self._result = f"{self._output}/{self.kind.result}"
        (folder / "model").mkdir(parents=True)
        self._temporary.mkdir(parents=True)
        if kind == "encode":
            save_bert(folder / "model")
        else:
            save_llama(folder / "model", *[LlamaForTokenClassification] * (kind == "classify"))
        save_tokenizer(folder / "model")
        rows = lines(self.kind.rows)
        if kind in ("embed", "encode", "classify"):
            rows = [{"id": row["id"], "prompt": row["prompt"] * 5} for row in rows]
        if kind == "score":
            rows = [{"id": row["id"], "prompt": row["prompt"] * 5, "continuations": ["ab", "c", "d"]} for row in rows]
        self._source = write_lines(folder / "in.jsonl", rows)
        if kind == "merge":
            for shard in ("1/2", "2/2"):
                self._output.mkdir(exist_ok=True)
                assert self._start("generate", "--shard", shard).wait(PATIENCE_SECONDS) in (0, ENDED)
            self._output.rename(folder / "shards")
        self._clear()
        job, self._seconds = self._begin(), 0.0
        while job.poll() is None:
            self._seconds = max(self._seconds, running_seconds(job.pid))
            time.sleep(0.01)
        self._require(job.returncode == ENDED)
        self._expected = self._contents()
        self._require_clean()

    def kill(self) -> str:
        """Continue the job, and kill it or a part of it; returns what was done. The job may have ended before."""
        job, moment = self._begin(), self._rng.uniform(0, self._seconds)
        while job.poll() is None and running_seconds(job.pid) < moment:
            time.sleep(0.01)
        number, victim = self._rng.choice(SIGNALS), self._rng.choice(["parent", "part", "all"])
        parts = [pid for pid in tree(job.pid) if self.kind.part and self.kind.part in command(pid)]
        if victim == "part" and not parts:
            victim = "parent"
        self._what = f"{victim} {number.name} at {moment:.2f} of {self._seconds:.2f} s"
        if job.poll() is not None:
            victim = "none"
        elif victim == "part":
            send_signal(self._rng.choice(parts), number)
        elif victim == "all":
            for pid in tree(job.pid):
                send_signal(pid, number)
        else:
            job.send_signal(number)
        code = self._wait(job)
        expected = {ENDED}
        if victim in ("parent", "all"):
            expected |= {-number, 128 + number}
        if (victim == "part" and not self.kind.survives) or (victim == "all" and self.kind.part):
            # Which of them ends first is open.
            expected.add(1)
        self._require(code in expected, f"exit code {code}")
        message = (self._work / "stderr").read_text()
        self._require("Traceback" not in message and message.count("rosebatch: error") <= 1)
        self._require_clean()
        if code == ENDED:
            self._finish()
        return f"{victim} {number.name}"

    def end(self) -> None:
        """Continue the job to its end."""
        self._what = "the last run"
        self._require(self._wait(self._begin()) == ENDED)
        self._require_clean()
        self._finish()

    def _begin(self) -> ForkedJob:
        return self._start(*self.kind.flags)

    def _start(self, *flags: str) -> ForkedJob:
        more = ["--model", str(self._folder / "model"), "--quiet", "--device", "cpu", "--max-num-seqs", "4"]
        given = [] if flags[0] == "merge" else [*more, "--resume"]
        arguments = [flags[0], str(self._source), "-o", self._result, *flags[1:], *given]
        own = {"TMPDIR": str(self._temporary), "RAY_TMPDIR": str(self._folder / "r"), "OMP_WAIT_POLICY": "PASSIVE"}
        return ForkedJob(arguments, environment(**own), self._work)

    def _wait(self, job: ForkedJob) -> int:
        try:
            return job.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._require(False, "waits for ever")
            raise

    def _require_clean(self) -> None:
        """Require that no process is left, and no temporary file."""
        self._await(lambda: not of_job(f"TMPDIR={self._temporary}", self._work), "a process is left")
        self._require(not list(self._temporary.iterdir()), "a temporary file is left")

    def _finish(self) -> None:
        self._require(self._contents() == self._expected, "other bytes")
        self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self._output, ignore_errors=True)
        (self._folder / ".out.run").unlink(missing_ok=True)
        if self._name == "merge":
            shutil.copytree(self._folder / "shards", self._output)
        else:
            self._output.mkdir()

    def _contents(self) -> dict[str, bytes]:
        # A note on the run has the times of files.
        files = [path for path in self._output.rglob("*") if path.is_file() and path.suffix != ".run"]
        return {str(path.relative_to(self._output)): path.read_bytes() for path in files}

    def _await(self, done: Callable[[], bool], what: str) -> None:
        try:
            until(done)
        except AssertionError:
            self._require(False, what)

    def _require(self, holds: bool, what: str = "") -> None:
        if not holds:
            left = [f"{pid} {command(pid)}"[:200] for pid in of_job(f"TMPDIR={self._temporary}", self._work)]
            files = [str(path) for path in (*self._output.rglob("*"), *self._temporary.rglob("*"))]
            told = (self._work / "stderr").read_text()[-3000:]
            parts = (f"{self._name}: {getattr(self, '_what', 'the first run')}: {what}", told, *files, *left)
            raise AssertionError("\n".join(parts))


def save_bert(folder: Path) -> None:
    """A tiny random encoder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=300, **sizes)).save_pretrained(folder)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_jobs(kind: str, kills: int, seed: int) -> Counter[str]:
    """Kill jobs of a kind so often, and let the last one end.

    Returns:
        how often each victim got each signal.
    """
    done: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="k-", dir="/tmp"))
    try:
        jobs = Jobs(kind, folder, random.Random(f"{kind} {seed}"))
        while sum(done.values()) < kills:
            what = jobs.kill()
            done[what] += not what.startswith("none")
        jobs.end()
    finally:
        for pid in of_job(f"TMPDIR={folder / 'work' / 'tmp'}", folder):
            send_signal(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    return +done


if __name__ == "__main__":
    given = options(__doc__, kinds=list(KINDS), kills=20, seed=1)
    for each in given.kinds:
        try:
            told = str(dict(sorted(kill_jobs(each, given.kills, given.seed).items())))
        except AssertionError as error:
            told = f"FAILED {error}"
        sys.stdout.write(f"{each} {told}\n")
        sys.stdout.flush()
