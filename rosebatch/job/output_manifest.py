"""``.OUTPUT.run``, a hidden file beside a finished output, describes its run: nobody computes it again."""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from rosebatch.core.errors import FlagError
from rosebatch.core.words import counted
from rosebatch.io.failed_write import writing
from rosebatch.io.files import digest, is_url
from rosebatch.io.part_file import PartFile
from rosebatch.io.placement import write_whole
from rosebatch.job.manifest import differences
from rosebatch.job.target import Target


class OutputManifest(msgspec.Struct, kw_only=True, frozen=True, tag_field="rosebatch", tag="finished output"):
    """A finished output.

    Attributes:
        rows: results in it.
        failed: error rows among them.
        output: SHA-256 of the output, see ``rosebatch.io.files.digest``.
        errors: of the file of errors, see ``_digest_of``; None without error rows, or if they are in the output.
        run: the manifest of the run; the last one's, if there were several.
        mixed: whether there were several that differ.
        rows_per_file: as it was given.
    """

    rows: int
    failed: int
    output: str
    errors: str | None
    run: dict[str, Any]
    mixed: bool = False
    rows_per_file: int | None = None


class _Any(msgspec.Struct):
    """A manifest of any version of rosebatch."""

    rosebatch: Literal["finished output"]


ManifestT = TypeVar("ManifestT", OutputManifest, _Any)


def manifest_path(output: Target) -> Path:
    """Where the manifest of an output is kept."""
    return output.path.with_name(f".{output.path.name}.run")


def has_manifest(output: Target) -> bool:
    """Whether an output has a manifest beside it once it is finished: a file or folder of this machine."""
    return output.kind != "stream" and not is_url(output.name)


def require_own_manifest(output: Target) -> None:
    """Check that no other file has the manifest's name.

    Raises:
        FlagError: one has.
    """
    path = manifest_path(output)
    if has_manifest(output) and os.path.lexists(path) and _read(path, _Any) is None:
        raise FlagError(f"{path}: is no manifest of rosebatch, but the results need this name; rename it or -o")


def keep(
    output: Target,
    errors: Target | None,
    parts: Sequence[PartFile],
    rows_per_file: int | None,
    way_out: str = "rerun with --resume to finish",
) -> None:
    """Write the manifest of an output that is in its place.

    Args:
        output, errors, rows_per_file: of the run.
        parts: its results; of a merge, those of all shards.
        way_out: for people, if this fails.

    Raises:
        FailedRunError: it cannot be written.
    """
    if not has_manifest(output):
        return
    path = manifest_path(output)
    failed = sum(part.num_failed for part in parts)
    found = OutputManifest(
        rows=sum(part.num_rows for part in parts),
        failed=failed,
        output=digest(_files(output)),
        errors=_digest_of(errors) if failed else None,
        run={name: value for name, value in parts[0].manifest.items() if name != "shard"},
        mixed=any(part.mixed for part in parts),
        rows_per_file=rows_per_file,
    )
    # No longer than the part file's name, which has room.
    temporary = output.path.with_name(f".{output.path.name}.tmp")
    with writing(path, f": {output.name} is whole, but not yet marked so; {way_out}"):
        write_whole(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n", temporary)


def told_replaced(output: Target) -> str | None:
    """For people: which output a run replaces at its end; None if there is none."""
    if not has_manifest(output) or not output.path.exists() or not _files(output):
        return None
    found = _read(manifest_path(output), OutputManifest)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(output.path.stat().st_mtime))
    rows = "" if found is None else f"{counted(found.rows, 'row')} "
    # Whoever continues a run has given it.
    known = "" if found is None or output.part.exists() else "; --resume would keep it if nothing has changed"
    return f"{output.name} exists ({rows}of {when}), and is replaced at the end of this run{known}"


def find_output_manifest(
    output: Target, errors: Target | None, rows_per_file: int | None, manifest: Callable[[], dict[str, Any]]
) -> OutputManifest | None:
    """The manifest of an output that is finished.

    Args:
        output: of the run.
        errors: where its error rows go; None if they are among the others.
        rows_per_file: as it is given.
        manifest: of the run that would start now. It may take a while, and is called only if it matters.

    Returns:
        None if there is none, or if a run is to be continued.

    Raises:
        FlagError: the output is of another run, or has changed since.
    """
    if not has_manifest(output) or output.part.exists() or not output.path.exists():
        return None
    path = manifest_path(output)
    found = _read(path, OutputManifest)
    if found is None:
        if _read(path, _Any) is None:
            return None
        raise FlagError(f"{output.path} is finished, but another version of rosebatch wrote {path}. {_WAY_OUT}")
    before, now = {**found.run, "rows_per_file": found.rows_per_file}, {**manifest(), "rows_per_file": rows_per_file}
    if different := differences(before, now):
        raise FlagError(f"{output.path} is finished, but of another run: {'; '.join(different)}. {_WAY_OUT}")
    if digest(_files(output)) != found.output:
        raise FlagError(f"{output.path} has changed since its run wrote it. {_WAY_OUT}")
    if found.failed and _digest_of(errors) != found.errors:
        where = output if errors is None else errors
        raise FlagError(f"{where.name}: the error rows are missing, went elsewhere or have changed. {_WAY_OUT}")
    return found


_WAY_OUT = "Leave out --resume to replace it, or choose another -o"


def _files(output: Target) -> list[str]:
    if output.kind == "file":
        return [str(output.path)]
    return sorted(str(path) for path in output.path.iterdir())


def _digest_of(errors: Target | None) -> str | None:
    """SHA-256 of a file of errors, or of the name of a URL. A stream has none, and neither has a file that is gone."""
    if errors is None:
        return None
    if errors.kind == "stream":
        return "stream"
    if is_url(errors.name):
        # The query of a presigned URL is another one each time.
        return hashlib.sha256(errors.name.partition("?")[0].encode()).hexdigest()
    return digest([str(errors.path)]) if errors.path.exists() else "gone"


def merged_before(output: Target, of_input: Callable[[Mapping[str, Any]], str]) -> OutputManifest | None:
    """The manifest of an output that is whole and was made of an input; None if there is none.

    Args:
        output: of the merge.
        of_input: the digest of its input, read as a run with this manifest reads it.
    """
    found = _read(manifest_path(output), OutputManifest) if has_manifest(output) and output.path.exists() else None
    if found is None or digest(_files(output)) != found.output or of_input(found.run) != found.run.get("input"):
        return None
    return found


def _read(path: Path, kind: type[ManifestT]) -> ManifestT | None:
    """None if the file is missing, or holds nothing of this kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
