"""Other engines beside ours, each in a process of its own: same token ids, output lengths and sampling."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rosebatch.bench.case import Case
from rosebatch.bench.scenario import Sampling
from rosebatch.bench.trace import Arrivals
from rosebatch.bench.workload import require_fits
from rosebatch.core.errors import FailedRunError, FlagError, UserError
from rosebatch.core.plain import dtype_name
from rosebatch.engine.metrics.durations import Durations
from rosebatch.model.hf.folder import write_config
from rosebatch.model.source import ModelSource

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine.

    Attributes:
        name: on the command line.
        module: run with ``python -m``; it follows ``rosebatch.bench.peers.protocol``.
        package: the package that must be installed.
        python: the interpreter of the environment that has it.
        path: folders to put first in that process's PYTHONPATH.
        args: for the engine's constructor.
        has_fp8: whether it can round weights, and store K and V, as ours does.
    """

    name: str
    module: str
    package: str
    python: str = sys.executable
    path: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    has_fp8: bool = True


PEERS = {
    name: Peer(name, module=f"rosebatch.bench.peers.{name}", package=name, has_fp8=name in {"vllm", "sglang"})
    for name in ("vllm", "sglang", "lmdeploy", "transformers")
}


def choose_peers(names: Sequence[str], args: Sequence[str], python: Sequence[str], path: Sequence[str]) -> list[Peer]:
    """The peers that the command line names.

    Args:
        names: keys of ``PEERS``.
        args, python, path: values for all peers, or ``NAME=VALUE`` for one. ``path`` holds folders as in PYTHONPATH.

    Raises:
        FlagError: an unknown peer, or arguments that are not a JSON object.
    """
    peers = []
    for name in dict.fromkeys(names):
        if name not in PEERS:
            raise FlagError(f"--against {name}: no such engine; choose from {', '.join(PEERS)}")
        interpreter = _for_peer(python, name) or sys.executable
        # Absolute, but not resolved: the interpreter of a virtual environment is a link, and its place matters.
        interpreter = str(Path(interpreter).absolute()) if os.sep in interpreter else interpreter
        folders = [str(Path(folder).absolute()) for folder in _for_peer(path, name).split(os.pathsep) if folder]
        peer = replace(PEERS[name], python=interpreter, path=os.pathsep.join(folders))
        peers.append(replace(peer, args=_parse_args(_for_peer(args, name))))
    return peers


def require_installed(peer: Peer) -> None:
    """Ask the peer's interpreter for the package, before anything takes minutes.

    Raises:
        FlagError: the interpreter or the package is missing.
    """
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    unread = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        try:
            code = _run(peer, Path(folder), "-c", find, peer.package, **unread)
        except OSError as error:
            raise FlagError(f"--peer-python {peer.python}: {error.strerror}") from None
    if code:
        raise FlagError(
            f"--against {peer.name}: {peer.python} has no {peer.package}; run pip install {peer.package}, best in an "
            f"environment of its own, and give that environment's Python: --peer-python {peer.name}=PATH"
        )


def other_form(peer: Peer, source: ModelSource) -> str | None:
    """A sentence if the peer runs another form of the model than we do."""
    form = source.quantization
    if form.decodes:
        return f"--against {peer.name}: it keeps {form.name}, which --quantization none decodes for us"
    ours = ["weights"] * form.rounds + ["K and V"] * (source.config.kv_cache_dtype == "fp8")
    return f"--against {peer.name}: its {' and '.join(ours)} are not in fp8" if ours and not peer.has_fp8 else None


