"""A file, folder or stream that gets results, and what has to be true of it before a run."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rosebatch.core.errors import FlagError
from rosebatch.host.paths import descriptor_of, takes_rows_in_order
from rosebatch.io.files import as_path, file_name, is_table, is_url, url_identity
from rosebatch.io.formats import named
from rosebatch.io.placement import aside, beside, require_parts
from rosebatch.io.unsupported_formats import NOT_WRITTEN
from rosebatch.job.paths import (
    Used,
    require_creatable,
    require_left_by_a_run,
    require_own_part,
    require_replaceable_file,
)

_ONLY_JSONL = "JSONL (also .gz, .zst, .bz2, .xz)"


@dataclass(frozen=True, slots=True)
class Target:
    """A file, folder or stream of results.

    Attributes:
        name: path or URL as it was given.
        kind: a stream takes its rows in order, and nothing is renamed there.
        path: of the file or folder, with links followed; for a URL, where it is made: in the working directory, and
            error rows beside the output, see ``find_destination``.
    """

    name: str
    kind: Literal["stream", "file", "folder"]
    path: Path

    @classmethod
    def of(cls, name: str) -> "Target":
        """Look at what a name leads to.

        Raises:
            FlagError: nothing can be written there.
            UserError: the URL's file system is unknown.
        """
        if name == "-":
            return cls(name, "stream", Path("/dev/stdout"))
        name = as_path(name)
        if is_url(name):
            path = Path(file_name(name) or Path(name.partition("://")[2]).name)
            kind: Literal["file", "folder"] = "file" if file_name(name) else "folder"
            if kind == "folder" and name.startswith(("http://", "https://")):
                raise FlagError(f"{name}: HTTP knows no folders, name a file for the results")
            url_identity(name)
        else:
            path = Path(name)
            kind = "folder" if not file_name(name) or os.path.isdir(path) else "file"  # noqa: PTH112
            if kind == "file" and takes_rows_in_order(path):
                return cls(name, "stream", path)
        if path.name in ("", ".."):
            raise FlagError(f"{name}: has no name of its own, name a file or a folder for the results")
        # Replace the file or folder, not a link to it.
        is_link = not is_url(name) and os.path.islink(path)  # noqa: PTH114
        return cls(name, kind, Path(os.path.realpath(path)) if is_link else path)

    @property
    def part(self) -> Path:
        """The file that holds the results until all are there."""
        return self.path.with_name(self.path.name + ".part")

    def require_written_format(self, flag: str, *, tables: bool = True) -> None:
        """Check that files with this extension are written.

        Args:
            flag: that named it, for the message.
            tables: whether tables are written there too.

        Raises:
            FlagError: they are not.
        """
        found = named(self.path.name)
        is_packed = found.compression is not None and found.kind in ("parquet", "arrow")
        is_other = is_packed or self.path.name.lower().endswith(NOT_WRITTEN)
        if self.kind == "file" and (is_other or (is_table(self.name) and not tables)):
            forms = "JSONL or CSV (also .gz, .zst, .bz2, .xz), .parquet or .arrow" if tables else _ONLY_JSONL
            raise FlagError(f"{flag} {self.name}: is written as {forms}; name such a file")

    @property
    def says_other_than_lines(self) -> bool:
        """Whether a file that is written as JSONL has a name that does not say so."""
        return self.kind == "file" and named(file_name(self.name)).kind in (None, "json")

    def temporaries(self) -> list[Path]:
        """What the run makes, replaces and deletes next to the path."""
        return [] if self.kind == "stream" else [beside(self.path), aside(self.path)][: 1 + (self.kind == "folder")]

    def used(self, what: str) -> Iterator[Used]:
        """All paths but the part file."""
        is_folder = self.kind == "folder"
        yield Used(what, self.name if is_url(self.name) else str(self.path), is_folder)
        for each in self.temporaries():
            yield Used(f"the temporary name of {what}", str(each), is_folder)

    def require_replaceable(self, part: Path) -> None:
        """Check that the file or folder can be written at the end of the run, and that only results are lost then.

        What a URL holds is not looked at: only parts are written or deleted there.

        Args:
            part: the part file of the run.

        Raises:
            FlagError: something is in the way.
            UserError: a file cannot be made there.
        """
        path = self.path
        if self.kind == "stream":
            mode = os.stat(path).st_mode if path.exists() else 0  # noqa: PTH116
            if stat.S_ISBLK(mode) or (stat.S_ISSOCK(mode) and descriptor_of(path) is None):
                raise FlagError(f"{self.name}: is a disk or a socket, name a file for the results")
            return
        if self.kind == "folder":
            if not is_url(self.name):
                if path.is_mount():
                    raise FlagError(f"{self.name}: something is mounted there, name a folder in it for the results")
                require_parts(path)
            for each in self.temporaries():
                require_parts(each)
        elif not is_url(self.name):
            require_replaceable_file(path)
        require_own_part(part)
        for each in self.temporaries():
            require_left_by_a_run(each, part, is_folder=self.kind == "folder")
        for each in (*self.temporaries(), part):
            if not os.path.lexists(each):
                require_creatable(each, str(path))

    def default_errors(self) -> str:
        """The file of error rows. A URL with a query is signed for one file, so its neighbour is made here."""
        whole = Path(file_name(self.name))
        packed = whole.suffix if named(whole.name).compression else ""
        name = f"{Path(whole.name.removesuffix(packed)).stem}.errors.jsonl{packed}"
        if is_url(self.name):
            return name if "?" in self.name else f"{self.name.rpartition('/')[0]}/{name}"
        return str(Path(self.name).with_name(name))
