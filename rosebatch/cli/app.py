"""The commands: parse, call, print. No logic, and no heavy import until a command runs."""

import errno
import os
import sys
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from copy import copy
from dataclasses import fields
from inspect import getdoc
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_group
from typer.models import CommandInfo

from rosebatch.cli import jobs
from rosebatch.cli.bench_options import BenchFlags
from rosebatch.cli.cache import cache
from rosebatch.cli.classify import classify
from rosebatch.cli.closed_streams import fill_closed_streams
from rosebatch.cli.command import Command
from rosebatch.cli.embed import embed
from rosebatch.cli.options import SamplingFlags, Source, takes
from rosebatch.cli.other_names import by_flag, explained
from rosebatch.cli.score import score
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError, InterruptionError, UserError, printable
from rosebatch.core.version import __version__
from rosebatch.core.words import counted
from rosebatch.host.openmp import wait_passively
from rosebatch.job.config import JobConfig

EXIT_USAGE = 2
EXIT_ABORTED = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="rosebatch",
    help="Offline batch generation: a file of prompts in, completions and a throughput report out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_command = app.command(cls=Command, add_help_option=False)


_FIELDS = {field.name for group in (RunConfig, JobConfig, SamplingFlags, BenchFlags) for field in fields(group)}
# What PyTorch's errors say of a GPU and of a CPU.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
_LESS_MEMORY = "end other processes, or give a smaller --kv-cache-memory, --max-num-seqs or --max-num-batched-tokens"
# What only the serving of a file needs.
_OF_JOBS = ("data_parallel_size", "ray", "worker_timeout")
# What says how an input is read.
_OF_INPUTS = (
    "input_format", "result_column", "prompt_column", "id_column", "columns",
    "prompt_template", "reorder_fields", "system_prompt", "keep_prompt", "max_row_bytes",
    "image_column", "prompt", "media_root", "media_domains",
)  # fmt: skip
# What only files of rows need.
_OF_ROWS = (
    "ray", "lora",
    "generation_config", "tokenizer", "chat_template", "tool_call_parser", "reasoning_parser",
    "max_prompt_bytes", "limit_images", "max_pixels", "max_inflight_bytes", "grammar_timeout", "grammar_memory",
)  # fmt: skip


