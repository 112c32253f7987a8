"""What the commands do, once their flags are parsed."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rosebatch.bench.throughput import Workload, run_throughput
from rosebatch.config import ConfigT, EngineConfig, parse_size
from rosebatch.errors import FlagError, RowError
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import sampling_params
from rosebatch.io.writer import open_writer
from rosebatch.job import run_job
from rosebatch.launch import LaunchOptions, launch
from rosebatch.options import EngineOptions, SamplingOptions
from rosebatch.progress import Progress
from rosebatch.report import build_report, print_report, write_report


def run_generate(
    *,
    source: str,
    output: str | None,
    seed: int | None,
    return_token_ids: bool,
    report_path: Path | None,
    quiet: bool,
    engine_options: EngineOptions,
    sampling_options: SamplingOptions,
    started: float,
) -> int:
    """``rosebatch generate``: the number of rows that failed."""
    options = _launch_options(engine_options)
    defaults = _sampling_defaults(sampling_options, seed)
    reader = PromptReader(source, defaults)
    imported = time.perf_counter()
    writer = open_writer(output, token_ids=return_token_ids, columns=reader.columns)
    try:
        launched = launch(options)
        begun = time.perf_counter()
        with Progress(None if quiet else reader.count(), enabled=not quiet) as progress:
            tally = run_job(
                launched.engine,
                launched.tokenizer,
                reader,
                writer,
                progress=progress,
                seed=seed,
                return_token_ids=return_token_ids,
            )
    except BaseException:
        writer.abandon()
        raise
    stats = launched.engine.stats
    startup = {"import": imported - started, "load": launched.load_seconds}
    if stats.first_token_time is not None:
        startup["first token"] = stats.first_token_time - begun
    report = build_report(tally, stats, launched.description, startup, time.perf_counter() - begun)
    if report_path is not None:
        write_report(report, report_path)
    if not quiet:
        print_report(report, sys.stderr)
    return tally.failed


def run_bench(
    *,
    input_len: int,
    output_len: int,
    num_prompts: int,
    seed: int,
    as_json: bool,
    engine_options: EngineOptions,
    started: float,
) -> None:
    """``rosebatch bench``."""
    sizes = {"input_len": input_len, "output_len": output_len, "num_prompts": num_prompts, "seed": seed}
    workload = _from_flags(sizes, Workload)
    options = _launch_options(engine_options)
    imported = time.perf_counter()
    launched = launch(options)
    tally, seconds = run_throughput(launched.engine, workload)
    startup = {"import": imported - started, "load": launched.load_seconds}
    report = build_report(tally, launched.engine.stats, launched.description, startup, seconds)
    report["workload"] = {name: getattr(workload, name) for name in workload.__struct_fields__}
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        print_report(report, sys.stdout)


def _launch_options(options: EngineOptions) -> LaunchOptions:
    limits = {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens or 0,
        "block_size": options.block_size,
        "kv_cache_memory": parse_size(options.kv_cache_memory) if options.kv_cache_memory else 0,
    }
    return LaunchOptions(
        model=options.model,
        load_format=options.load_format,
        device=options.device,
        dtype=options.dtype,
        limits=_from_flags(limits, EngineConfig),
        toggles=options.toggles,
    )


def _sampling_defaults(options: SamplingOptions, seed: int | None) -> dict[str, Any]:
    """The fields that were given, checked now: a bad flag is one error, not one a line."""
    given = {name: value for name, value in asdict(options).items() if value not in (None, [])}
    try:
        sampling_params(given if seed is None else {**given, "seed": seed})
    except RowError as error:
        raise FlagError(error.message) from None
    return given


def _from_flags(values: dict[str, Any], kind: type[ConfigT]) -> ConfigT:
    try:
        return kind(**values)
    except ValueError as error:
        raise FlagError(str(error)) from None
