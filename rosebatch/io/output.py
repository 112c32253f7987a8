"""Takes the results of a job: a part file until all are there, or a stream, row by row."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import IO, Any, Protocol

import msgspec

from rosebatch.core.words import counted
from rosebatch.io.failed_write import failed_write
from rosebatch.io.part_file import PartFile
from rosebatch.io.part_lines import PartEncoder
from rosebatch.io.placement import Placement

# Results that a stream holds back while it waits for an earlier row, and their bytes.
_MAX_HELD = 4096
_MAX_HELD_BYTES = 64 << 20
_WAY_OUT = "; choose another place, such as -o FILE, which --resume can continue"


class Encode(Protocol):
    """Makes the line of a result."""

    def __call__(self, index: int, row: dict[str, Any], *, failed: bool) -> bytes:
        """The line of a row, with its end."""
        ...


class Sink:
    """Takes one result for each row, in any order."""

    @property
    def encode(self) -> Encode:
        """Makes the lines for ``add_lines``. It can be sent to another process."""
        raise NotImplementedError

    @property
    def full(self) -> bool:
        """Whether rows must finish before more may start."""
        return False

    def add(self, index: int, row: Any, *, failed: bool) -> None:
        """Take a result that was made in this process."""
        self.add_lines([index], [self.encode(index, row, failed=failed)], {index} if failed else ())

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """Take results that were encoded, perhaps by workers.

        Args:
            indices: of the rows.
            lines: of each row, by ``encode``.
            failed: indices of the error rows.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Pass everything on: the end of this process then loses nothing."""

    def finish(self) -> None:
        """Every row has its result."""


class Output(Sink, ABC):
    """The file, folder or stream of a job. It becomes visible when it is finished, in input order.

    Attributes:
        in_order: whether each row waits for those before it.
    """

    in_order = False

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Results so far, those of the resumed run included."""

    @property
    @abstractmethod
    def num_failed(self) -> int:
        """Error rows among them."""

    @property
    def mixed(self) -> bool:
        """Whether its rows are of several runs that differ."""
        return False

    @property
    @abstractmethod
    def created(self) -> int:
        """When the run began, in seconds since 1970. A resumed run keeps the time of the first one."""

    @property
    @abstractmethod
    def kept(self) -> str:
        """For people: where a run that ends early leaves its results. Empty if it leaves none."""

    @abstractmethod
    def __contains__(self, index: int) -> bool:
        """Whether the row already has its result, perhaps from an earlier run."""

    @abstractmethod
    def close(self) -> None:
        """Release the output. Nothing more appears; unfinished results stay for a run that resumes."""


class StreamOutput(Output):
    """JSONL on a stream, in input order: a row waits for all rows before it.

    Args:
        stream: takes the rows.
        created: when the run began.
        errors: a stream of its own for error rows; None puts them among the others.
        close: called at the end, to close streams that belong to nobody else.
    """

    in_order = True
    num_rows = 0
    num_failed = 0
    created = 0
    kept = ""

    def __init__(
        self,
        stream: IO[bytes],
        created: int = 0,
        errors: IO[bytes] | None = None,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.created = created
        self._stream = stream
        self._errors = errors or stream
        self._close = close
        self._next = 0
        self._held: dict[int, tuple[bytes, bool]] = {}
        self._held_bytes = 0

    def __contains__(self, index: int) -> bool:
        return index < self._next or index in self._held

    @property
    def encode(self) -> Encode:
        """See ``Sink``."""
        return _encode_line

    @property
    def full(self) -> bool:
        """Whether thousands of results, or many bytes, wait for one row."""
        return len(self._held) >= _MAX_HELD or self._held_bytes >= _MAX_HELD_BYTES

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """Write rows and those that waited for them, or hold them until their turn."""
        self.num_rows += len(indices)
        self.num_failed += len(failed)
        for index, line in zip(indices, lines, strict=True):
            self._held[index] = line, index in failed
            self._held_bytes += len(line)
        while self._next in self._held:
            line, is_failed = self._held.pop(self._next)
            stream = self._errors if is_failed else self._stream
            try:
                stream.write(line)
            except OSError as error:
                raise _failure(stream, error) from None
            self._held_bytes -= len(line)
            self._next += 1

    def flush(self) -> None:
        """Show the rows so far to whoever reads the stream."""
        for stream in (self._stream, self._errors):
            try:
                stream.flush()
            except OSError as error:
                raise _failure(stream, error) from None

    def finish(self) -> None:
        """Flush; ``add`` has already written every row."""
        assert not self._held, "every row has its result"
        self.flush()

    def close(self) -> None:
        """Close the streams, unless they belong to the caller."""
        self._close()


def _failure(stream: IO[bytes], error: OSError) -> Exception:
    """A reader that went away may be what the user wants, such as ``| head``."""
    return error if isinstance(error, BrokenPipeError) else failed_write(stream, error, _WAY_OUT)


def _encode_line(index: int, row: dict[str, Any], *, failed: bool) -> bytes:
    return msgspec.json.encode(row, enc_hook=str) + b"\n"


class FileOutput(Output):
    """Results in a part file, until all are there.

    Args:
        part: the part file of this run, or of the run that it resumes.
        placement: where the results appear; next to the part file.
        appeared: called once they have, before the part file is deleted.
    """

    def __init__(self, part: PartFile, placement: Placement, appeared: Callable[[], object] = lambda: None) -> None:
        self._part = part
        self._placement = placement
        self._appeared = appeared

    def __contains__(self, index: int) -> bool:
        return index in self._part

    @property
    def mixed(self) -> bool:
        """See ``PartFile``."""
        return self._part.mixed

    @property
    def created(self) -> int:
        """The time in the manifest."""
        return int(self._part.manifest["created"])

    @property
    def num_rows(self) -> int:
        """Rows in the part file."""
        return self._part.num_rows

    @property
    def num_failed(self) -> int:
        """Error rows in the part file."""
        return self._part.num_failed

    @property
    def kept(self) -> str:
        """How many rows the part file holds, and how to continue."""
        if not self.num_rows:
            return ""
        are = "is" if self.num_rows == 1 else "are"
        return f": {counted(self.num_rows, 'row')} {are} saved in {self._part.path}; rerun with --resume to continue"

    @cached_property
    def encode(self) -> Encode:
        """Makes lines of this part file. The first call waits for the manifest."""
        return PartEncoder(self._part.begin(), self._placement.fields)

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """Append the rows to the part file."""
        self._part.append_lines(indices, lines, failed)

    def flush(self) -> None:
        """Hand the rows to the system. They reach the disk a second or two later."""
        self._part.flush()

    def finish(self) -> None:
        """Make the output of the part file, and delete that.

        Raises:
            UserError: the output cannot be written. The part file stays.
        """
        self._part.sync()
        self._placement.appear(self._part, self.kept)
        self._appeared()
        self._part.remove()

    def close(self) -> None:
        """Release the part file. Delete it if it holds no result."""
        self._placement.close()
        if self._part.num_rows:
            self._part.close()
        else:
            self._part.remove()


class ShardOutput(FileOutput):
    """Results that stay in the part file: the output needs those of other runs too."""

    _complete = False

    def finish(self) -> None:
        """Put all rows on the disk. A shard without rows has a file too."""
        self._part.begin()
        self._part.sync()
        self._complete = True

    def close(self) -> None:
        """Release the part file. Delete it if the run ended early and left no result."""
        if self._complete:
            self._part.close()
        else:
            super().close()
