"""Scores of pairs, vectors of texts and log-probabilities of continuations, beside other engines.

``python -m benchmarks.scores_and_vectors [--engines vllm sentence-transformers] [--works pairs texts continuations]``.
Models have random weights, and all engines read the same folders. Each engine has a process for each work. All start
together and are timed one after the other, from texts or token ids to results. The last line is JSON.

``--tiny`` has small models and few rows: it checks the results of all engines on a CPU.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch

from benchmarks.options import options
from benchmarks.scores_and_vectors_engines import SLOW
from benchmarks.scores_and_vectors_works import WORKS
from rosebatch.job.report.provenance import gpu_name

_GIB = 1 << 30
# Works that an engine has a way for.
_SERVES = {
    "rosebatch": ("pairs", "texts", "continuations"),
    "vllm": ("pairs", "texts", "continuations"),
    "sentence-transformers": ("pairs", "texts"),
    "transformers": ("continuations",),
}
# All engines are on the GPU at once: each gets what its work needs.
_ARGS: dict[tuple[str, str], dict[str, Any]] = {
    ("rosebatch", "continuations"): {"kv_cache_memory": 16 * _GIB, "max_model_len": 1024},
    ("vllm", "continuations"): {
        "kv_cache_memory_bytes": 16 * _GIB,
        "gpu_memory_utilization": 0.3,
        "max_model_len": 1024,
    },
    ("vllm", "pairs"): {"kv_cache_memory_bytes": _GIB, "gpu_memory_utilization": 0.1, "max_model_len": 512},
    # It refuses texts of more than six characters for each token of 256.
    ("vllm", "texts"): {"kv_cache_memory_bytes": _GIB, "gpu_memory_utilization": 0.1, "max_model_len": 512},
}
_TINY_ROWS = 40
_COLUMNS = {"work": 15, "engine": 48, "rows": 8, "warm-up s": 11, "s": 9, "rows/s": 11, "ours is": 10, "agreement": 34}


class Engine:
    """A process of ``scores_and_vectors_engines``.

    Args:
        spec: see there.
        python: the interpreter of the environment that has the engine.
        path: folders to put first in PYTHONPATH.
        log: of what it says.
    """

    def __init__(self, spec: Mapping[str, Any], python: str, path: str, log: Path) -> None:
        self.spec, self.log = spec, log
        file = log.with_suffix(".json")
        file.write_text(json.dumps(spec), encoding="utf-8")
        paths = [each for each in (path, os.environ.get("PYTHONPATH")) if each]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.scores_and_vectors_engines", str(file)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Whose processes end together.
                start_new_session=True,
            )

    def answer(self) -> dict[str, Any]:
        """What its next line says; an ``error`` if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        return {"error": self.log.read_text(encoding="utf-8", errors="replace")[-3000:]}

    def begin(self) -> None:
        """Let it measure."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End it, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            pass


def main() -> None:
    """Write the models, start all engines, measure one after the other, and compare."""
    given = options(
        __doc__,
        works=[*WORKS],
        engines=["vllm", "sentence-transformers"],
        tiny=False,
        rows=0,
        repeats=3,
        dtype=("bfloat16", "float16", "float32"),
        device=("cuda", "cpu"),
        slow_share={"type": float, "default": 0.1, "help": "of contexts for vLLM: all take it minutes"},
        vllm_python=sys.executable,
        vllm_path="",
        folder=None,
    )
    # Engines outlive a process that a signal ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="rosebatch-") as made:
        folder = Path(given.folder or made).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for work in given.works:
            if not (folder / work).exists():
                WORKS[work].write(folder / work, given.tiny, getattr(torch, given.dtype))
        with ExitStack() as ends:
            engines = []
            for work, name in product(given.works, ("rosebatch", *given.engines)):
                if work in _SERVES[name]:
                    engines.append(_start(name, work, given, folder))
                    ends.callback(engines[-1].end)
            found = _measure(engines, folder)
    sys.stdout.write(json.dumps({"gpu": gpu_name(), "dtype": given.dtype, "runs": found}) + "\n")


def _start(name: str, work: str, given: Namespace, folder: Path) -> Engine:
    results = folder / f"{work}-results"
    results.mkdir(exist_ok=True)
    spec = {
        "engine": name,
        "work": work,
        "folder": str(folder / work),
        "device": given.device,
        "args": _ARGS.get((name, work), {}) if given.device == "cuda" else {},
        "rows": given.rows or (_TINY_ROWS if given.tiny else WORKS[work].rows),
        "shares": {} if given.tiny else dict.fromkeys(SLOW, given.slow_share),
        "repeats": given.repeats,
        "results": str(results),
    }
    is_vllm = name == "vllm"
    python = given.vllm_python if is_vllm else sys.executable
    return Engine(spec, python, given.vllm_path if is_vllm else "", folder / f"{work}-{name}.log")


def _measure(engines: Sequence[Engine], folder: Path) -> list[dict[str, Any]]:
    """The runs of all engines; a line is told of each."""
    _tell("".join(f"{name:<{width}}" for name, width in _COLUMNS.items()))
    loaded = [engine.answer() for engine in engines]
    found: list[dict[str, Any]] = []
    for engine, about in zip(engines, loaded, strict=True):
        name, work = engine.spec["engine"], engine.spec["work"]
        of = {"work": work, "engine": name}
        answers = about
        if "error" not in about:
            engine.begin()
            answers = engine.answer()
        for form, run in ({"": answers} if "error" in answers else answers).items():
            if "error" in run:
                found.append(of | {"form": form} | run)
                _tell(f"{work:<{_COLUMNS['work']}}{name} {form}: {run['error']}")
                continue
            rate = run["rows"] / median_low(run["seconds"])
            ours = next((each for each in found if each["work"] == work and "rows_per_s" in each), None)
            row = of | about | {"form": form} | run | {"rows_per_s": rate}
            if name != "rosebatch" and ours is not None:
                row["ours_is"] = ours["rows_per_s"] / rate
                results = folder / f"{work}-results"
                row |= agreement(np.load(results / "rosebatch-.npy"), np.load(results / f"{name}-{form}.npy"))
            found.append(row)
            _tell(_line(row))
    return found


def agreement(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """How well results of the same rows agree. Those of fewer rows are of the first ones.

    Args:
        ours, theirs: ``[N]`` or ``[N, H]``.

    Returns:
        ``correlation`` over rows, and ``error``: the mean absolute difference, as a share of the standard deviation
        over rows. Random weights give all rows nearly the same result: what they have in common tells nothing.
    """
    ours = ours[: len(theirs)].astype(np.float64)
    theirs = theirs.astype(np.float64)
    error = np.abs(ours - theirs).mean() / ours.std(0).mean()
    ours, theirs = ours - ours.mean(0), theirs - theirs.mean(0)
    correlation = (ours * theirs).sum() / np.sqrt((ours**2).sum() * (theirs**2).sum())
    return {"correlation": float(correlation), "error": float(error)}


def _line(row: Mapping[str, Any]) -> str:
    engine = " ".join(filter(None, (row["engine"], row["version"], row["form"])))
    values = [row["work"], engine, row["rows"], f"{row['warm_up_s']:.2f}", f"{median_low(row['seconds']):.2f}"]
    values.append(f"{row['rows_per_s']:.0f}")
    if "ours_is" in row:
        values += [f"{row['ours_is']:.2f}x", f"correlation {row['correlation']:.5f}, error {row['error']:.1%}"]
    return "".join(f"{value:<{width}}" for value, width in zip(values, _COLUMNS.values(), strict=False))


def _tell(line: str) -> None:
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
