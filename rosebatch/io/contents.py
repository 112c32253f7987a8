"""What the files of an input hold, and the rows of those with JSON, undecoded."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from io import BufferedReader, BytesIO
from itertools import chain, islice, takewhile

import msgspec

from rosebatch.config.run import InputFormat
from rosebatch.core.errors import UserError
from rosebatch.io.files import file_name, is_url
from rosebatch.io.formats import JSON_KINDS, PDF, Kind, named, table_of
from rosebatch.io.input_files import InputFiles
from rosebatch.io.json_texts import lines_or_items, stripped
from rosebatch.io.lines import LINE_END, bounded_lines, skip_line
from rosebatch.io.openai.lines import is_request
from rosebatch.io.rows import PROMPT_FIELDS
from rosebatch.io.table_values import BadValues
from rosebatch.io.unsupported_formats import (
    kind_of,
    require_kind,
    require_lines,
    require_no_array,
    require_no_csv,
    require_object_items,
    require_objects,
)

# Lines of a file that may be looked at to recognize an OpenAI batch.
_MAX_PEEKED = 100
_PEEKED_BYTES = 4096
_TEXTS = {"lines": bounded_lines, "json": lines_or_items}
_KINDS: dict[InputFormat, Kind] = {
    "jsonl": "lines",
    "json": "json",
    "openai": "lines",
    "parquet": "parquet",
    "arrow": "arrow",
    "csv": "csv",
}
_FORMATS = {kind: form for form, kind in _KINDS.items() if form != "openai"}


class Contents:
    """What each file holds, by extensions, first bytes and first lines.

    Args:
        files: of the input.
        input_format: see ``PromptReader``.
        prompt_column: what else than ``PROMPT_FIELDS`` may be the name of a column of prompts.
        limit: most bytes of a row.
        of_images: whether each file is an image. They are not looked at.

    Raises:
        UserError: a file is unreadable, or holds no rows.
    """

    def __init__(
        self,
        files: InputFiles,
        input_format: InputFormat,
        prompt_column: str | None,
        limit: int,
        *,
        of_images: bool = False,
    ) -> None:
        self._of_images = of_images
        self._files = files
        self._format = input_format
        self._prompt_columns = {*PROMPT_FIELDS, *filter(None, [prompt_column])}
        self._limit = limit
        # Lines of stdin that were looked at before reading began.
        self._peeked: list[bytes | BadValues] = []
        if files.source != "-":
            heads = {path: files.head(path) for path in self.json_paths}
            for path, head in heads.items():
                require_kind(path, "lines", head)
            for path, kind in self.each("parquet", "arrow", "csv"):
                # What is damaged here is an error once it is opened.
                with suppress(UserError):
                    heads[path] = files.head(path)
                require_kind(path, kind, heads.get(path, b""))
            by_name = input_format == "auto"
            require_lines({path: kind_of(path, heads[path], by_name=by_name) for path in self.json_paths})
            for path, _ in self.each("lines"):
                if not is_url(path):
                    require_objects(path, self._first_lines(path))
            for path, _ in self.each("json"):
                if not is_url(path):
                    require_object_items(path, self._first_items(path))

    @cached_property
    def kinds(self) -> list[Kind]:
        """What each file holds. On stdin this waits for the first line."""
        if self._of_images:
            return ["pdf" if path.lower().endswith(PDF) else "image" for path in self._files.paths]
        given = _KINDS.get(self._format)
        if self._files.source == "-":
            return [self._kind_of_stdin(given)]
        if given not in (None, "lines"):
            return [given] * len(self._files.paths)
        if given is not None:
            return ["json" if named(file_name(path)).kind == "json" else given for path in self._files.paths]
        return [
            named(file_name(path)).kind or table_of(self._files.head(path)) or "lines" for path in self._files.paths
        ]

    def _kind_of_stdin(self, given: Kind | None) -> Kind:
        if given not in (None, "lines"):
            self._files.copy_stdin()
            return given
        stdin = self._files.open("-")
        try:
            first = stdin.readline(self._limit + LINE_END)
        except OSError as error:
            raise UserError(f"stdin: {error.strerror or error}") from None
        if self._files.copy_stdin_unless_text(first):
            return given or table_of(self._files.head("-")) or "lines"
        if first:
            require_lines({"stdin": kind_of("", first, by_name=False)})
            require_no_array("stdin", stripped(first))
            require_no_csv(first, self._prompt_columns)
            self._peeked += bounded_lines(BufferedReader(BytesIO(first)), "stdin", self._limit)
            if len(first) == self._limit + LINE_END and not first.endswith(b"\n"):
                skip_line(stdin)
        return "lines"

    def each(self, *kinds: Kind) -> Iterator[tuple[str, Kind]]:
        """The files of some kinds."""
        return ((path, kind) for path, kind in zip(self._files.paths, self.kinds, strict=True) if kind in kinds)

    @cached_property
    def json_paths(self) -> list[str]:
        """The files with JSON."""
        return [path for path, _ in self.each(*JSON_KINDS)]

    @property
    def kind(self) -> InputFormat:
        """What all files hold; ``auto`` for files of several kinds."""
        if self.is_batch:
            return "openai"
        kinds = set(self.kinds)
        return _FORMATS.get(kinds.pop(), "auto") if len(kinds) == 1 else "auto"

    @cached_property
    def is_batch(self) -> bool:
        """Whether the lines are requests of an OpenAI batch. On stdin this waits for the first line.

        Raises:
            UserError: there are tables next to the batch.
        """
        is_batch = self._looks_like_a_batch() if self._format == "auto" else self._format == "openai"
        if is_batch and self.json_paths != self._files.paths:
            raise UserError(f"{self._files.source}: has an OpenAI batch beside tables; choose one kind by a pattern")
        return is_batch

    @property
    def may_be_batch(self) -> bool:
        """The same, without waiting: True for a stdin that may still turn out to be none."""
        return (self._files.source == "-" and self._format == "auto") or self.is_batch

    @property
    def has_ended(self) -> bool:
        """Whether a stdin that can be read once only has no line."""
        _ = self.kinds  # copies a stdin that can be read again then
        return not self._files.can_reopen(self._files.source) and not self._peeked

    @contextmanager
    def texts(self, path: str, kind: Kind) -> Iterator[Iterator[bytes | BadValues]]:
        """The rows of a file with JSON, undecoded, among them blank lines. The file is open in the ``with`` block."""
        with self._files.open(path) as file:
            yield chain(self._peeked, _TEXTS[kind](file, path, self._limit))

    def _looks_like_a_batch(self) -> bool:
        """Decide by the first line that is JSON, among the first few of each file. Lines of stdin are kept."""
        for path, kind in self.each(*JSON_KINDS):
            file = self._files.open(path)
            streamed = path == "-" and not self._files.can_reopen(path)
            seen = list(self._peeked) if streamed else []
            try:
                lines = chain(seen, _TEXTS[kind](file, path, self._limit))
                for number, line in enumerate(islice(lines, _MAX_PEEKED)):
                    if streamed and number >= len(seen):
                        self._peeked.append(line)
                    if not isinstance(line, bytes):
                        continue
                    try:
                        return is_request(msgspec.json.decode(stripped(line)))
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        continue
            finally:
                if not streamed:
                    file.close()
        return False

    def _first_items(self, path: str) -> list[bytes]:
        """The first items of an array; none of other JSON, and of a file that is damaged there."""
        if stripped(self._files.head(path)).startswith(b"["):
            with suppress(OSError, EOFError, UserError), self.texts(path, "json") as items:
                # None behind one that would be read past.
                return list(takewhile(lambda item: isinstance(item, bytes), islice(items, _MAX_PEEKED)))  # type: ignore[arg-type]
        return []

    def _first_lines(self, path: str) -> list[bytes]:
        """The first lines that are not blank, or their beginnings; none of a file that is damaged there."""
        with self._files.open(path) as file, suppress(OSError, EOFError):
            lines = map(stripped, islice(iter(partial(file.readline, _PEEKED_BYTES), b""), _MAX_PEEKED))
            return list(filter(None, lines))
        return []
