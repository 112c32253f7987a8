"""Where a job's results go: its paths, checked against each other."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.io.files import is_table, is_url, require_writable_url
from rosebatch.io.reader import PromptReader
from rosebatch.job.config import JobConfig
from rosebatch.job.output_manifest import has_manifest, manifest_path, require_own_manifest
from rosebatch.job.paths import Used, require_apart, require_not_read, require_report
from rosebatch.job.shard import Shard
from rosebatch.job.target import Target


@dataclass(frozen=True, slots=True)
class Destination:
    """Where results and error rows go.

    Attributes:
        output: the results.
        errors: error rows of an OpenAI batch, or of any input with ``--errors``. None: among the results.
        always_split: whether ``--errors`` was given.
        to_table: whether the results become Parquet, Arrow or CSV.
    """

    output: Target
    errors: Target | None
    always_split: bool
    to_table: bool = False


def find_destination(
    job: JobConfig, reader: PromptReader, model: RunConfig | None = None, *, part: Path | None = None
) -> Destination:
    """Where the results of a job go, once all its paths are checked. Nothing is opened for writing yet.

    Args:
        job: names the files.
        reader: of the input.
        model: names files of the model that is to be loaded.
        part: the part file that an earlier try has left; None: as the job names it.

    Raises:
        FlagError: two paths of the job are one file, or flags exclude each other.
        UserError: a path cannot be written.
    """
    output = Target.of(job.output or "-")
    if job.rows_per_file is not None and output.kind != "folder":
        raise FlagError("--rows-per-file needs an output folder: -o FOLDER/")
    output.require_written_format("-o")
    to_table = output.kind == "folder" or (job.output is not None and is_table(job.output))
    errors = None if job.errors is None else Target.of(job.errors)
    if errors is not None:
        errors.require_written_format("--errors", tables=False)
    if output.kind == "stream":
        if job.resume or job.force_resume:
            raise FlagError("--resume needs an output file: -o FILE")
        if errors is not None and errors.kind != "stream":
            raise FlagError("--errors needs an output file: -o FILE")
        if to_table:
            raise FlagError(
                f"{output.name}: only JSONL can be written to a pipe or device; Parquet, Arrow and CSV need a file"
            )
    elif (job.resume or job.force_resume) and reader.source == "-":
        raise FlagError("--resume needs an input file: stdin cannot be compared with what the earlier run read")
    if to_table and errors is not None:
        raise FlagError(f"{output.path}: an OpenAI batch, or an output beside --errors, is written as JSONL")
    if errors is None and output.kind == "file" and not to_table and reader.may_be_batch:
        errors = Target.of(output.default_errors())
    if errors is not None and errors.kind == "folder":
        raise FlagError(f"--errors {errors.name}: is a folder, name a JSONL file")
    if errors is not None and is_url(errors.name):
        # Made beside the output, which no other run writes: in the working directory two runs would take one name.
        errors = replace(errors, path=output.path.with_name(f"{output.path.name}.{errors.path.name}"))
    part = part or output.part
    if job.shard is not None:
        if output.kind == "stream" or reader.source == "-":
            raise FlagError("--shard needs an input file and an output file: -o FILE")
        part = Shard.parse(job.shard).part(output.path)
    _require_apart(job, reader, model, output, errors, part)
    for target in (output, errors):
        if target is not None:
            target.require_replaceable(part)
            if is_url(target.name):
                require_writable_url(target.name)
    require_own_manifest(output)
    for report in job.report:
        require_report(report)
    return Destination(output, errors, job.errors is not None, to_table)


def _require_apart(
    job: JobConfig, reader: PromptReader, model: RunConfig | None, output: Target, errors: Target | None, part: Path
) -> None:
    """Check all paths that the run reads or writes against each other."""
    reads = [Used("the input", "/dev/stdin" if path == "-" else path) for path in reader.paths]
    reads += [Used("the file of settings", str(path)) for path in job.settings]
    if model is not None:
        reads += [Used("the model's file", str(path)) for path in _model_files(model)]
    writes = [*output.used("the output"), *(Used("the report", str(path)) for path in job.report)]
    if has_manifest(output):
        writes.append(Used("the manifest", str(manifest_path(output))))
    if output.kind != "stream":
        writes.append(Used("the part file", str(part)))
    if errors is not None:
        writes += errors.used("the file of errors")
    require_apart(reads, writes)
    # Results may lie in a folder of images: they are none.
    if reader.paths != [reader.source] and not (reader.columns.of_files and Path(reader.source).is_dir()):
        require_not_read(reader.source, writes)


def _model_files(model: RunConfig) -> Iterator[Path]:
    """The files that a model is read from, as far as they lie here."""
    for name in (model.model, model.tokenizer, model.chat_template):
        path = None if name is None else Path(name).expanduser()
        # What cannot be looked into is an error of the model, later.
        with suppress(OSError):
            if path is not None and path.exists():
                yield from path.iterdir() if path.is_dir() else (path,)
