"""The files of an input: opened as often as needed, decompressed, and compared at the end."""

import io
import sys
from pathlib import Path
from typing import IO, Any, cast

from rosebatch.core.errors import UserError
from rosebatch.host.file_state import FileState
from rosebatch.host.paths import is_stream
from rosebatch.io.compressed import decompressed
from rosebatch.io.files import READ_BYTES, as_path, digest_of, file_name, is_url, joined_digest, open_file
from rosebatch.io.find_files import find_files
from rosebatch.io.formats import MAGIC_BYTES, compression_of, named, table_of
from rosebatch.io.hashed_file import HashedFile
from rosebatch.io.image_files import digest_of_names, find_images
from rosebatch.io.piped import Copied
from rosebatch.io.transcoded import is_utf16, require_read, transcoded

# Of a file that is not on this machine, read at once.
_REMOTE_BYTES = 1 << 18


class InputFiles:
    """Files by their paths or URLs. Pipes are copied to temporary files, and are like files from then on.

    Args:
        source: a path or URL of a file, a folder or a glob; ``-`` for stdin.
        of_images: whether each is an image, of which names and sizes are compared alone.

    Attributes:
        paths: of the files, in the order of their names.

    Raises:
        UserError: there are none.
    """

    def __init__(self, source: str, *, of_images: bool = False) -> None:
        self.source = source
        self.paths = find_images(source) if of_images else find_files(source)
        self._of_images = of_images
        self._copied: dict[str, Copied] = {}
        # The state of each file when it was hashed, and the hash of all.
        self._digested: tuple[list[FileState] | None, str] | None = None
        self._hashed: dict[str, HashedFile] = {}

    @property
    def can_move(self) -> bool:
        """Whether another process can read the same: neither stdin nor another pipe, which can be read once."""
        return self.source != "-" and all(is_url(path) or not is_stream(path) for path in self.paths)

    def open(self, path: str) -> io.BufferedReader:
        """The contents of a file, decompressed; text as UTF-8.

        Raises:
            UserError: it cannot be opened.
        """
        raw: Any = self._raw(path)
        if raw is sys.stdin.buffer:
            return cast(io.BufferedReader, raw)
        file = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, _REMOTE_BYTES)
        try:
            head = file.peek(MAGIC_BYTES)
            if not head and named(file_name(path)).compression:
                raise UserError(f"{path}: is empty; also without rows, a compressed file has some bytes")
            if compression := compression_of(head):
                file = decompressed(file, compression)
                head = file.peek(MAGIC_BYTES)
            require_read(path, head)
        except (OSError, UserError) as error:
            file.close()
            raise error if isinstance(error, UserError) else UserError(f"{path}: {error.strerror or error}") from None
        return transcoded(file) if is_utf16(head) else file

    def head(self, path: str) -> bytes:
        """The first bytes of a file, decompressed; none of a URL, which would cost a request."""
        if is_url(path):
            return b""
        with self.open(path) as file:
            try:
                return file.read(MAGIC_BYTES)
            except OSError as error:
                raise UserError(f"{path}: {error.strerror or error}") from None

    def has_places(self, path: str) -> bool:
        """Whether a text can be read from any place of its file on: it is local and neither compressed nor UTF-16."""
        if path == "-" or is_url(path) or is_stream(path):
            return False
        with self._raw(path) as raw:
            head = raw.read(MAGIC_BYTES)
        return compression_of(head) is None and not is_utf16(head)

    def can_reopen(self, path: str) -> bool:
        """Whether the file can be opened again: all but a stdin that was not copied."""
        return path != "-" or path in self._copied

    def copy_stdin(self, head: bytes = b"") -> None:
        """Copy stdin to a temporary file.

        Args:
            head: what was read of it before.
        """
        if "-" not in self._copied:
            self._copied["-"] = Copied.of(sys.stdin.buffer, "stdin", head)

    def copy_stdin_unless_text(self, line: bytes) -> bool:
        """Copy stdin if its first line shows that it is compressed, a table or UTF-16; returns whether it does."""
        require_read("-", line)
        if compression_of(line) is None and table_of(line) is None and not is_utf16(line):
            return False
        self.copy_stdin(line)
        return True

    def digest(self) -> str:
        """SHA-256 of the files' contents, as ``require_unchanged`` will compare it.

        From now on, reading a local file raises ChangedInputError where it has others.
        """
        if self._of_images:
            self._digested = None, digest_of_names(self.paths)
            return self._digested[1]
        self._hashed.clear()
        states = self._states()
        digests = [digest_of(path, self._raw) for path in self.paths]
        if states is not None:
            found = zip(self.paths, states, digests, strict=True)
            self._hashed = {path: HashedFile(path, state, each) for path, state, each in found}
        settled = states is not None and all(state.settled for state in states)
        self._digested = states if settled else None, joined_digest(digests)
        return self._digested[1]

    def require_unchanged(self) -> None:
        """Check that the files still have the contents of ``digest``. Without that call, do nothing.

        Local files are read only if their inode, size or times say that they may have changed.

        Raises:
            UserError: they have others, or cannot be read.
        """
        if self._digested is None:
            return
        states, before = self._digested
        if states is not None and states == self._states():
            return
        if self._of_images:
            now = digest_of_names(self.paths)
        else:
            now = joined_digest([digest_of(path, self._raw) for path in self.paths])
        if now != before:
            raise UserError(
                f"{self.source}: changed during the run, so results may be of two inputs: "
                "start again, or accept them with --force-resume"
            )

    def is_same(self, path: str, file: IO[bytes]) -> bool:
        """See ``HashedFile``; True of a file that was not hashed."""
        return path not in self._hashed or self._hashed[path].is_same(file.fileno())

    def _states(self) -> list[FileState] | None:
        """The state of each file; None if one is at a URL or missing."""
        if any(is_url(path) for path in self.paths):
            return None
        try:
            return [FileState.of(Path(as_path(path))) for path in self.paths]
        except OSError:
            return None

    def _raw(self, path: str) -> IO[bytes]:
        if path not in self._copied:
            if path == "-":
                return sys.stdin.buffer
            if path in self._hashed:
                return self._hashed[path].open(cast(io.BufferedReader, open_file(path)).detach(), READ_BYTES)
            if is_url(path) or not is_stream(path):
                return open_file(path)
            self._copied[path] = Copied(path)
        return self._copied[path].open()
