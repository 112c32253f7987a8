"""The options that commands share, declared once: each field becomes a flag of every command that takes the group."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rosebatch.config import Sampler
from rosebatch.toggles import Toggles

_MODEL, _LIMITS, _SAMPLING, _SWITCHES = "Model", "Engine limits", "Sampling", "Switches (all on by default)"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What decides how the engine is built; ``toggles`` is filled from one flag for each switch."""

    model: Annotated[
        str | None,
        typer.Option(
            help="A transformers folder, a .gguf file, or a .toml of shapes. Default: the demo model, if installed.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        typer.Option(help="'dummy' takes random weights in place of the model's own.", rich_help_panel=_MODEL),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="'auto' takes the GPU where there is one.", rich_help_panel=_MODEL),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        typer.Option(help="'auto' takes the checkpoint's.", rich_help_panel=_MODEL),
    ] = "auto"
    sampler: Annotated[
        Sampler,
        typer.Option(
            help="'flashinfer' needs cuda and flashinfer-python. With it a sampled answer depends on what else is "
            "in the file, whatever its seed.",
            rich_help_panel=_SAMPLING,
        ),
    ] = "rosebatch"
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in a step.", rich_help_panel=_LIMITS)] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens in a step: the chunk size of prefill. Default: 16384 on a GPU, fewer on a small one, "
            "1024 on a CPU.",
            rich_help_panel=_LIMITS,
            min=1,
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a KV cache block. Default: 64 on a GPU, 16 on a CPU.", rich_help_panel=_LIMITS, min=1
        ),
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(help="Memory of the KV cache, such as 512MiB or 4GiB.", rich_help_panel=_LIMITS),
    ] = None
    toggles: dict[str, bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling for the lines that do not say themselves; fields as in ``rosebatch.sampling_params.SamplingParams``.

    ``json_schema`` and ``regex`` are short for ``structured_outputs`` of a line.
    """

    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate. Default: 512.", rich_help_panel=_SAMPLING)
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(help="0, the default, takes the likeliest token.", rich_help_panel=_SAMPLING),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING)
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the likeliest tokens that reach this probability.", rich_help_panel=_SAMPLING),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this share of the likeliest one.", rich_help_panel=_SAMPLING),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End at this string; may be given several times.", rich_help_panel=_SAMPLING),
    ] = None
    ignore_eos: Annotated[
        bool | None,
        typer.Option("--ignore-eos", help="Go on past the model's end tokens.", rich_help_panel=_SAMPLING),
    ] = None
    n: Annotated[int | None, typer.Option(help="Completions of each prompt.", rich_help_panel=_SAMPLING)] = None
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens to generate.", rich_help_panel=_SAMPLING)] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Off the logit of what was generated before.", rich_help_panel=_SAMPLING)
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, times how often it was.", rich_help_panel=_SAMPLING)
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Divides the logit of what stands in the prompt or was generated.", rich_help_panel=_SAMPLING
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(help="Report log-probabilities, and of so many likeliest tokens.", rich_help_panel=_SAMPLING),
    ] = None
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same of the prompt's tokens.", rich_help_panel=_SAMPLING)
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(help="Answers are JSON that matches the schema in this file.", rich_help_panel=_SAMPLING),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Answers match this regular expression.", rich_help_panel=_SAMPLING)
    ] = None


def takes(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that each group's fields are flags of it; the command gets the group as one argument.

    Typer reads a command's flags from its signature, so the signature it sees is built here.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
        members = {name: _parameters(group) for name, group in groups.items()}

        @wraps(command)
        def with_flags(**values: Any) -> None:
            built = {name: _build(group, values) for name, group in groups.items()}
            rest = {p.name: values[p.name] for p in own}
            command(**rest, **built)

        parameters = [*own, *(p for group in members.values() for p in group)]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_flags

    return decorate


def _parameters(group: type) -> list[inspect.Parameter]:
    parameters = []
    for f in fields(group):
        if f.name == "toggles":
            parameters += [_parameter(s.name, _switch_flag(s.name, s.metadata["help"]), None) for s in fields(Toggles)]
        else:
            default = inspect.Parameter.empty if f.default is MISSING else f.default
            parameters.append(_parameter(f.name, f.type, default))
    return parameters


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _switch_flag(name: str, text: str) -> Any:
    flag = name.replace("_", "-")
    option = typer.Option(f"--{flag}/--no-{flag}", help=text, rich_help_panel=_SWITCHES, show_default=False)
    return Annotated[bool | None, option]


def _build(group: type, values: dict[str, Any]) -> Any:
    own = {f.name: values[f.name] for f in fields(group) if f.name != "toggles"}
    if "toggles" in {f.name for f in fields(group)}:
        own["toggles"] = {s.name: values[s.name] for s in fields(Toggles)}
    return group(**own)
