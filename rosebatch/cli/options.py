"""Makes the flags of commands from the fields of configs: a field is declared once, with its help."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from rosebatch.config.run import SAMPLING, SWITCHES, Flag
from rosebatch.config.switches import Switches


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """Sampling for the rows that do not say themselves; fields as in ``rosebatch.core.sampling_params.SamplingParams``.

    ``json_schema`` and ``regex`` are short for a row's ``structured_outputs``.
    """

    max_tokens: Annotated[int | None, Flag("Max tokens to generate. Default: 512.", SAMPLING)] = None
    temperature: Annotated[float | None, Flag("0, the default, is greedy.", SAMPLING)] = None
    top_k: Annotated[int | None, Flag("Keep the k likeliest tokens.", SAMPLING)] = None
    top_p: Annotated[float | None, Flag("Keep tokens that reach this probability.", SAMPLING)] = None
    min_p: Annotated[float | None, Flag("Drop tokens below this fraction of the likeliest.", SAMPLING, rare=True)] = (
        None
    )
    n: Annotated[int | None, Flag("Completions per prompt.", SAMPLING)] = None
    stop: Annotated[tuple[str, ...] | None, Flag("End at this string. Repeatable.", SAMPLING)] = None
    ignore_eos: Annotated[bool | None, Flag("Continue past the model's end tokens.", SAMPLING, rare=True)] = None
    min_tokens: Annotated[int | None, Flag("Min tokens to generate.", SAMPLING, rare=True)] = None
    presence_penalty: Annotated[
        float | None, Flag("Subtracted from the logit of every generated token.", SAMPLING, rare=True)
    ] = None
    frequency_penalty: Annotated[
        float | None, Flag("Subtracted once for each occurrence of the token.", SAMPLING, rare=True)
    ] = None
    repetition_penalty: Annotated[
        float | None, Flag("Divides logits of tokens in prompt and answer; 1 changes nothing.", SAMPLING, rare=True)
    ] = None
    max_reasoning_tokens: Annotated[
        int | None, Flag("Max tokens of reasoning before the answer.", SAMPLING, rare=True)
    ] = None
    logprobs: Annotated[
        int | None, Flag("Return log-probabilities, and those of this many likeliest tokens.", SAMPLING, rare=True)
    ] = None
    prompt_logprobs: Annotated[int | None, Flag("The same for the prompt's tokens.", SAMPLING, rare=True)] = None
    json_schema: Annotated[str | None, Flag("Schema of answers: a file, or '{…}'.", SAMPLING, metavar="FILE")] = None
    regex: Annotated[str | None, Flag("Answers match this pattern.", SAMPLING)] = None


Source = Annotated[
    str, typer.Argument(metavar="INPUT", help="JSON, OpenAI batch, CSV, Parquet, Arrow, images; - is stdin.")
]


def takes(
    *,
    unset: Iterable[str] = (),
    without: Iterable[str] = (),
    only: Mapping[str, Collection[str]] = MappingProxyType({}),
    **groups: type,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that the fields of each group are flags of it.

    The command gets each group's values as one dictionary by field name. The switches of a field ``switches`` are in a
    dictionary of their own. Typer reads flags from the command's signature, so that is built here.

    Args:
        unset: groups whose dictionaries hold only what was given, without defaults.
        without: fields that mean nothing to the command.
        only: of some groups, the fields that are flags.
        groups: dataclasses by the name of the command's parameter.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
        flags = {
            name: [
                parameter
                for parameter in _parameters(group, without, unset=name in unset)
                if name not in only or parameter.name in only[name]
            ]
            for name, group in groups.items()
        }

        @wraps(command)
        def with_flags(**values: Any) -> None:
            built = {name: _values(group, values, unset=name in unset) for name, group in groups.items()}
            command(**{p.name: values[p.name] for p in own}, **built)

        # Without groups, --help has nothing to leave out.
        parameters = [*own, *(p for group in flags.values() for p in group), *_HELP[: 2 if groups else 1]]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_flags

    return decorate


# A switch takes no value, so it shows none.
_METAVARS = {bool: " ", int: "N", float: "X", str: "TEXT", list[str]: "TEXT", Path: "FILE"}


def _show_help(context: typer.Context, wanted: bool) -> None:
    """Print the help."""
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


def _show_all(context: typer.Context, wanted: bool) -> None:
    """Print the help with the flags that ``--help`` leaves out."""
    for parameter in context.command.params if wanted else ():
        parameter.hidden = False  # type: ignore[attr-defined]
    _show_help(context, wanted)


def _help_flag(name: str, callback: Callable[[typer.Context, bool], None], text: str) -> inspect.Parameter:
    option = typer.Option(name, is_eager=True, callback=callback, metavar=" ", help=text, rich_help_panel="Help")
    return _parameter(name.removeprefix("--").replace("-", "_"), Annotated[bool, option], False)


def _parameters(group: type, without: Iterable[str], *, unset: bool) -> list[inspect.Parameter]:
    parameters = []
    for f in fields(group):
        if f.name == "switches":
            parameters += [_parameter(s.name, _switch(s.name, s.metadata["help"]), None) for s in fields(Switches)]
        elif get_origin(f.type) is Annotated and f.name not in without:
            kind, flag = get_args(f.type)
            default = None if unset or f.default == () else f.default
            parameters.append(_parameter(f.name, _option(f.name, kind, flag, unset=unset), default))
    return parameters


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(name: str, kind: Any, flag: Flag, *, unset: bool) -> Any:
    words: tuple[str, ...] = ()
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        words = next((get_args(each) for each in kinds[1:] if get_origin(each) is Literal), ())
        # What a config also takes as a number, the command line takes as text.
        kind = kinds[0]
    if get_origin(kind) is tuple:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    # Explicit: typer 0.27 makes --DTYPE of the metavar.
    names = flag.names or (f"--{name.replace('_', '-')}",)
    option = typer.Option(
        *names,
        help=flag.help,
        rich_help_panel=flag.panel,
        min=flag.minimum,
        parser=_number_or(words) if words else None,
        metavar=flag.metavar or _METAVARS.get(kind) or "|".join(get_args(kind)) or None,
        hidden=flag.rare,
        show_default=False,
    )
    return Annotated[kind | None, option]


def _number_or(words: tuple[str, ...]) -> Callable[[str], int | str]:
    """Reads a number, or one of these words."""

    def parse(text: str) -> int | str:
        try:
            return text if text in words else int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is neither a number nor {' or '.join(words)}") from None

    return parse


def _switch(name: str, text: str) -> Any:
    flag = name.replace("_", "-")
    option = typer.Option(
        f"--{flag}/--no-{flag}", help=text, rich_help_panel=SWITCHES, show_default=False, hidden=True, metavar=" "
    )
    return Annotated[bool | None, option]


def _values(group: type, values: dict[str, Any], *, unset: bool) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for f in fields(group):
        if f.name == "switches":
            own["switches"] = {s.name: values[s.name] for s in fields(Switches)}
        elif get_origin(f.type) is not Annotated:
            continue
        elif (value := values.get(f.name)) is not None:
            own[f.name] = tuple(value) if isinstance(value, list) else value
        elif not unset:
            own[f.name] = f.default
    return own


# In place of the command's own --help, which looks as if it took a value.
_HELP = (
    _help_flag("--help", _show_help, "Show this message."),
    _help_flag("--help-all", _show_all, "Show rare flags and switches too."),
)
