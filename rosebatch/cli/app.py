"""The commands: parse, call, print. No logic, and no heavy import until a command runs."""

import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from rosebatch import __version__
from rosebatch.cli import cuda_context
from rosebatch.cli.bench_options import BenchEngineOptions, BenchOptions
from rosebatch.cli.cache import cache
from rosebatch.cli.interrupts import InterruptionError
from rosebatch.cli.options import EngineOptions, SamplingOptions, takes
from rosebatch.errors import FlagError, UserError

EXIT_ROWS_FAILED = 3
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


@app.command()
@takes(engine=EngineOptions, sampling=SamplingOptions)
def generate(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="JSONL, OpenAI batch or Parquet file, or - for stdin.")
    ],
    input_format: Annotated[
        Literal["auto", "jsonl", "openai", "parquet"],
        typer.Option(help="'auto' goes by the extension, and tells an OpenAI batch by its first line."),
    ] = "auto",
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", help="JSONL or Parquet file, or FOLDER/ of Parquet files. Default: JSONL on stdout."
        ),
    ] = None,
    errors: Annotated[
        str | None,
        typer.Option(help="JSONL file for the rows that fail. Default for an OpenAI batch: OUTPUT.errors.jsonl."),
    ] = None,
    rows_per_file: Annotated[
        int | None, typer.Option(min=1, help="Most rows in each file of an output folder. Default: 1000000.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run that left OUTPUT.part behind; start where there is none."),
    ] = False,
    force_resume: Annotated[
        bool, typer.Option("--force-resume", help="Go on with it though input, model or flags have changed.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Read the whole file first, and run nothing if any row cannot be served.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Makes each line's sampling independent of its place.")] = None,
    return_token_ids: Annotated[bool, typer.Option("--return-token-ids", help="Add token_ids to the results.")] = False,
    report: Annotated[
        list[Path] | None,
        typer.Option(help="Write the report to this file: a page for .html, else JSON; may be given several times."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report on stderr.")] = False,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Generate a completion for every prompt of a file.

    Exit code: 0 all rows completed, 3 finished but some rows failed, 2 impossible flags, 1 aborted, 130 and 143
    ended by SIGINT or SIGTERM.
    """
    started = time.perf_counter()
    cuda_context.create_in_background(engine.device)
    from rosebatch.commands import run_generate

    failed = run_generate(
        source=source,
        input_format=input_format,
        output=output,
        errors=errors,
        rows_per_file=rows_per_file,
        resume=resume,
        force_resume=force_resume,
        strict=strict,
        seed=seed,
        return_token_ids=return_token_ids,
        report_paths=report or [],
        quiet=quiet,
        engine_options=engine,
        sampling_options=sampling,
        started=started,
    )
    if failed:
        raise typer.Exit(EXIT_ROWS_FAILED)


@app.command()
@takes(engine=EngineOptions, sampling=SamplingOptions)
def check(
    source: Annotated[str, typer.Argument(metavar="INPUT", help="As of generate.")],
    input_format: Annotated[
        Literal["auto", "jsonl", "openai", "parquet"], typer.Option(help="As of generate.")
    ] = "auto",
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Read and tokenize a file without running it: bad rows, lengths, and the memory and time that it will take.

    Exit code: 0 all rows can be served, 3 some cannot.
    """
    from rosebatch.commands import run_check

    if run_check(source=source, input_format=input_format, engine_options=engine, sampling_options=sampling):
        raise typer.Exit(EXIT_ROWS_FAILED)


@app.command()
@takes(bench=BenchOptions, engine=BenchEngineOptions)
def bench(*, bench: BenchOptions, engine: BenchEngineOptions) -> None:
    """Time the engine on random token ids, every completion at full length.

    One warm-up, then --repeats timed runs: the report is of the one in the middle. Each run has token ids of its own.
    """
    started = time.perf_counter()
    cuda_context.create_in_background(engine.device)
    from rosebatch.commands import run_bench

    run_bench(bench, engine, started=started)


app.command()(cache)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Print the version where that is asked for."""
    if version:
        typer.echo(f"rosebatch {__version__}")
        raise typer.Exit


def run() -> NoReturn:
    """``main`` as a process, which ends at once.

    To take PyTorch and CUDA apart object by object takes half a second, and frees what the system frees anyway.
    """
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_ABORTED
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # ValueError: it was closed.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line; every mistake of a user is one line on stderr, never a traceback."""
    # Read when torch loads: OpenMP's threads should not spin while they wait. Beside another busy process, spinning
    # makes a CPU run 15 times slower (docs/performance.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code: Any = app(args=args, standalone_mode=False)
        if sys.stdout is not None:
            # What cannot be written is an error; later, there is nobody left to tell of it.
            sys.stdout.flush()
    except FlagError as error:
        _fail(str(error), EXIT_USAGE)
    except UserError as error:
        _fail(str(error), EXIT_ABORTED)
    except InterruptionError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our output went away, such as `| head`: there is nobody left to tell.
        sys.stderr.close()
        sys.exit(EXIT_ABORTED)
    except OSError as error:
        _fail(str(error), EXIT_ABORTED)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        # Typer has shipped click's errors from two packages: known by what they can do, not by class.
        message = getattr(error, "format_message", None)
        if message is not None:
            _fail(message(), EXIT_USAGE)
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}"
        _fail(f"unexpected, please report it: {what} ({place.filename}:{place.lineno})", EXIT_ABORTED)
    if code == EXIT_INTERRUPTED:
        # Typer turns Ctrl-C into this exit code.
        _fail("interrupted", code)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    # Without arguments, Typer has shown the help and has nothing to add.
    if message:
        line = " ".join(message.split())
        sys.stderr.write(f"rosebatch: error: {line}\n")
    sys.exit(code)
