"""``OUTPUT.merged``, a note: a merge has its output in place, and deletes its shards. The next merge does the rest."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from rosebatch.core.errors import FailedRunError, FlagError
from rosebatch.host.file_state import FileState
from rosebatch.io.failed_write import writing
from rosebatch.io.placement import beside, write_whole


class _Merged(msgspec.Struct, frozen=True, tag_field="rosebatch", tag="merged shards"):
    """A merge that needs its part files no more.

    Attributes:
        rows: results in the output.
        failed: error rows among them.
        parts: the part files by their names. A later run may write others of these names.
    """

    rows: int
    failed: int
    parts: dict[str, FileState]


def mark_merged(output: Path, rows: int, failed: int, parts: Iterable[Path]) -> None:
    """Note that the output is in its place: from now on, ``delete_merged`` may delete its part files.

    Raises:
        FailedRunError: the note cannot be written.
    """
    states = {part.name: FileState.of(part) for part in parts}
    with writing(_path(output), "; repeat the merge"):
        write_whole(_path(output), msgspec.json.encode(_Merged(rows, failed, states)) + b"\n", beside(_path(output)))


def delete_merged(output: Path) -> tuple[int, int] | None:
    """Delete the part files of a merge whose output is in its place.

    Returns:
        its rows, and those of them that failed; None if there is no such merge.

    Raises:
        FlagError: a foreign file has the name of the note, or that of another version of rosebatch is there.
        FailedRunError: a file cannot be deleted.
    """
    path = _path(output)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Merged)
        for name, state in found.parts.items():
            part = path.with_name(name)
            if part.exists() and FileState.of(part) == state:
                part.unlink()
        path.unlink()
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = "was not left by a merge of this version of rosebatch, but this one needs the name; rename it or -o"
        raise FlagError(f"{path}: {told}") from None
    except OSError as error:
        raise FailedRunError(f"{error.filename}: {error.strerror}; it is no longer needed: repeat the merge") from None
    return found.rows, found.failed


def _path(output: Path) -> Path:
    return output.with_name(f"{output.name}.merged")
