"""The flags of ``rosebatch bench``: what to run, how often, and against what."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rosebatch.config.run import Flag

WORK, COMPARE, PROFILE = "Workload", "Comparisons", "Profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """What to run; fields up to ``seed`` replace those of ``rosebatch.bench.scenario.Scenario`` if given."""

    num_prompts: Annotated[int | None, Flag("Requests. Default: 32.", WORK)] = None
    input_len: Annotated[int | None, Flag("Prompt tokens per request. Default: 512.", WORK)] = None
    output_len: Annotated[int | None, Flag("Generated tokens per request. Default: 128.", WORK)] = None
    temperature: Annotated[float | None, Flag("0, the default, is greedy.", WORK)] = None
    top_k: Annotated[int | None, Flag("Keep the k likeliest tokens.", WORK)] = None
    top_p: Annotated[float | None, Flag("Keep the likeliest tokens that reach this.", WORK)] = None
    seed: Annotated[int | None, Flag("Seed of the random token ids. Default: 0.", WORK, rare=True)] = None
    scenario: Annotated[
        tuple[str, ...],
        Flag("Name in configs/bench, or a .toml. Repeatable.", WORK, ("--scenario", "--suite"), metavar="NAME"),
    ] = ()
    trace: Annotated[
        Path | None, Flag("Replay this CSV or JSONL of arrivals, instead of a scenario.", WORK, metavar="FILE")
    ] = None
    scale: Annotated[tuple[float, ...], Flag("Replay so many times faster. Repeatable.", WORK, metavar="FACTOR")] = ()
    submit_interval_ms: Annotated[
        float | None, Flag("Submit a request of the scenario every so many milliseconds.", WORK, rare=True)
    ] = None
    repeats: Annotated[int, Flag("Timed runs, after one warm-up.", WORK, minimum=1)] = 3
    compare: Annotated[
        tuple[str, ...], Flag("Time this switch on and off, in turn; 'all' takes each.", COMPARE, metavar="SWITCH")
    ] = ()
    against: Annotated[
        tuple[str, ...],
        Flag("Run vllm, sglang, lmdeploy or transformers on the same token ids.", COMPARE, metavar="ENGINE"),
    ] = ()
    peer_args: Annotated[
        tuple[str, ...], Flag("Arguments of that engine.", COMPARE, metavar="[NAME=]JSON", rare=True)
    ] = ()
    peer_python: Annotated[
        tuple[str, ...], Flag("Python that has that engine installed.", COMPARE, metavar="[NAME=]PATH", rare=True)
    ] = ()
    peer_path: Annotated[
        tuple[str, ...], Flag("Prepended to that engine's PYTHONPATH.", COMPARE, metavar="[NAME=]DIR", rare=True)
    ] = ()
    report: Annotated[tuple[Path, ...], Flag("Results as .html or .json. Repeatable.", WORK, metavar="FILE")] = ()
    profile: Annotated[
        Literal["parts", "torch", "nvtx"] | None,
        Flag("After the timed runs: table of parts, trace file, or ranges.", PROFILE),
    ] = None
    profile_output: Annotated[
        Path, Flag("Trace of --profile torch. Default: rosebatch-trace.json.", PROFILE, rare=True)
    ] = Path("rosebatch-trace.json")
    as_json: Annotated[bool, Flag("Print one JSON object on stdout.", WORK, ("--json",))] = False