def run_peer(peer: Peer, cases: Sequence[Case], repeats: int) -> dict[str, dict[str, Any]]:
    """Run cases on a peer. All cases that need the same engine share one process.

    Returns:
        for each case, by name: ``version``, ``startup_s`` (its parts ``load`` and ``warm-up``), the ``seconds`` of
        every timed run, and ``is_cold``: whether it was the first of its process. Or its ``error``: a case of this
        engine does not fit the model, or the process fails. Its log is kept, and the message names it.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        source, scenario = case.source, case.scenario
        engine = (*_form_of(source).values(), case.config.model, scenario.max_num_seqs, scenario.prefix_cache)
        groups.setdefault(engine, []).append(case)
    timed: dict[str, dict[str, Any]] = {}
    for group in groups.values():
        try:
            for case in group:
                require_fits(case.workload(), case.source.config.max_model_len)
            answer = ask(peer, partial(_specification, peer, group, repeats))
        except UserError as error:
            # What another engine of this peer has found stays.
            timed |= {case.name: {"error": str(error)} for case in group}
            continue
        for case, workload in zip(group, answer["workloads"], strict=True):
            startup = {"load": answer["load_s"], "warm-up": workload["warm_up_s"]}
            timed[case.name] = {
                "version": answer["version"],
                "startup_s": startup,
                "seconds": workload["seconds"],
                "is_cold": case is group[0],
            }
    return timed


def replay_peer(peer: Peer, case: Case, arrivals: Arrivals, scales: Sequence[float]) -> list[dict[str, Any]]:
    """Replay arrivals on a peer, once for each scale.

    Returns:
        for each scale ``version``, ``startup_s``, ``elapsed_s``, token rates and latencies, named as in our reports.

    Raises:
        UserError: the process fails. Its log is kept, and the message names it.
    """
    workloads = [arrivals.workload(run) for run in range(len(scales) + 1)]
    replays = {
        "prompts": [workload.prompts for workload in workloads],
        "output_lens": workloads[0].output_lens,
        "sampling": _sampling(case.scenario.sampling),
        "times": [[at / scale for at in arrivals.times] for scale in scales],
    }
    answer = ask(peer, lambda folder: {**_engine_of(peer, [case], folder), "replays": replays})
    startup = {"load": answer["load_s"], "warm-up": answer["warm_up_s"]}
    return [
        {
            "version": answer["version"],
            "startup_s": startup,
            "elapsed_s": run["seconds"],
            "requests_per_s": len(run["e2e"]) / run["seconds"],
            "output_tokens_per_s": sum(workloads[0].output_lens) / run["seconds"],
            **{f"{kind}_s": Durations(run[kind]).summary() for kind in ("ttft", "tpot", "itl", "e2e")},
        }
        for run in answer["runs"]
    ]


def ask(peer: Peer, specify: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The answer of a peer's process, see ``rosebatch.bench.peers.protocol``.

    Args:
        peer: another engine.
        specify: makes the specification; given a folder for files that the process needs.

    Raises:
        UserError: the process fails. Its log is kept, and the message names it.
    """
    with tempfile.TemporaryDirectory(prefix="rosebatch-") as name:
        folder = Path(name)
        spec, answer = folder / "spec.json", folder / "answer.json"
        spec.write_text(json.dumps(specify(folder)), encoding="utf-8")
        log_file, log = tempfile.mkstemp(prefix=f"rosebatch-{peer.name}-", suffix=".log")
        # Files, not pipes: a process that the peer leaves running would keep a pipe open, and we would wait for it.
        with answer.open("wb") as out, os.fdopen(log_file, "wb") as errors:
            code = _run(peer, folder, "-m", peer.module, str(spec), stdout=out, stderr=errors)
        try:
            values: dict[str, Any] = json.loads(answer.read_bytes())
        except ValueError:
            cause = _cause(Path(log).read_text(encoding="utf-8", errors="replace"))
            raise FailedRunError(f"{peer.name} ended with exit code {code}; its log is {log}: {cause}") from None
        Path(log).unlink()
        return values


def _run(peer: Peer, folder: Path, *arguments: str, **streams: Any) -> int:
    """Run the peer's interpreter in a folder; returns its exit code."""
    environment, command = _environment(peer, folder), [peer.python, *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, check=False, **streams
    ).returncode


def _cause(log: str) -> str:
    """The line of a log that says what went wrong.

    Behind an engine's own error come those of the processes that waited for it, and their farewells.
    """
    lines = [line.strip() for line in log.split("\n") if line.strip()]
    errors = (line for line in lines if re.search(r"\b\w+(Error|Exception): \S", line))
    return next(errors, lines[-1] if lines else "it wrote nothing")


def model_folder(source: ModelSource, folder: Path) -> Path:
    """The model's own folder; for a TOML of shapes, one made inside of ``folder``, with the model's config alone."""
    model = source.folder
    if model is None:
        model = folder / source.name
        model.mkdir()
        write_config(source.config, model)
    return model.resolve()


def _engine_of(peer: Peer, cases: Sequence[Case], folder: Path) -> dict[str, Any]:
    """The engine that all of these cases need."""
    first = cases[0]
    return {
        "model": str(model_folder(first.source, folder)),
        "device": first.device,
        **_form_of(first.source),
        "max_num_seqs": first.scenario.max_num_seqs,
        "prefix_cache": first.scenario.prefix_cache,
        "args": peer.args,
    }


def _form_of(source: ModelSource) -> dict[str, Any]:
    return {
        "load_format": source.load_format,
        "dtype": dtype_name(source.dtype),
        # What the checkpoint itself is, a peer sees.
        "quantization": "fp8" if source.quantization.rounds else None,
        "kv_cache_dtype": source.config.kv_cache_dtype,
    }


def _specification(peer: Peer, cases: Sequence[Case], repeats: int, folder: Path) -> dict[str, Any]:
    return {
        **_engine_of(peer, cases, folder),
        "repeats": repeats,
        "workloads": [
            {
                "prompts": [case.workload(run).prompts for run in range(repeats + 1)],
                "output_lens": case.workload().output_lens,
                "sampling": _sampling(case.scenario.sampling),
            }
            for case in cases
        ],
    }


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """The temperature, and all other fields that differ from their default: engines spell 'keep all' differently."""
    default = Sampling()
    names = [name for name in Sampling.__struct_fields__ if getattr(sampling, name) != getattr(default, name)]
    return {"temperature": sampling.temperature} | {name: getattr(sampling, name) for name in names}


def _environment(peer: Peer, folder: Path) -> dict[str, str]:
    """Environment variables of the peer. PYTHONPATH has a link to our package alone.

    The packages installed around ours may not fit the peer's environment.
    """
    imports = folder / "import"
    imports.mkdir()
    (imports / _PACKAGE.name).symlink_to(_PACKAGE)
    paths = [str(imports), peer.path, os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _for_peer(values: Iterable[str], name: str) -> str:
    """The last value given for this peer; empty if there is none."""
    chosen = ""
    for value in values:
        target, _, rest = value.partition("=")
        if target == name:
            chosen = rest
        elif target not in PEERS:
            chosen = value
    return chosen


def _parse_args(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise FlagError(f"--peer-args is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise FlagError(f"--peer-args must be a JSON object, got {text}")
    return values
