"""A process that reads the input. The parent of many workers has no time for that."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from rosebatch.core.errors import UserError
from rosebatch.host.child_process import ChildProcess, Failed, ParentLink, run_child
from rosebatch.io.reader import PromptReader
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.chunk import Chunk, in_chunks

# Chunks of a message, and messages that may wait in the parent.
_CHUNKS, _MESSAGES = 16, 4
# Bytes after which a message is sent before it has so many chunks.
_MAX_BYTES = 4 << 20
# How often the thread that receives looks whether anybody waits for more.
_PATIENCE_SECONDS = 0.1


class ReadingProcess:
    """Reads one input, in order. The process starts at once, so that it is ready when there is something to read."""

    def __init__(self) -> None:
        self._ahead: queue.Queue[Any] = queue.Queue(_MESSAGES)
        self._closed = False
        self._process = ChildProcess("rosebatch.job.workers.reading", {}, self._receive, loud=False)

    def read(self, reader: PromptReader) -> Iterator[Sequence[Chunk]]:
        """The rows of an input that ``can_move``.

        Raises:
            UserError: the input cannot be read, or the process died.
        """
        self._process.send(reader)
        while True:
            message = self._ahead.get()
            if isinstance(message, m.InputEnd):
                return
            if isinstance(message, Failed):
                raise message.error
            if message is None:
                raise UserError(f"the process that reads the input died ({self._process.how_it_ended()})")
            yield message

    def close(self) -> None:
        """End the process."""
        self._closed = True
        self._process.kill()

    def _receive(self, message: Any) -> None:
        """Hold the process up while enough waits: it blocks when its connection is full."""
        while not self._closed:
            with suppress(queue.Full):
                self._ahead.put(message, timeout=_PATIENCE_SECONDS)
                return


def main() -> NoReturn:
    """Read for the parent."""
    run_child(_read, ParentLink)


def _read(link: ParentLink) -> None:
    try:
        for chunks in _in_messages(link.receive()):
            link.send(chunks)
        link.send(m.InputEnd())
    except UserError as error:
        link.send(Failed.of(error))


def _in_messages(reader: PromptReader) -> Iterator[list[Chunk]]:
    chunks: list[Chunk] = []
    size = 0
    for group in reader.records():
        for chunk in in_chunks(group):
            chunks.append(chunk.pack())
            size += chunk.size
        if len(chunks) >= _CHUNKS or size >= _MAX_BYTES:
            yield chunks
            chunks, size = [], 0
    if chunks:
        yield chunks
