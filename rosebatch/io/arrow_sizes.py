"""How many bytes a record batch of Arrow IPC takes once its buffers are decompressed: each begins with its length.

PyArrow decompresses a batch as a whole, and does not show these lengths. A FlatBuffer describes each batch.

Sources: Arrow columnar format, "IPC File Format" and Message.fbs; FlatBuffers, "Internals".
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pyarrow as pa

_MAGIC = b"ARROW1"
_PREFIX, _BLOCK, _BUFFER, _LENGTH = map(struct.Struct, ("<ii", "<qi4xq", "<qq", "<q"))
_CONTINUES = -1
# Numbers of fields: of a footer, a message, a batch of a dictionary, and a batch.
_DICTIONARIES, _BATCHES = 2, 3
_KIND, _HEADER, _BODY_BYTES = 1, 2, 3
_DATA = 1
_BUFFERS, _COMPRESSION = 2, 3
# Kinds of messages.
_OF_DICTIONARY, _OF_BATCH = 2, 3
# A batch may be so many times as large as it is in the file, and of any size.
_PACKED_TIMES = 16


def require_next(raw: IO[bytes], limit: int) -> None:
    """Check the next batch of a stream, and the dictionaries before it. The stream's place stays.

    Args:
        raw: the stream.
        limit: bytes of a batch that is never refused.

    Raises:
        pa.ArrowInvalid: one takes more, and far more than in the file; or it is damaged.
    """
    with _looked_at(raw):
        place: int | None = raw.tell()
        while place is not None:
            place = _require(raw, place, limit)


def each_checked(raw: IO[bytes], limit: int) -> Iterator[None]:
    """Check a batch of a file at each step, and at the first one the dictionaries; arguments as of ``require_next``."""
    with _looked_at(raw):
        dictionaries, batches = _places(raw)
        for place in dictionaries:
            _require(raw, place, limit)
    for place in batches:
        with _looked_at(raw):
            _require(raw, place, limit)
        yield


@contextmanager
def _looked_at(raw: IO[bytes]) -> Iterator[None]:
    begin = raw.tell()
    try:
        yield
    except (struct.error, IndexError):
        raise pa.ArrowInvalid("damaged metadata") from None
    finally:
        raw.seek(begin)


def _places(raw: IO[bytes]) -> tuple[list[int], list[int]]:
    """Where the dictionaries and the batches of a file are, by its footer."""
    end = raw.seek(-4 - len(_MAGIC), os.SEEK_END)
    (size,) = struct.unpack("<i", raw.read(4))
    raw.seek(max(0, end - size))
    footer = raw.read(size)
    table = _target(footer, 0)
    dictionaries, batches = (
        [place for place, _, _ in _structs(footer, table, number, _BLOCK)] for number in (_DICTIONARIES, _BATCHES)
    )
    return dictionaries, batches


def _require(raw: IO[bytes], place: int, limit: int) -> int | None:
    """Check the message there. Returns the place of the next one; None behind a batch or the last one."""
    raw.seek(place)
    prefix = raw.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    first, size = _PREFIX.unpack(prefix)
    if first != _CONTINUES:
        # As older versions write it.
        size = first
        raw.seek(place + 4)
    if size <= 0:
        return None
    message = raw.read(size)
    body, table = raw.tell(), _target(message, 0)
    kind = _at(message, table, _KIND)
    batch = _target(message, _at(message, table, _HEADER))
    if message[kind] == _OF_DICTIONARY:
        batch = _target(message, _at(message, batch, _DATA))
    length = _at(message, table, _BODY_BYTES)
    stored = _LENGTH.unpack_from(message, length)[0] if length else 0
    if message[kind] in (_OF_DICTIONARY, _OF_BATCH) and _at(message, batch, _COMPRESSION):
        buffers = _structs(message, batch, _BUFFERS, _BUFFER)
        total = sum(_decompressed(raw, body + offset, length) for offset, length in buffers)
        if total > max(limit, _PACKED_TIMES * stored):
            raise pa.ArrowInvalid(f"a batch of {stored} bytes takes {total} decompressed; write fewer rows in each")
    return None if message[kind] == _OF_BATCH else body + max(0, stored)


def _decompressed(raw: IO[bytes], place: int, length: int) -> int:
    """Bytes of a buffer once it is decompressed; one that is stored as it is has -1 there."""
    if length <= 0:
        return 0
    raw.seek(place)
    (size,) = _LENGTH.unpack(raw.read(_LENGTH.size))
    return int(size) if size >= 0 else length


def _target(data: bytes, at: int) -> int:
    """Where an offset leads to."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _at(data: bytes, table: int, number: int) -> int:
    """The place of a field of a table; 0 if it is absent."""
    names = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", data, names)[0]:
        return 0
    own = int(struct.unpack_from("<H", data, names + entry)[0])
    return table + own if own else 0


def _structs(data: bytes, table: int, number: int, form: struct.Struct) -> Iterator[tuple[int, ...]]:
    """The items of a list in a table."""
    if field := _at(data, table, number):
        begin = _target(data, field)
        (count,) = struct.unpack_from("<I", data, begin)
        # Some forms are aligned to 8 bytes, and so are the lists.
        for place in range(begin + 4, begin + 4 + count * form.size, form.size):
            yield form.unpack_from(data, place)
