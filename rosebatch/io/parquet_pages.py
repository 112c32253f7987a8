"""How many bytes the pages of a Parquet file take once they are decompressed: their headers say so.

PyArrow decompresses a page as a whole, and does not show these headers. They are structs of Thrift's compact protocol.
"""

import os
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import pyarrow as pa

# Of a header at first; statistics in it may be longer.
_HEADER_BYTES = 1 << 10
_MAX_HEADER_BYTES = 1 << 24
_DICTIONARY = 2
# Of a dictionary, that are looked at one by one: a second or two.
_MAX_VALUES = 1 << 22
_LENGTH = 4
# Kinds of values. No header has a map; others are integers.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12


class Page(NamedTuple):
    """A page, by its header.

    Attributes:
        is_dictionary: whether it has the values that others refer to.
        size: bytes once it is decompressed.
        place: of its data in the file.
        stored: bytes in the file.
    """

    is_dictionary: bool
    size: int
    place: int
    stored: int


def pages(raw: IO[bytes], chunk: Any) -> Iterator[Page]:
    """The pages of a column chunk.

    Args:
        raw: the file. Its place changes.
        chunk: ``pyarrow.parquet.ColumnChunkMetaData``.

    Raises:
        pa.ArrowInvalid: a header is damaged.
    """
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        place = min(place, chunk.dictionary_page_offset)
    end = place + chunk.total_compressed_size
    while place < end:
        header, length = _header(raw, place)
        kind, size, compressed = (header.get(number) for number in (1, 2, 3))
        if not (isinstance(kind, int) and isinstance(size, int) and isinstance(compressed, int) and compressed >= 0):
            raise pa.ArrowInvalid("damaged page header")
        yield Page(kind == _DICTIONARY, size, place + length, compressed)
        place += length + compressed


def longest_value(raw: IO[bytes], chunk: Any, page: Page) -> int:
    """Bytes of the longest text in a dictionary; of very many texts, or if it cannot be read, those of the page.

    Args:
        raw: the file. Its place changes.
        chunk: ``pyarrow.parquet.ColumnChunkMetaData`` of texts.
        page: the dictionary.
    """
    raw.seek(page.place, os.SEEK_SET)
    data: Any = raw.read(page.stored)
    if chunk.compression != "UNCOMPRESSED":
        name = "lz4_raw" if chunk.compression == "LZ4" else chunk.compression.lower()
        try:
            data = pa.Codec(name).decompress(data, page.size)
        except (pa.ArrowException, OSError):
            return page.size
    view, at, longest = memoryview(data), 0, 0
    for _ in range(_MAX_VALUES):
        # A length, then so many bytes. What is left may be too little for a longer one.
        if len(view) - at - _LENGTH <= longest:
            return longest
        size = int.from_bytes(view[at : at + _LENGTH], "little")
        longest = max(longest, size)
        at += _LENGTH + size
    return page.size


def _header(raw: IO[bytes], place: int) -> tuple[dict[int, Any], int]:
    size = _HEADER_BYTES
    while size <= _MAX_HEADER_BYTES:
        raw.seek(place, os.SEEK_SET)
        data = raw.read(size)
        try:
            return _struct(data, 0)
        except (IndexError, RecursionError):
            size *= 16
    raise pa.ArrowInvalid("damaged page header")


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The fields by their numbers, and the place behind them."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        step, kind = head >> 4, head & 15
        if not step:
            number, at = _integer(data, at)
        number += step
        fields[number], at = (kind == _TRUE, at) if kind in (_TRUE, _FALSE) else _value(data, at, kind)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRUCT:
        return _struct(data, at)
    if kind in (_TRUE, _FALSE, _BYTE):
        return data[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        length, at = _natural(data, at)
        return None, at + length
    if kind in (_LIST, _SET):
        count, item = data[at] >> 4, data[at] & 15
        at += 1
        if count == 15:
            count, at = _natural(data, at)
        for _ in range(count):
            _, at = _value(data, at, item)
        return None, at
    return _integer(data, at)


def _natural(data: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return found, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    found, at = _natural(data, at)
    return (found >> 1) ^ -(found & 1), at
