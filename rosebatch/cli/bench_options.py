"""The flags of ``rosebatch bench``: what to run, how often, and beside what."""

from dataclasses import dataclass
from typing import Annotated

import typer

from rosebatch.cli.options import EngineOptions

_WORK, _COMPARE, _LIMITS = "Workload", "Comparisons", "Engine limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchEngineOptions(EngineOptions):
    """How the engine is built; what is not given, the scenario decides."""

    # Wider than the field it replaces: None here is filled in before anyone takes it for an EngineOptions.
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences in a step. Default: the scenario's.", rich_help_panel=_LIMITS)
    ] = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to run; fields up to ``seed`` replace those of ``rosebatch.bench.scenario.Scenario`` where given."""

    num_prompts: Annotated[int | None, typer.Option(help="Requests. Default: 32.", rich_help_panel=_WORK)] = None
    input_len: Annotated[
        int | None, typer.Option(help="Prompt tokens of each request. Default: 512.", rich_help_panel=_WORK)
    ] = None
    output_len: Annotated[
        int | None, typer.Option(help="Tokens to generate for each request. Default: 128.", rich_help_panel=_WORK)
    ] = None
    temperature: Annotated[float | None, typer.Option(help="0, the default, is greedy.", rich_help_panel=_WORK)] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.", rich_help_panel=_WORK)] = None
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens that reach this.", rich_help_panel=_WORK)
    ] = None
    seed: Annotated[int | None, typer.Option(help="Of the random token ids. Default: 0.", rich_help_panel=_WORK)] = None
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help="A name in configs/bench, or a .toml file; may be given several times. Flags win over it.",
            rich_help_panel=_WORK,
        ),
    ] = None
    suite: Annotated[
        str | None,
        typer.Option(
            help="A suite in configs/bench, or a .toml file: its scenarios, each with all of its models.",
            rich_help_panel=_WORK,
        ),
    ] = None
    repeats: Annotated[int, typer.Option(help="Timed runs, after one warm-up.", rich_help_panel=_WORK, min=1)] = 3
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Time with this switch on and off, in turn, such as prefix-cache; 'all' takes each switch.",
            rich_help_panel=_COMPARE,
        ),
    ] = None
    against: Annotated[
        list[str] | None,
        typer.Option(help="Run vllm, sglang or transformers on the same token ids.", rich_help_panel=_COMPARE),
    ] = None
    peer_args: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]JSON", help="Arguments of the peer's engine.", rich_help_panel=_COMPARE),
    ] = None
    peer_python: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="Python that has the peer installed.", rich_help_panel=_COMPARE),
    ] = None
    peer_path: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]DIR", help="Goes in front of the peer's PYTHONPATH.", rich_help_panel=_COMPARE),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object on stdout.")] = False
