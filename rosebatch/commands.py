"""What the commands do, once their flags are parsed."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from rosebatch.bench.against import choose_peers
from rosebatch.bench.case import Case
from rosebatch.bench.compare import chosen_switches
from rosebatch.bench.scenario import Chosen, Sampling, Scenario, adapt, configs_dir, load_scenarios, load_suite
from rosebatch.bench.session import run_session, summarize
from rosebatch.bench.tables import print_results
from rosebatch.cli.bench_options import BenchEngineOptions, BenchOptions
from rosebatch.cli.interrupts import InterruptionError, Interrupts
from rosebatch.cli.options import EngineOptions, SamplingOptions
from rosebatch.config import ConfigT, EngineConfig, parse_size
from rosebatch.engine.load import choose_block_size, pick_device
from rosebatch.engine.roofline import measure_host_rates, measure_rates
from rosebatch.errors import FlagError, RowError, UserError
from rosebatch.io.fields import sampling_params
from rosebatch.io.openai_batch import BatchShape
from rosebatch.io.reader import InputFormat, PromptReader
from rosebatch.io.results import PlainShape
from rosebatch.job.check import Checked, check_rows, summary
from rosebatch.job.destination import open_output
from rosebatch.job.manifest import build_manifest
from rosebatch.job.run import run_job
from rosebatch.launch import LaunchOptions, LaunchPlan, carry_out, plan_launch
from rosebatch.model.source import find_model
from rosebatch.report.build import build_report, write_report
from rosebatch.report.progress import Progress
from rosebatch.report.table import print_report, print_table
from rosebatch.text.grammar import check_grammar
from rosebatch.text.tokenizer import Tokenizer

# Of a bench without --suite and --scenario.
_AD_HOC = Scenario(num_prompts=32, input_len=512, output_len=128)


def run_generate(
    *,
    source: str,
    input_format: InputFormat,
    output: str | None,
    errors: str | None,
    rows_per_file: int | None,
    resume: bool,
    force_resume: bool,
    strict: bool,
    seed: int | None,
    return_token_ids: bool,
    report_paths: Sequence[Path],
    quiet: bool,
    engine_options: EngineOptions,
    sampling_options: SamplingOptions,
    started: float,
) -> int:
    """``rosebatch generate``: the number of rows that failed, those of the run that is resumed included."""
    options = _launch_options(engine_options)
    defaults = _sampling_defaults(sampling_options, seed)
    reader = PromptReader(source, defaults, input_format)
    imported = time.perf_counter()
    plan = plan_launch(options)
    if strict:
        _require_all_good(reader, plan)

    def manifest(input_digest: str | None) -> dict[str, Any]:
        return build_manifest(
            plan,
            input_digest,
            input_format="openai" if reader.is_batch else "parquet" if reader.is_parquet else "jsonl",
            sampling=defaults,
            seed=seed,
            return_token_ids=return_token_ids,
        )

    resume = resume or force_resume
    results = open_output(
        output, reader, manifest, resume=resume, force=force_resume, errors=errors, rows_per_file=rows_per_file
    )
    resumed = results.num_rows
    interrupts = Interrupts()
    try:
        launched = carry_out(plan)
        begun = time.perf_counter()
        total = None if quiet else reader.count()
        with interrupts.listen(), Progress(total, resumed=resumed, enabled=not quiet) as progress:
            tally = run_job(
                launched.engine,
                launched.tokenizer,
                reader.rows(interrupts.check),
                results,
                progress=progress,
                shape=BatchShape(plan.source.name, results.created) if reader.is_batch else PlainShape(),
                seed=seed,
                return_token_ids=return_token_ids,
                check=interrupts.check,
            )
    except InterruptionError as interrupted:
        results.flush()
        raise InterruptionError(interrupted.number, results.kept) from None
    finally:
        results.close()
    stats = launched.engine.stats
    startup = {"import": imported - started, "load": launched.load_seconds}
    if stats.first_token_time is not None:
        startup["first token"] = stats.first_token_time - begun
    report = build_report(tally, stats, launched.description, startup, time.perf_counter() - begun, resumed)
    for path in report_paths:
        write_report(report, path)
    if not quiet:
        print_report(report, sys.stderr)
    return results.num_failed


def _require_all_good(reader: PromptReader, plan: LaunchPlan) -> None:
    if reader.source == "-":
        raise FlagError("--strict needs an input file: stdin can be read once only")
    bad = _check(reader, plan, sys.stderr).errors.total()
    if bad:
        raise FlagError(f"{reader.source}: {bad} rows cannot be served, and --strict was given: nothing was run")


def run_check(
    *,
    source: str,
    input_format: InputFormat,
    engine_options: EngineOptions,
    sampling_options: SamplingOptions,
) -> int:
    """``rosebatch check``: the number of rows that cannot be served."""
    plan = plan_launch(_launch_options(engine_options))
    checked = _check(PromptReader(source, _sampling_defaults(sampling_options, None), input_format), plan, sys.stdout)
    rates = measure_rates(plan.device.type) or measure_host_rates(plan.source.dtype)
    rows = summary(checked, plan, choose_block_size(plan.options.limits, plan.device), rates)
    print_table(f"{source}: {plan.source.name}, {plan.device.type}", rows, sys.stdout)
    return checked.errors.total()


def _check(reader: PromptReader, plan: LaunchPlan, stream: TextIO) -> Checked:
    """All rows, with a line on the stream for each that cannot be served."""
    config, folder = plan.source.config, plan.source.folder
    return check_rows(
        reader,
        None if folder is None else Tokenizer.load(folder),
        config.vocab_size,
        config.max_model_len,
        config.eos_token_ids,
        lambda row: stream.write(f"{row.where}: {row.error.code}: {row.error.message}\n"),
    )


def run_bench(bench: BenchOptions, engine_options: BenchEngineOptions, *, started: float) -> None:
    """``rosebatch bench``.

    Raises:
        UserError: also after everything was printed, where a peer failed.
    """
    imported = time.perf_counter()
    cases = _cases(bench, engine_options)
    results = run_session(
        cases,
        repeats=bench.repeats,
        switches=chosen_switches(bench.compare or [], cases[0].device),
        peers=choose_peers(bench.against or [], bench.peer_args or [], bench.peer_python or [], bench.peer_path or []),
        import_seconds=imported - started,
    )
    if bench.as_json:
        entries = list(results)
        sys.stdout.write(json.dumps({"results": entries, "geometric_means": summarize(entries)}) + "\n")
    else:
        entries = print_results(results, cases, sys.stdout)
    errors = dict.fromkeys(entry["error"] for entry in entries if "error" in entry)
    if errors:
        raise UserError("; ".join(errors))


def _cases(bench: BenchOptions, engine: BenchEngineOptions) -> list[Case]:
    """The scenarios that were asked for, with the flags that were given in place of what they say.

    No scenario comes twice with the same model: ``--model`` leaves one of a suite's models.
    """
    limits = {"max_num_seqs": engine.max_num_seqs, "kv_cache_memory": engine.kv_cache_memory}
    flags = {**asdict(bench), **limits, "prefix_cache": engine.toggles["prefix_cache"]}
    names = {*Scenario.__struct_fields__, *Sampling.__struct_fields__}
    given = {name: value for name, value in flags.items() if name in names and value is not None}
    if engine.dtype != "auto":
        given["dtype"] = engine.dtype
    chosen = load_suite(bench.suite) if bench.suite is not None else []
    chosen += load_scenarios(bench.scenario or [])
    cases: dict[tuple[str, str], Case] = {}
    try:
        for each in chosen or [Chosen("ad-hoc", _AD_HOC)]:
            case = _case(replace(each, scenario=adapt(each.scenario, given)), engine)
            cases.setdefault((case.name, case.source.name), case)
    except ValueError as error:
        raise FlagError(str(error)) from None
    return list(cases.values())


def _case(chosen: Chosen, engine: BenchEngineOptions) -> Case:
    scenario, model, load_format = chosen.scenario, engine.model, engine.load_format
    if model is None and scenario.model is not None:
        model, load_format = str(configs_dir() / "models" / f"{scenario.model}.toml"), "dummy"
    options = replace(
        engine,
        model=model,
        load_format=load_format,
        dtype=scenario.dtype,
        max_num_seqs=scenario.max_num_seqs,
        kv_cache_memory=scenario.kv_cache_memory,
        toggles={**engine.toggles, "prefix_cache": scenario.prefix_cache},
    )
    device = pick_device(options.device)
    source = find_model(options.model, options.load_format, options.dtype, device)
    return Case(chosen.name, scenario, _launch_options(options), source, device.type, chosen.attribution)


def _launch_options(options: EngineOptions) -> LaunchOptions:
    limits = {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens or 0,
        "block_size": options.block_size or 0,
        "kv_cache_memory": parse_size(options.kv_cache_memory) if options.kv_cache_memory else 0,
    }
    return LaunchOptions(
        model=options.model,
        load_format=options.load_format,
        device=options.device,
        dtype=options.dtype,
        sampler=options.sampler,
        limits=_from_flags(limits, EngineConfig),
        toggles=options.toggles,
    )


def _sampling_defaults(options: SamplingOptions, seed: int | None) -> dict[str, Any]:
    """The fields that were given, checked now: a bad flag is one error, not one a line."""
    given = {name: value for name, value in asdict(options).items() if value not in (None, [])}
    structured = {"regex": given.pop("regex")} if "regex" in given else {}
    if "json_schema" in given:
        structured["json"] = _read(given.pop("json_schema"))
    if structured:
        given["structured_outputs"] = structured
    try:
        params = sampling_params(given if seed is None else {**given, "seed": seed})
        if params.grammar is not None:
            check_grammar(params.grammar)
    except RowError as error:
        raise FlagError(error.message) from None
    return given


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise FlagError(f"--json-schema {path}: unreadable ({error})") from None


def _from_flags(values: dict[str, Any], kind: type[ConfigT]) -> ConfigT:
    try:
        return kind(**values)
    except ValueError as error:
        raise FlagError(str(error)) from None
