"""The library's way to run a whole job: parameters in place of flags."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rosebatch.config.run import InputFormat, RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.core.pooling_params import EncodingFormat, PoolingParams
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.host.openmp import wait_passively
from rosebatch.io.fields import SAMPLING_FIELDS
from rosebatch.io.sampling_fields import fields_of
from rosebatch.io.tasks.classify import Classify
from rosebatch.io.tasks.embed import Embed
from rosebatch.io.tasks.generate import GENERATE
from rosebatch.io.tasks.score import Score
from rosebatch.io.tasks.task import Task
from rosebatch.job.config import JobConfig
from rosebatch.job.run import JobResult as JobResult
from rosebatch.job.run import run_job
from rosebatch.job.service import Loaded
from rosebatch.llm.vllm_names import own_names


def run_file(
    input: str | Path,
    output: str | Path | None = None,
    *,
    model: str | Path | Loaded | None = None,
    sampling: Mapping[str, Any] | SamplingParams | None = None,
    input_format: InputFormat = "auto",
    errors: str | Path | None = None,
    rows_per_file: int | None = None,
    result_column: str | None = None,
    echo_model: bool = False,
    prompt_column: str | None = None,
    id_column: str | None = None,
    columns: str | Sequence[str] | None = None,
    prompt_template: str | None = None,
    reorder_fields: bool = False,
    system_prompt: str | None = None,
    keep_prompt: bool = False,
    max_row_bytes: str | int = "32MiB",
    media_root: str | Path | None = None,
    media_domains: str | Sequence[str] | None = None,
    return_token_ids: bool = False,
    resume: bool = False,
    force_resume: bool = False,
    strict: bool = False,
    shard: str | None = None,
    report: str | Path | Sequence[str | Path] = (),
    seed: int | None = None,
    quiet: bool = True,
    task: Literal["generate", "score", "classify"] = "generate",
    pooling: PoolingParams | None = None,
    encoding_format: EncodingFormat = "float",
    **engine: Any,
) -> JobResult:
    """Generate a completion for every prompt of a file, as ``rosebatch generate`` does; or embed or score it.

    ::

        run_file("prompts.jsonl", "answers.jsonl", model="Qwen/Qwen3-0.6B", resume=True)

    Args:
        input: path, URL, folder or glob of JSON, OpenAI batch, CSV, Parquet or Arrow files; ``-`` for stdin.
        output: JSONL or CSV, compressed if it ends in ``.gz``, ``.zst``, ``.bz2`` or ``.xz``; Parquet or Arrow file,
            or a folder of Parquet files (ends in ``/``); None for JSONL on stdout.
        model: hub id or path; or a ``rosebatch.LLM``, which stays loaded.
        sampling: fields for rows that lack them; of ``SamplingParams``, those that differ from their defaults.
        input_format: ``auto`` goes by the extension, and recognises an OpenAI batch by its first line.
        errors: JSONL file for rows that fail.
        rows_per_file: most rows in each file of an output folder.
        result_column: put the fields of each result into one of this name, next to the carried ones.
        echo_model: answers of an OpenAI batch name the model of their request.
        prompt_column, id_column: columns or fields of prompts and ids, where they have other names.
        columns: those that results keep, as names or as one text with commas; None for all.
        prompt_template: makes prompts of columns or fields, such as ``"Summarize: {article}"``.
        reorder_fields: labelled lines of the template, such as ``Color: {color}``, with the fewest distinct values
            go first: rows share more of their prompts, which are others than without.
        system_prompt: the system message of chats that have none; prompts that are texts become chats.
        keep_prompt: results keep the prompt, also one that was made.
        max_row_bytes: a larger row fails before it is parsed.
        media_root: rows may name images below this folder.
        media_domains: rows may name images of these hosts, as names or as one text with commas.
        return_token_ids: add ``token_ids`` to the results.
        resume: continue the run that left ``OUTPUT.part``; start if there is none, unless the output is finished.
        force_resume: continue it even if input, model or settings have changed.
        strict: check the whole file first; run nothing if any row cannot be served.
        shard: serve a share of the rows, such as ``1/8``; see ``rosebatch merge``.
        report: files for the report: a page for ``.html``, else JSON.
        seed: base seed. A row's result no longer depends on its line number.
        quiet: no progress and no report on stderr.
        task: ``score`` and ``classify`` do what these commands do.
        pooling, encoding_format: embed the prompts, as ``rosebatch embed`` does; None completes them.
        engine: as of ``rosebatch.LLM``; only for a model that is not loaded yet.

    Raises:
        UserError: the job is impossible; nothing was written to ``output``.
        ValueError: a parameter is impossible, alone or with the others.
    """
    wait_passively()
    if of_rows := SAMPLING_FIELDS.intersection(engine):
        raise ValueError(f"{min(of_rows)} is a setting of rows: give sampling={{{min(of_rows)!r}: …}}")
    job = JobConfig(
        input=_one_path(input),
        input_format=input_format,
        output=None if output is None else str(output),
        errors=None if errors is None else str(errors),
        rows_per_file=rows_per_file,
        result_column=result_column,
        echo_model=echo_model,
        prompt_column=prompt_column,
        id_column=id_column,
        columns=_joined("columns", columns),
        prompt_template=prompt_template,
        reorder_fields=reorder_fields,
        system_prompt=system_prompt,
        keep_prompt=keep_prompt,
        max_row_bytes=max_row_bytes,
        media_root=None if media_root is None else str(media_root),
        media_domains=_joined("media_domains", media_domains),
        return_token_ids=return_token_ids,
        resume=resume,
        force_resume=force_resume,
        strict=strict,
        shard=shard,
        report=tuple(map(Path, [report] if isinstance(report, str | Path) else report)),
        seed=seed,
        quiet=quiet,
        sampling=fields_of(sampling) if isinstance(sampling, SamplingParams) else dict(sampling or {}),
        task=_task(task, pooling, encoding_format),
    )
    return run_job(job, _model(model, engine))


def _task(name: str, pooling: PoolingParams | None, encoding_format: EncodingFormat) -> Task:
    tasks = {task.name: task for task in (GENERATE, Score(), Classify())}
    if name not in tasks:
        raise FlagError(f"task must be one of {', '.join(tasks)}, got {name!r}; with pooling, prompts are embedded")
    if pooling is None:
        return tasks[name]
    if name != GENERATE.name:
        raise FlagError(f"pooling embeds prompts: leave it out of task={name!r}")
    pooling.require_vector()
    return Embed(pooling, encoding_format)


def _one_path(input: str | Path) -> str:
    if not isinstance(input, str | Path):
        kind = type(input).__name__
        raise FlagError(f"input must be one path: of a file, a folder, or a glob such as 'data/*.jsonl'; got {kind}")
    return str(input)


def _joined(parameter: str, names: str | Sequence[str] | None) -> str | None:
    if names is None or isinstance(names, str):
        return names
    if any("," in name for name in names):
        raise FlagError(f"{parameter}: a name with a comma cannot be chosen")
    return ",".join(names)


def _model(model: str | Path | Loaded | None, engine: dict[str, Any]) -> RunConfig | Loaded:
    """The model that is loaded, or how to load one."""
    path = None if model is None or isinstance(model, Loaded) else str(model)
    config = RunConfig.of(path, inspect.signature(run_file).parameters, **own_names(engine))
    if not isinstance(model, Loaded):
        return config
    if engine:
        raise ValueError(f"{', '.join(engine)}: the model is loaded already, with settings of its own")
    return model