@_command
@takes(job=JobConfig, run=RunConfig, sampling=SamplingFlags)
def generate(source: Source, *, job: dict[str, Any], run: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Generate a completion for every prompt of a file.

    Exit code: 0 all completed, 3 some rows failed, 2 the command or its input is wrong, 1 the run failed, 130 and
    143 ended by a signal.
    """
    started = time.perf_counter()
    jobs.prepare_device(run)
    jobs.generate(source, job, run, sampling, started)


_command(embed)
_command(score)
_command(classify)


@_command
@takes(job=JobConfig, run=RunConfig, sampling=SamplingFlags, without=_OF_JOBS, only={"job": _OF_INPUTS})
def check(
    source: Source,
    is_embed: Annotated[
        bool, typer.Option("--embed", metavar=" ", help="Rows are for embed.", show_default=False)
    ] = False,
    is_score: Annotated[
        bool, typer.Option("--score", metavar=" ", help="Rows are for score.", show_default=False)
    ] = False,
    is_classify: Annotated[
        bool, typer.Option("--classify", metavar=" ", help="Rows are for classify.", show_default=False)
    ] = False,
    *,
    job: dict[str, Any],
    run: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Read and tokenize a file without running it: bad rows, lengths, memory and time.

    Exit code: 0 all rows can be served, 3 some cannot, 2 the command, its input or the model is wrong.
    """
    from rosebatch.io.tasks.classify import Classify
    from rosebatch.io.tasks.embed import Embed
    from rosebatch.io.tasks.generate import GENERATE
    from rosebatch.io.tasks.score import Score

    given = [task for task, chosen in ((Embed(), is_embed), (Score(), is_score), (Classify(), is_classify)) if chosen]
    if len(given) > 1:
        raise FlagError(f"{' and '.join(f'--{task.name}' for task in given)} cannot be used together")
    jobs.check({"input": source, "task": given[0] if given else GENERATE, **job}, run, sampling)


@_command
@takes(work=BenchFlags, run=RunConfig, unset=["run"], without=_OF_ROWS)
def bench(*, work: dict[str, Any], run: dict[str, Any]) -> None:
    """Time the engine on random token ids, every completion at full length.

    One warm-up, then --repeats timed runs; the report is of the median one. Each run has its own token ids.
    """
    started = time.perf_counter()
    jobs.prepare_device(run)
    from rosebatch.cli.bench import bench

    bench(BenchFlags(**work), run, started)


@_command
@takes()
def merge(
    source: Source,
    *,
    output: Annotated[str, typer.Option("--output", "-o", metavar="PATH", help="As for generate.")],
    errors: Annotated[
        str | None, typer.Option("--errors", metavar="TEXT", help="As for generate.", show_default=False)
    ] = None,
    rows_per_file: Annotated[
        int | None, typer.Option("--rows-per-file", metavar="N", help="As for generate.", show_default=False, min=1)
    ] = None,
) -> None:
    """Join the results of all runs with --shard to the output.

    Exit code: 0 all completed, 3 some rows failed, 2 a shard or a row is missing, 1 the output cannot be written.
    """
    from rosebatch.cli.interrupts import raise_for_signals
    from rosebatch.job.merge import merge_shards

    # A merge that is killed can be repeated; one that is asked to end leaves no half output.
    raise_for_signals()
    rows, failed = merge_shards(JobConfig(input=source, output=output, errors=errors, rows_per_file=rows_per_file))
    typer.echo(f"{counted(rows, 'row')}, {failed} failed", err=True)
    jobs.exit_if(failed)


_command(takes()(cache))


@app.callback(invoke_without_command=True, add_help_option=False)
@takes()
def root(version: Annotated[bool, typer.Option("--version", metavar=" ", help="Print the version.")] = False) -> None:
    """Print the version where that is asked for."""
    if version:
        typer.echo(f"rosebatch {__version__}")
        raise typer.Exit


def run() -> NoReturn:
    """``main`` as a process, which ends at once.

    To take PyTorch and CUDA apart object by object takes half a second, and frees what the system frees anyway.
    """
    fill_closed_streams()
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_ABORTED
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # ValueError: it was closed.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _app_for(args: Collection[str]) -> typer.Typer:
    """The app, where commands that no argument names have no flags: to make those takes as long as all else of it."""
    found = copy(app)
    found.registered_commands = [
        each if _name(each) in args else CommandInfo(_name(each), callback=lambda: None, help=getdoc(each.callback))
        for each in app.registered_commands
    ]
    return found


def _name(command: CommandInfo) -> str:
    assert command.callback is not None, "it was registered by its function"
    return command.callback.__name__


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line; every mistake of a user is one line on stderr, never a traceback."""
    wait_passively()
    try:
        given = sys.argv[1:] if args is None else args
        code: Any = _app_for(given)(args=given, standalone_mode=False)
        if sys.stdout is not None:
            # What cannot be written is an error; later, nobody would see it.
            sys.stdout.flush()
    except UserError as error:
        _fail(by_flag(str(error), _FIELDS), error.exit_code)
    except InterruptionError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our output went away, such as `| head`: nobody would see an error.
        sys.stderr.close()
        sys.exit(EXIT_ABORTED)
    except OSError as error:
        # Whatever else is written has its name in the message.
        is_full = error.errno == errno.ENOSPC and error.filename is None
        place = "stdout, or a temporary file" if is_full else error.filename
        _fail(str(error) if place is None else f"{place}: {error.strerror}", EXIT_ABORTED)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        # Typer has shipped click's errors from two packages: known by what they can do, not by class.
        message = getattr(error, "format_message", None)
        if message is not None:
            context = getattr(error, "ctx", None)
            command = getattr(context, "command", None)
            others = _flags_of_others(context)
            _fail(explained(message(), _flags_of(command), getattr(command, "name", None), others), EXIT_USAGE)
        if isinstance(error, MemoryError) or any(told in str(error) for told in _OUT_OF_MEMORY):
            _fail(f"out of memory: {_LESS_MEMORY}", EXIT_ABORTED)
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}"
        _fail(f"unexpected, please report it: {what} ({place.filename}:{place.lineno})", EXIT_ABORTED)
    if code == EXIT_INTERRUPTED:
        # Typer turns Ctrl-C into this exit code.
        _fail("interrupted", code)
    sys.exit(code if isinstance(code, int) else 0)


def _flags_of(command: Any) -> list[str]:
    """All flags of a command; none without one."""
    parameters = () if command is None else command.params
    return [name for each in parameters for name in (*each.opts, *each.secondary_opts)]


def _flags_of_others(context: Any) -> dict[str, str]:
    """The flags of the other commands, with the names of those that have each."""
    commands = {} if getattr(context, "parent", None) is None else dict(get_group(app).commands)
    found: dict[str, list[str]] = {}
    for name, each in commands.items():
        for flag in _flags_of(each):
            found.setdefault(flag, []).append(name)
    return {flag: " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) for flag, names in found.items()}


def _fail(message: str, code: int) -> NoReturn:
    # Without arguments, Typer has shown the help and has nothing to add.
    if message:
        sys.stderr.write(f"rosebatch: error: {printable(message)}\n")
    sys.exit(code)
