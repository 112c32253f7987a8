"""Where a run's results go: to stdout, or to a file by way of a part file, its own or that of the run it resumes."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rosebatch.errors import FlagError
from rosebatch.io.files import file_name, is_parquet, is_url, upload
from rosebatch.io.output import FileOutput, Output, Rows, StreamOutput, write_jsonl
from rosebatch.io.parquet import write_parquet
from rosebatch.io.part_file import PartFile
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import RESULT_FIELDS
from rosebatch.manifest import differences, now


def open_output(
    target: str | None,
    reader: PromptReader,
    manifest: Callable[[str | None], dict[str, Any]],
    *,
    resume: bool,
    force: bool,
    token_ids: bool,
    errors: str | None = None,
) -> Output:
    """The output of ``-o``.

    Args:
        target: a path or URL, Parquet if it ends in ``.parquet`` or ``.pq``; None or ``-`` for stdout.
        reader: of the input, whose columns a Parquet file takes over.
        manifest: of the run, from the digest of its input, None for stdin.
        resume: go on with the part file, where there is one.
        force: though it is of another run.
        token_ids: whether rows have ``token_ids``.
        errors: a path or URL for error rows; of an OpenAI batch they always have a file of their own.

    Raises:
        UserError: it cannot be written to, is of another run, or another process writes to it.
    """
    if target is None or target == "-":
        if resume:
            raise FlagError("--resume needs an output file: -o FILE")
        if errors is not None:
            raise FlagError("--errors needs an output file: -o FILE")
        return StreamOutput(sys.stdout.buffer, now())
    if resume and reader.source == "-":
        raise FlagError("--resume needs an input file: stdin cannot be compared with what the earlier run read")
    path = _local(target)
    if not path.name or (path.is_dir() and not is_url(target)):
        raise FlagError(f"{target}: is a folder, name a file for the results")
    to_parquet = is_parquet(target)
    if to_parquet and (reader.is_batch or errors is not None):
        raise FlagError(f"{path}: an OpenAI batch, or an output beside --errors, is written as JSONL")
    split = reader.is_batch or errors is not None
    errors_target = errors or _beside(target, f"{path.stem}.errors.jsonl")
    errors_path = _local(errors_target)
    if split and errors_path == path:
        raise FlagError(f"--errors {errors}: is the output file itself")
    urls = {_local(each): each for each in (target, errors_target) if is_url(each)}

    def place(whole: Path, at: Path) -> None:
        if at in urls:
            upload(whole, urls[at])
        else:
            whole.replace(at)

    digest = None if reader.source == "-" else reader.digest()
    part = _part_file(path.with_name(path.name + ".part"), manifest(digest), resume=resume, force=force)
    if not to_parquet:
        return FileOutput(part, path, write_jsonl, errors=errors_path if split else None, place=place)

    def write(path: Path, rows: Rows) -> None:
        write_parquet(path, lambda: _with_columns(reader, rows), token_ids=token_ids, columns=reader.columns)

    return FileOutput(part, path, write, None if reader.columns is None else RESULT_FIELDS, place=place)


def _local(target: str) -> Path:
    """Where a file is made: for one elsewhere, in the working directory."""
    return Path(file_name(target)) if is_url(target) else Path(target)


def _beside(target: str, name: str) -> str:
    """A file in the same folder; a query signs one file alone, so beside such a URL there is only here."""
    if is_url(target) and "?" not in target:
        return f"{target.rpartition('/')[0]}/{name}"
    return name if is_url(target) else str(Path(target).with_name(name))


def _part_file(path: Path, manifest: dict[str, Any], *, resume: bool, force: bool) -> PartFile:
    part = PartFile.reopen(path) if resume else None
    if part is None:
        return PartFile.create(path, manifest)
    found = differences(part.manifest, manifest)
    if found and not force:
        part.close()
        what = "; ".join(found)
        raise FlagError(f"{path} is of another run: {what}. --force-resume goes on with it all the same")
    return part


def _with_columns(reader: PromptReader, rows: Rows) -> Iterator[dict[str, Any]]:
    """Decoded rows; the columns of a Parquet input from there, since JSON knows neither dates nor decimals."""
    results = map(msgspec.json.decode, rows())
    if reader.columns is None:
        return results
    return ({**carried, **result} for carried, result in zip(reader.carried(), results, strict=True))
