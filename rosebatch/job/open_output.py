"""Opens the output of a job, or continues that of an earlier run."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rosebatch.core.errors import FlagError, UserError
from rosebatch.host.paths import open_stream
from rosebatch.io.csv_output import write_csv
from rosebatch.io.files import failing, file_name, is_table, is_url, remove_url, upload
from rosebatch.io.formats import named
from rosebatch.io.output import FileOutput, Output, ShardOutput, StreamOutput
from rosebatch.io.parquet import PART_NAME, Carried, Rows, write_parquet, write_parquet_parts
from rosebatch.io.parquet_types import columns_without_a_type
from rosebatch.io.part_file import PartFile
from rosebatch.io.placement import Placement, jsonl_writer, replace_file, replace_folder
from rosebatch.io.reader import PromptReader
from rosebatch.job.config import JobConfig
from rosebatch.job.destination import Destination
from rosebatch.job.manifest import differences, now
from rosebatch.job.output_manifest import keep
from rosebatch.job.shard import Shard
from rosebatch.job.target import Target

_ROWS_PER_FILE = 1_000_000


def open_output(
    job: JobConfig,
    destination: Destination,
    reader: PromptReader,
    manifest: Callable[[str | None], Callable[[], dict[str, Any]]],
    shard: Shard | None,
) -> Output:
    """Open the output, or continue that of an earlier run.

    Args:
        job: ``resume`` continues the part file, if there is one, ``force_resume`` even if it belongs to another run.
        destination: of the results.
        reader: of the input. A Parquet file keeps its columns.
        manifest: begins to make the run's manifest from the digest of its input, None for stdin.
        shard: the share of the rows that this run has; None for all.

    Raises:
        UserError: it cannot be written to, belongs to another run, or another process writes to it.
    """
    output = destination.output
    placement = placement_of(destination, reader, job.rows_per_file)
    if output.kind == "stream":
        errors = placement.errors
        assert not isinstance(errors, Path), "a stream has its errors in a stream"
        stream = _open_stream(output)
        return StreamOutput(stream, now(), errors, partial(_close, stream, errors))
    digest = None if reader.source == "-" else reader.digest()
    path = output.part if shard is None else shard.part(output.path)
    part = _part_file(path, manifest(digest), job, reader)
    if shard is not None:
        return ShardOutput(part, placement)

    return FileOutput(part, placement, lambda: keep(output, errors_of(destination, reader), [part], job.rows_per_file))


def errors_of(destination: Destination, reader: PromptReader) -> Target | None:
    """Where error rows go; None if they are among the others."""
    return destination.errors if destination.always_split or reader.is_batch else None


def placement_of(destination: Destination, reader: PromptReader, rows_per_file: int | None) -> Placement:
    """How the results of a job appear; a stream of errors is opened.

    Args:
        destination, reader: as of ``open_output``.
        rows_per_file: most rows in each file of a folder; None: a million.

    Raises:
        FlagError: the format has no type for some columns of the input.
        UserError: the stream of errors cannot be written to.
    """
    output, errors = destination.output, errors_of(destination, reader)
    path, to_folder = output.path, output.kind == "folder"
    to_table = to_folder or is_table(output.name)
    if to_table and reader.is_batch:
        raise FlagError(f"{path}: an OpenAI batch, or an output beside --errors, is written as JSONL")
    error_stream = _open_stream(errors) if errors is not None and errors.kind == "stream" else None
    urls = {each.path: each.name for each in (output, errors) if each is not None and is_url(each.name)}

    def place(whole: Path, at: Path) -> None:
        if at in urls:
            (_upload_folder if to_folder else upload)(whole, urls[at])
        else:
            (replace_folder if to_folder else replace_file)(whole, at)

    def remove(at: Path) -> None:
        if at in urls:
            remove_url(urls[at])
        else:
            at.unlink(missing_ok=True)

    if not to_table:
        split = error_stream or (None if errors is None else errors.path)
        return Placement(path, jsonl_writer(path.name), errors=split, place=place, remove=remove)
    schema = reader.schema
    carried = None if schema is None else Carried(schema, reader.carried)
    column = reader.result_column
    if not to_folder and named(path.name).kind == "csv":
        own = reader.task.result_fields if column is None else (column,)
        columns = () if schema is None else schema.names
        return Placement(path, partial(write_csv, name=path.name, own=own, columns=columns), place=place)
    writer = pq.ParquetWriter if to_folder or named(path.name).kind != "arrow" else pa.ipc.new_file
    if carried is not None and (refused := columns_without_a_type(carried.columns, writer)):
        columns = ", ".join(f"{name} ({carried.columns.field(name).type})" for name in refused)
        raise FlagError(f"{path}: its format has no type for {columns}: leave them out with --columns")
    types = reader.task.types()
    write: Callable[[Path, Rows], None] = partial(
        write_parquet, types=types, carried=carried, result_column=column, writer=writer
    )
    if to_folder:
        limit = rows_per_file or _ROWS_PER_FILE
        write = partial(write_parquet_parts, rows_per_file=limit, types=types, carried=carried, result_column=column)
    kept = None if carried is None else reader.task.result_fields if column is None else (column,)
    return Placement(path, write, kept, place=place)


def _upload_folder(folder: Path, url: str) -> None:
    """Move the files of a folder to a URL one by one. Until the last one arrives, it holds new and old files.

    Raises:
        OSError: a file cannot be written there, or an old one cannot be deleted.
    """
    from fsspec.core import url_to_fs

    names = {path.name for path in folder.iterdir()}
    for name in sorted(names):
        upload(folder / name, url + name)
    # Parts of a longer, older output: a reader would take them for the end of this one.
    with failing(OSError):
        file_system, inside = url_to_fs(url)
        for path in file_system.ls(inside, detail=False):
            if PART_NAME.fullmatch(file_name(path)) and file_name(path) not in names:
                file_system.rm_file(path)


def _open_stream(target: Target) -> IO[bytes]:
    try:
        return sys.stdout.buffer if target.name == "-" else open_stream(target.path, "wb")
    except OSError as error:
        raise UserError(f"{target.name}: {error.strerror}") from None


def _close(*streams: IO[bytes] | None) -> None:
    for stream in streams:
        if stream is not None and stream is not sys.stdout.buffer:
            # What could not be written was an error before.
            with suppress(OSError):
                stream.close()


def _part_file(path: Path, manifest: Callable[[], dict[str, Any]], job: JobConfig, reader: PromptReader) -> PartFile:
    """A new part file, or that of an earlier run."""
    part = PartFile.reopen(path) if job.resume or job.force_resume else None
    if part is None:
        return PartFile.create(path, manifest)
    try:
        own = manifest()
        if found := differences(part.manifest, own):
            if not job.force_resume:
                way_out = "Give what it had, or --force-resume to go on all the same; to start again, delete the file"
                raise FlagError(f"{path} is of another run: {'; '.join(found)}. {way_out}")
            part.go_on(own)
        if part.mixed:
            # The input of an earlier run may have been longer.
            part.leave_out(max((row.number + 1 for group in reader.records() for row in group), default=0))
    except BaseException:
        part.close()
        raise
    if part.num_damaged:
        lines = f"{part.num_damaged} damaged lines are" if part.num_damaged > 1 else "1 damaged line is"
        sys.stderr.write(f"rosebatch: warning: {path}: {lines} ignored; rows without a result are computed again\n")
    return part
