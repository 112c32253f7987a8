"""Commands that answer an OpenAI batch file, timed from the start of the process to the last row."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.batch_works import Body, Work
from rosebatch.bench.against import Peer

# Random weights would go on with spaces wherever JSON allows them. Ours writes none.
_COMPACT_JSON = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
_NAME = "model"


@dataclass(frozen=True, slots=True)
class Timed:
    """What a command did. Seconds count from the start of its process.

    Attributes:
        engine: name and version.
        ready_s: until the engine was ready for the first row.
        whole_s: until the last row was in the file of answers.
        prompt_tokens, output_tokens: of all answers.
        valid: share of the rows that have a valid answer.
    """

    engine: str
    ready_s: float
    whole_s: float
    prompt_tokens: int
    output_tokens: int
    valid: float


def write_batch(path: Path, bodies: Sequence[Body]) -> None:
    """Write an OpenAI batch file of chats."""
    request = {"method": "POST", "url": "/v1/chat/completions"}
    lines = ({"custom_id": str(i), **request, "body": {"model": _NAME, **body}} for i, body in enumerate(bodies))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def run_ours(model: Path, batch: Path, folder: Path, flags: Sequence[str]) -> tuple[Path, float, float]:
    """``rosebatch generate``: its file of answers, ``ready_s`` and ``whole_s``."""
    answers, report = folder / "rosebatch.jsonl", folder / "rosebatch.json"
    files = ["-o", str(answers), "--report", str(report)]
    command = [sys.executable, "-m", "rosebatch", "generate", str(batch), *files, *_model(model), *flags]
    _, whole = _time(command, os.environ, folder / "rosebatch.log", answers)
    startup = json.loads(report.read_text(encoding="utf-8"))["startup_s"]
    return answers, startup["import"] + startup["load"], whole


def run_vllm(peer: Peer, model: Path, batch: Path, folder: Path, flags: Sequence[str]) -> tuple[Path, float, float]:
    """``vllm run-batch``: its file of answers, which it creates once the engine is ready, and both times."""
    answers = folder / "vllm.jsonl"
    files = ["-i", str(batch), "-o", str(answers)]
    form = ["--structured-outputs-config", _COMPACT_JSON]
    command = [peer.python, "-m", "vllm.entrypoints.cli.main", "run-batch", *files, *_model(model), *form, *flags]
    ready, whole = _time(command, vllm_environment(peer), folder / "vllm.log", answers)
    return answers, ready, whole


def vllm_environment(peer: Peer) -> Mapping[str, str]:
    """Nothing is asked of the network."""
    paths = [path for path in (peer.path, os.environ.get("PYTHONPATH")) if path]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return os.environ | offline | {"PYTHONPATH": os.pathsep.join(paths)}


def vllm_version(peer: Peer) -> str:
    """As its package says."""
    ask = "from importlib.metadata import version; print(version('vllm'))"
    return subprocess.run(
        [peer.python, "-c", ask], env=vllm_environment(peer), capture_output=True, text=True, check=True
    ).stdout.strip()


def tally(engine: str, run: tuple[Path, float, float], work: Work, bodies: Sequence[Body]) -> Timed:
    """Read a command's answers."""
    path, ready, whole = run
    prompt_tokens = output_tokens = valid = 0
    with path.open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            answer = (line["response"] or {}).get("body") or {}
            if not answer.get("choices"):
                continue
            usage, text = answer["usage"], answer["choices"][0]["message"]["content"] or ""
            prompt_tokens += usage["prompt_tokens"]
            output_tokens += usage["completion_tokens"]
            valid += work.is_valid(bodies[int(line["custom_id"])], text, usage["completion_tokens"])
    return Timed(engine, ready, whole, prompt_tokens, output_tokens, valid / len(bodies))


def _model(folder: Path) -> list[str]:
    return ["--model", str(folder), "--served-model-name", _NAME]


def _time(command: Sequence[str], environment: Mapping[str, str], log: Path, answers: Path) -> tuple[float, float]:
    """Seconds until the file of answers was there, and until it changed for the last time.

    Raises:
        SystemExit: the command failed.
    """
    ready: float | None = None
    with log.open("wb") as out:
        began, started = time.time(), time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        while process.poll() is None:
            if ready is None and answers.exists():
                ready = time.perf_counter() - started
            time.sleep(0.02)
    if process.returncode or not answers.exists():
        tail = log.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise SystemExit(f"{tail}\n{' '.join(command)}: exit code {process.returncode}")
    whole = answers.stat().st_ctime - began
    return whole if ready is None else ready, whole
