"""Where a run's results go: to stdout, or through a part file to a file or folder."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rosebatch.errors import FlagError
from rosebatch.io.files import file_name, is_parquet, is_url, upload
from rosebatch.io.output import (
    FileOutput,
    Output,
    StreamOutput,
    aside,
    beside,
    replace_folder,
    require_parts,
    write_jsonl,
)
from rosebatch.io.parquet import PART_NAME, Carried, Rows, write_parquet, write_parquet_parts
from rosebatch.io.part_file import PartFile
from rosebatch.io.reader import PromptReader
from rosebatch.io.result_names import RESULT_FIELDS
from rosebatch.job.manifest import differences, now

_ROWS_PER_FILE = 1_000_000


def open_output(
    target: str | None,
    reader: PromptReader,
    manifest: Callable[[str | None], dict[str, Any]],
    *,
    resume: bool,
    force: bool,
    errors: str | None = None,
    rows_per_file: int | None = None,
) -> Output:
    """The output of ``-o``.

    Args:
        target: path or URL, Parquet if it ends in ``.parquet`` or ``.pq``; None or ``-`` for stdout. A folder of
            Parquet files if it ends in ``/`` or is an existing folder.
        reader: of the input. A Parquet file keeps its columns.
        manifest: makes the run's manifest from the digest of its input, None for stdin.
        resume: continue the part file, if there is one.
        force: even if it belongs to another run.
        errors: path or URL for error rows. Those of an OpenAI batch always have their own file.
        rows_per_file: most rows in each file of a folder.

    Raises:
        UserError: it cannot be written to, belongs to another run, or another process writes to it.
    """
    to_folder = target is not None and _is_folder(target)
    if rows_per_file is not None and not to_folder:
        raise FlagError("--rows-per-file needs an output folder: -o FOLDER/")
    if target is None or target == "-":
        if resume:
            raise FlagError("--resume needs an output file: -o FILE")
        if errors is not None:
            raise FlagError("--errors needs an output file: -o FILE")
        return StreamOutput(sys.stdout.buffer, now())
    if resume and reader.source == "-":
        raise FlagError("--resume needs an input file: stdin cannot be compared with what the earlier run read")
    path = _local(target)
    if path.name in ("", ".."):
        raise FlagError(f"{target}: has no name of its own, name a file or a folder for the results")
    if to_folder:
        # Replace the folder, not a link to it.
        path = path.resolve() if path.is_symlink() else path
        _require_replaceable(target, path)
    to_parquet = to_folder or is_parquet(target)
    if to_parquet and (reader.is_batch or errors is not None):
        raise FlagError(f"{path}: an OpenAI batch, or an output beside --errors, is written as JSONL")
    split = reader.is_batch or errors is not None
    errors_target = errors or _beside(target, f"{path.stem}.errors.jsonl")
    errors_path = _local(errors_target)
    if split and errors_path == path:
        raise FlagError(f"--errors {errors}: is the output file itself")
    urls = {at: each for at, each in ((path, target), (errors_path, errors_target)) if is_url(each)}

    def place(whole: Path, at: Path) -> None:
        if at in urls:
            (_upload_folder if to_folder else upload)(whole, urls[at])
        elif to_folder:
            replace_folder(whole, at)
        else:
            whole.replace(at)

    digest = None if reader.source == "-" else reader.digest()
    part = _part_file(path.with_name(path.name + ".part"), manifest(digest), resume=resume, force=force)
    if not to_parquet:
        return FileOutput(part, path, write_jsonl, errors=errors_path if split else None, place=place)
    carried = None if reader.columns is None else Carried(reader.columns, reader.carried)
    column = reader.result_column
    write: Callable[[Path, Rows], None] = partial(write_parquet, carried=carried, result_column=column)
    if to_folder:
        most = rows_per_file or _ROWS_PER_FILE
        write = partial(write_parquet_parts, rows_per_file=most, carried=carried, result_column=column)
    kept = None if carried is None else RESULT_FIELDS if column is None else (column,)
    return FileOutput(part, path, write, kept, place=place)


def _is_folder(target: str) -> bool:
    """Whether the target is a folder; a URL has to say so by its slash."""
    return not file_name(target) or (not is_url(target) and Path(target).is_dir())


def _local(target: str) -> Path:
    """Where a file or folder is made: for a URL, in the working directory."""
    return Path(file_name(target) or Path(target.partition("://")[2]).name) if is_url(target) else Path(target)


def _require_replaceable(target: str, path: Path) -> None:
    """Check that a folder can be written at the end of the run, and that only parts are lost then.

    What a URL holds is not looked at: only parts are written or deleted there.

    Args:
        target: path or URL.
        path: where the folder is made.

    Raises:
        FlagError: it cannot.
    """
    if target.startswith(("http://", "https://")):
        raise FlagError(f"{target}: HTTP knows no folders, name a file for the results")
    if is_url(target):
        require_parts(beside(path))
        return
    if path.is_mount():
        raise FlagError(f"{target}: something is mounted there, name a folder in it for the results")
    for each in (path, beside(path), aside(path)):
        require_parts(each)


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
    file_system, inside = url_to_fs(url)
    for path in file_system.ls(inside, detail=False):
        if PART_NAME.fullmatch(file_name(path)) and file_name(path) not in names:
            file_system.rm_file(path)


def _beside(target: str, name: str) -> str:
    """A file in the same folder. A URL with a query is signed for one file, so its neighbour is made here."""
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
