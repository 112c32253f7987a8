"""``OUTPUT.manifest.json``: what run a finished output is of, so that nobody computes it again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rosebatch.core.errors import FlagError, UserError
from rosebatch.io.files import digest, is_url
from rosebatch.io.placement import beside, write_whole
from rosebatch.job.manifest import differences
from rosebatch.job.paths import require_creatable
from rosebatch.job.target import Target


class OutputManifest(msgspec.Struct, kw_only=True, frozen=True, tag_field="rosebatch", tag="finished output"):
    """A finished output.

    Attributes:
        rows: results in it.
        failed: error rows among them.
        output: SHA-256 of the output, see ``rosebatch.io.files.digest``.
        errors: of the file of errors; None without one.
        run: the manifest of the run.
    """

    rows: int
    failed: int
    output: str
    errors: str | None
    run: dict[str, Any]


def manifest_path(output: Target) -> Path:
    """Where the manifest of an output is kept."""
    return output.path.with_name(f"{output.path.name}.manifest.json")


def require_can_keep(output: Target) -> None:
    """Check that an output can have a manifest next to it.

    Raises:
        FlagError: it is a stream or at a URL, or another file has the manifest's name.
        UserError: the manifest's name is too long.
    """
    if output.kind == "stream" or is_url(output.name):
        raise FlagError("--keep-manifest needs an output file or folder on this machine: -o FILE")
    path = manifest_path(output)
    require_creatable(beside(path), str(path))
    if path.exists() and _read(path) is None:
        raise FlagError(f"{path}: is no manifest of rosebatch, but --keep-manifest needs this name; rename it or -o")


def keep(output: Target, errors: Path | None, rows: int, failed: int, run: dict[str, Any]) -> None:
    """Write the manifest of an output that is in its place.

    Raises:
        UserError: it cannot be written.
    """
    path = manifest_path(output)
    found = OutputManifest(
        rows=rows,
        failed=failed,
        output=digest(_files(output)),
        errors=digest([str(errors)]) if errors is not None and failed else None,
        run=run,
    )
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def forget(output: Target) -> None:
    """Delete the manifest of an older output, if there is one."""
    path = manifest_path(output)
    if output.kind != "stream" and not is_url(output.name) and _read(path) is not None:
        path.unlink()


def find_output_manifest(
    output: Target, errors: Path | None, manifest: Callable[[], dict[str, Any]]
) -> OutputManifest | None:
    """The manifest of an output that is complete.

    Args:
        output: of the run.
        errors: its file of errors, if it has one.
        manifest: of the run that would start now. It may take a while, and is called only if it matters.

    Returns:
        None if there is none, or if a run is to be continued.

    Raises:
        FlagError: the output is of another run, or has changed since.
    """
    if output.kind == "stream" or is_url(output.name) or output.part.exists() or not output.path.exists():
        return None
    found = _read(manifest_path(output))
    if found is None:
        return None
    if different := differences(found.run, manifest()):
        raise FlagError(f"{output.path} is complete, but of another run: {'; '.join(different)}. {_WAY_OUT}")
    if digest(_files(output)) != found.output:
        raise FlagError(f"{output.path} has changed since its run wrote it. {_WAY_OUT}")
    if found.errors is not None and (errors is None or not errors.exists() or digest([str(errors)]) != found.errors):
        raise FlagError(f"{errors or output.path}: the error rows are missing or have changed. {_WAY_OUT}")
    return found


_WAY_OUT = "Leave out --resume to compute it again"


def _files(output: Target) -> list[str]:
    if output.kind == "file":
        return [str(output.path)]
    return sorted(str(path) for path in output.path.iterdir())


def _read(path: Path) -> OutputManifest | None:
    """None if the file is missing or is no manifest."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=OutputManifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
