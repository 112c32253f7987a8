"""``rosebatch merge``: the results of all shards of a job as its output."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rosebatch.core.errors import FlagError, UserError
from rosebatch.io.columns import Columns
from rosebatch.io.merged_parts import MergedParts
from rosebatch.io.part_file import PartFile
from rosebatch.io.reader import PromptReader
from rosebatch.io.tasks.registry import described_by
from rosebatch.job.config import JobConfig
from rosebatch.job.destination import find_destination
from rosebatch.job.manifest import differences
from rosebatch.job.merge_note import delete_merged, mark_merged
from rosebatch.job.open_output import errors_of, placement_of
from rosebatch.job.output_manifest import keep, manifest_path, merged_before
from rosebatch.job.shard import Shard, find_parts
from rosebatch.job.target import Target

# Missing shards or rows that a message names.
_MAX_NAMED = 8
# Where the disk is full: the shards stay.
_WAY_OUT = "repeat the merge"
_OF_A_SHARD = {"shard", "created"}


def merge_shards(job: JobConfig) -> tuple[int, int]:
    """Write the output of a job whose shards have all run; returns its rows, and those of them that failed.

    The part files of the shards are deleted at the end. A merge that was killed, wherever, can be repeated.

    Args:
        job: names input and output; the shards have the rest.

    Raises:
        UserError: a shard is missing or incomplete, they are of different runs, or the input has changed; a
            FailedRunError if the output cannot be written.
    """
    target = Target.of(job.output or "-")
    done = delete_merged(target.path)
    found = find_parts(target.path)
    if done is not None and not found:
        return done
    if not found and (before := merged_before(target, partial(_digest, job.input, target))) is not None:
        sys.stderr.write(f"rosebatch: {job.output} is already merged, nothing to do\n")
        return before.rows, before.failed
    _require_all(target.path, found)
    shards = sorted(found, key=lambda shard: shard.number)
    parts: list[PartFile] = []
    try:
        for shard in shards:
            part = PartFile.reopen(found[shard])
            if part is None:
                raise UserError(f"{found[shard]}: its run has not begun")
            parts.append(part)
        for part in parts:
            _require_alike(parts[0], part)
        reader = _open_input(job.input, parts[0].manifest, parts[0].path)
        if reader.digest() != parts[0].manifest["input"]:
            raise UserError(f"{job.input}: is not the input of the shards, or has changed since")
        total = sum(map(len, reader.records()))
        for shard, part in zip(shards, parts, strict=True):
            if part.mixed:
                part.leave_out(total)
            _require_complete(shard, part, total)
        merged = MergedParts(parts)
        destination = find_destination(job, reader, part=parts[0].path)
        placement_of(destination, reader, job.rows_per_file).appear(merged, f"; {_WAY_OUT}")
        keep(target, errors_of(destination, reader), parts, job.rows_per_file, _WAY_OUT)
        mark_merged(target.path, merged.num_rows, merged.num_failed, found.values())
        delete_merged(target.path)
        return merged.num_rows, merged.num_failed
    finally:
        for part in parts:
            part.close()


def _digest(source: str, output: Target, run: Mapping[str, Any]) -> str:
    return _open_input(source, run, manifest_path(output)).digest()


def _open_input(source: str, run: Mapping[str, Any], where: Path) -> PromptReader:
    """The input, read as a run with this manifest did; ``where`` has it."""
    try:
        columns = Columns.of(**run["columns"])
        form, column, limit = run["input_format"], run["result_column"], run["max_row_bytes"]
    except (KeyError, TypeError):
        raise UserError(f"{where}: another version of rosebatch wrote it; merge with that version") from None
    return PromptReader(source, {}, form, column, columns, described_by(run), limit)


def _require_all(path: Path, found: dict[Shard, Path]) -> None:
    if not found:
        raise FlagError(f"{path}: has no shards beside it, files such as {Shard(1, 8).part(path).name}")
    counts = sorted({shard.count for shard in found})
    if len(counts) > 1:
        raise UserError(f"{path}: has shards of different runs: of {' and of '.join(map(str, counts))}")
    missing = sorted(set(range(1, counts[0] + 1)) - {shard.number for shard in found})
    if missing:
        raise UserError(f"{path}: {_missing('shard', missing, f' of {counts[0]}')}")


def _require_alike(first: PartFile, part: PartFile) -> None:
    before, now = (
        {name: value for name, value in each.manifest.items() if name not in _OF_A_SHARD} for each in (first, part)
    )
    if found := differences(before, now):
        raise UserError(f"{part.path} and {first.path} are of different runs: {'; '.join(found)}")


def _require_complete(shard: Shard, part: PartFile, total: int) -> None:
    if missing := [index + 1 for index in shard.rows(total) if index not in part]:
        raise UserError(f"{part.path}: {_missing('row', missing)}; run shard {shard} again with --resume")


def _missing(what: str, numbers: list[int], of: str = "") -> str:
    """``rows 3, 5 are missing``."""
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    names = ", ".join(map(str, numbers[:_MAX_NAMED])) + more
    return f"{what} {names}{of} is missing" if len(numbers) == 1 else f"{what}s {names}{of} are missing"
