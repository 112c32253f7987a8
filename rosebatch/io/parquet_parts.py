"""How a Parquet file is read so that memory stays bounded: which row groups together, and how many rows at once."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from rosebatch.io.arrow_types import has, inner_types
from rosebatch.io.parquet_pages import Page, longest_value, pages
from rosebatch.io.row_sizes import TEXTS

# Rows that are decoded at once, and about their bytes.
_MAX_ROWS = 256
_MAX_BYTES = 4 << 20
# The same if each row had the longest values of the dictionaries, which PyArrow copies for each row.
_MAX_SHARED_BYTES = 64 << 20
# Of a group that is read without a look at its pages.
_SMALL_BYTES = _MAX_SHARED_BYTES // _MAX_ROWS
# Of a page, and how many times its bytes in the file: PyArrow holds it two or three times, and writes 1,024 values to
# one, however long they are.
_MAX_PAGE_BYTES, _PAGE_TIMES = 128 << 20, 8
# Of a dictionary with a text that no row may have: PyArrow holds it five times.
_MAX_LONG_PAGE_BYTES = 48 << 20
# Of all dictionaries of long texts that are far smaller in the file: PyArrow holds each four times.
_MAX_PACKED_BYTES, _PACKED_TIMES = 40 << 20, 16
_NO_DICTIONARY = Page(is_dictionary=True, size=0, place=0, stored=0)
_VALUE_BYTES = 8


class Part(NamedTuple):
    """Neighbouring row groups.

    Attributes:
        groups: their numbers.
        rows_at_once: as many as memory has room for.
        long: columns that cannot be read.
        shared: columns with texts so long that they are to be read as dictionaries: PyArrow then copies them for each
            batch, and not for each row.
    """

    groups: Sequence[int]
    rows_at_once: int
    long: Sequence[str] = ()
    shared: Sequence[str] = ()


def parts(raw: IO[bytes], file: pq.ParquetFile, names: Sequence[str], limit: int) -> Iterator[Part]:
    """The parts of a file, in order; each is looked at when its turn comes.

    Args:
        raw: the file. Its place changes.
        file: the same, opened.
        names: columns that are read.
        limit: most bytes of a row.
    """
    # PyArrow makes the schema anew whenever it is asked.
    metadata, schema, small = file.metadata, file.schema_arrow, list[int]()
    # PyArrow does not join those of two groups.
    has_dictionaries = any(_has_dictionary_inside(schema.field(name).type) for name in names)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks: dict[str, list[Any]] = {name: [] for name in names}
        for chunk in map(group.column, range(group.num_columns)):
            # Names may have dots, as paths have.
            for name in accumulate(chunk.path_in_schema.split("."), "{}.{}".format):
                if name in chunks:
                    chunks[name].append(chunk)
        size = sum(_size(chunk) for each in chunks.values() for chunk in each)
        if size <= _SMALL_BYTES:
            small.append(number)
            if has_dictionaries:
                yield Part(small, _MAX_ROWS)
                small = []
            continue
        if small:
            yield Part(small, _MAX_ROWS)
            small = []
        long = [name for name in names if any(_is_long(raw, chunk, group.num_rows, limit) for chunk in chunks[name])]
        copied = 0
        shared: list[str] = []
        packed: dict[str, int] = {}
        for name in names:
            longest = [_longest(raw, chunk) for chunk in chunks[name] if name not in long]
            values = sum(value for _, value in longest)
            # As long as the page, it is not known.
            if any(limit < value < page.size and page.size > _MAX_LONG_PAGE_BYTES for page, value in longest):
                long.append(name)
            elif values * _MAX_ROWS <= _MAX_SHARED_BYTES or not _is_text(schema.field(name).type):
                copied += values
            else:
                ((page, _),), (chunk,) = longest, chunks[name]
                shared.append(name)
                if page.stored * _PACKED_TIMES < page.size:
                    packed[name] = page.size
                size += _size(chunk, page.size) - _size(chunk)
        if sum(packed.values()) > _MAX_PACKED_BYTES:
            # All of them: each that stays would be in all error rows.
            long += packed
            shared = [name for name in shared if name not in packed]
        rows = min(_MAX_BYTES // max(size // max(group.num_rows, 1), 1), _MAX_SHARED_BYTES // max(copied, 1))
        # Each further batch of a dictionary is a further copy of it.
        yield Part([number], max(1, rows if shared else min(rows, _MAX_ROWS)), long, shared)
    if small:
        yield Part(small, _MAX_ROWS)


def _is_text(kind: pa.DataType) -> bool:
    """Whether a column may be read as a dictionary; nested ones may not have one of two row groups."""
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in TEXTS


def _has_dictionary_inside(kind: pa.DataType) -> bool:
    return any(has(pa.types.is_dictionary, each) for each in inner_types(kind))


def _size(chunk: Any, dictionary: int = 0) -> int:
    """Bytes of its values, without those of a dictionary: runs of one value take none in the file."""
    return max(int(chunk.total_uncompressed_size) - dictionary, int(chunk.num_values) * _VALUE_BYTES)


def _longest(raw: IO[bytes], chunk: Any) -> tuple[Page, int]:
    """The dictionary of a chunk of texts, and the bytes of its longest one; an empty one and 0 without a dictionary."""
    if not chunk.has_dictionary_page or chunk.physical_type != "BYTE_ARRAY":
        return _NO_DICTIONARY, 0
    page = next(pages(raw, chunk))
    if page.size * _MAX_ROWS <= _MAX_SHARED_BYTES:
        return page, page.size
    return page, longest_value(raw, chunk, page)


def _is_long(raw: IO[bytes], chunk: Any, num_rows: int, limit: int) -> bool:
    """Whether a chunk has a page that memory has no room for, or more values than its rows may have."""
    if chunk.num_values > num_rows and chunk.num_values * _VALUE_BYTES > limit * num_rows:
        return True
    if chunk.total_uncompressed_size <= _MAX_PAGE_BYTES:
        return False
    return any(page.size > max(_MAX_PAGE_BYTES, _PAGE_TIMES * page.stored) for page in pages(raw, chunk))
