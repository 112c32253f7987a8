"""Result rows as CSV. A cell is a text as it is, or any other value as JSON; null is an empty cell."""

from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.csv as pc

from rosebatch.io.compressed import open_compressed
from rosebatch.io.formats import named
from rosebatch.io.parquet import FIELDS, Rows, chunks
from rosebatch.io.parquet_types import OPTIONAL_FIELDS

_TEXT, _NULL = b'"', b"null"


def write_csv(path: Path, rows: Rows, *, name: str, own: Collection[str], columns: Iterable[str] = ()) -> None:
    """Write one file. A first pass over the rows finds the names of the columns, a second one writes.

    Args:
        path: the file.
        rows: the results, with the carried fields. Memory holds one chunk of them.
        name: of the file in the end; it says the separator and the compression.
        own: names of the result's fields.
        columns: names of carried fields, as far as the input says them.

    Raises:
        OSError: the file cannot be written.
    """
    found = dict.fromkeys(chain(columns, chain.from_iterable(map(FIELDS.decode, rows()))))
    carried = [each for each in found if each not in own]
    results = [each for each in own if each in found or each not in OPTIONAL_FIELDS]
    schema = pa.schema([(each, pa.string()) for each in (*carried, *results)])
    # All texts are quoted, so an empty one is no null.
    options = pc.WriteOptions(delimiter=named(name).separator)
    with (
        open_compressed(path, named(name).compression) as file,
        pc.CSVWriter(file, schema, write_options=options) as writer,
    ):
        for chunk in chunks((row, ({}, 0)) for row in rows()):
            cells = [{key: _cell(value) for key, value in FIELDS.decode(row).items()} for row, _ in chunk]
            writer.write_table(pa.Table.from_pylist(cells, schema))


def _cell(value: msgspec.Raw) -> str | None:
    encoded = bytes(value)
    if encoded == _NULL:
        return None
    return msgspec.json.decode(encoded, type=str) if encoded.startswith(_TEXT) else encoded.decode()
