"""Files of data in formats that are not read. Each is named in an error, for skipping it would lose its rows."""

import re
from collections.abc import Iterable, Mapping

from rosebatch.core.errors import UserError
from rosebatch.io.formats import COMPRESSIONS, READ, Kind, table_of

# A row of a list is one bad row; an array of objects makes all lines bad.
_ARRAY = re.compile(rb"\[\s*(\{|$)")
_PACKED = (".bgz", ".lz4", ".br", ".snappy", ".zip", ".tar", ".tgz", ".7z")
_TABLES = (".xls", ".xlsx", ".ods", ".orc", ".avro")
_OF_PROGRAMS = (".npy", ".npz", ".pkl", ".pickle", ".pt", ".safetensors", ".h5", ".hdf5", ".db", ".sqlite", ".gguf")
# What an output cannot be named after: it would be plain JSONL under that name.
NOT_WRITTEN = (*_PACKED, *_TABLES, *_OF_PROGRAMS)

# How files begin that hold no lines of text.
_MAGIC = {
    b"PK\x03\x04": "a zip archive or a spreadsheet",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf": "a 7z archive",
    b"\xd0\xcf\x11\xe0": "an old spreadsheet",
    b"Obj\x01": "Avro",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF",
    b"SQLite f": "an SQLite database",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "HDF5",
    b"GGUF": "a model in GGUF",
    b"<!DOCTYP": "an HTML page",
    b"<html": "an HTML page",
    b"<?xml": "XML",
}

_SHOWN = {"parquet": "Parquet", "arrow": "Arrow", "jsonl": "JSON", "json": "JSON"}
_MAX_NAMES = 5
WAY_OF_IMAGES = "rosebatch generate or embed with --prompt 'What is this?', and no --image-column"
_WAY_OUT = "convert them to .jsonl or .parquet"
_ARE_READ = "only JSON, CSV, Parquet and Arrow are read, text also as .gz, .zst, .bz2 or .xz"


def is_visible(name: str) -> bool:
    """Whether a file or folder counts. Names with a leading dot or underscore are for marks and unfinished files."""
    return not name.startswith((".", "_"))


def is_unsupported_data(name: str) -> bool:
    """Whether a file holds data in a format that is not read."""
    name = name.lower()
    return is_visible(name) and not name.endswith(READ) and name.endswith((*COMPRESSIONS, *_PACKED, *_TABLES))


def require_all_read(source: str, names: Iterable[str], folders: Iterable[str], pattern: str) -> None:
    """Check that a folder has no data that is skipped.

    Args:
        source: the folder, for the message.
        names: of its files.
        folders: its folders that hold data.
        pattern: chooses the files that are read, for the message.

    Raises:
        UserError: it has some.
    """
    unread = sorted(filter(is_unsupported_data, names))
    if inner := sorted(folders):
        deep = pattern.replace("/*", "/**/*")
        raise UserError(
            f"{source}: {listed([f'{name}/' for name in inner])} would not be read; give {pattern} or {deep}"
        )
    if unread:
        raise UserError(
            f"{source}: {listed(unread)} would not be read; {_WAY_OUT}, or give a pattern such as {pattern}"
        )


def kind_of(name: str, head: bytes, *, by_name: bool) -> str | None:
    """What a file holds that is no JSONL; None if it may be JSONL.

    Args:
        name: of the file.
        head: its first bytes, ``b""`` if they are not known.
        by_name: trust the extension where the first bytes say nothing.
    """
    found = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    suffix = next((each for each in (*_PACKED, *_TABLES) if name.lower().endswith(each)), None)
    # The text of a compressed file that is none can be read.
    if found is None and by_name and suffix and (suffix in _TABLES or not head):
        return suffix
    return found


def require_kind(path: str, kind: Kind, head: bytes) -> None:
    """Check that a file is no table of another kind than its name or the flag says, and a table no JSON.

    Args:
        path: of the file.
        kind: what it should hold.
        head: its first bytes, ``b""`` if they are not known.

    Raises:
        UserError: it is.
    """
    found: str | None = table_of(head)
    if found is None and kind in ("parquet", "arrow") and head.lstrip().startswith((b"{", b"[")):
        found = "jsonl" if head.lstrip().startswith(b"{") else "json"
    if found not in (None, kind):
        raise UserError(f"{path} is {_SHOWN[found]}, which needs --input-format {found}")


def require_lines(kinds: Mapping[str, str | None]) -> None:
    """Check that every file may be JSONL.

    Args:
        kinds: of each path, see ``kind_of``.

    Raises:
        UserError: some are not.
    """
    unread = [f"{path} is {kind}" for path, kind in kinds.items() if kind]
    if unread:
        of_images = any(kind and kind.endswith(("image", "PDF")) for kind in kinds.values())
        way = f"images and PDFs need {WAY_OF_IMAGES}" if of_images else f"{_ARE_READ}; {_WAY_OUT}"
        raise UserError(f"{listed(unread)}: {way}")


def require_objects(path: str, lines: Iterable[bytes]) -> None:
    """Check that a file of text may have rows: that some of its first lines begin as JSON objects or arrays do.

    Args:
        path: of the file.
        lines: the first ones that are not blank.

    Raises:
        UserError: none does, the first object is on several lines, or all are in an array.
    """
    lines = list(lines)
    require_no_array(path, b"".join(lines[:1]))
    if lines[:1] == [b"{"] and not any(line.startswith(b"{") and line.endswith(b"}") for line in lines):
        whole = f"jq -c . {path} > prompts.jsonl"
        raise UserError(f"{path}: is JSON on several lines, but a row is one JSON object on a line: {whole}")
    if lines and not any(line.startswith((b"{", b"[")) for line in lines):
        if any(b"\0" in line for line in lines):
            raise UserError(f"{path} is no text: {_ARE_READ}; {_WAY_OUT}")
        raw = "" if lines[0].startswith(b'"') else "R"
        way = f"if each line is a prompt: jq -c{raw} '{{prompt: .}}' {path} > prompts.jsonl"
        raise UserError(f'{path}: has no JSON objects, but a row is one on a line: {{"prompt": "…"}}; {way}')


def require_object_items(path: str, items: Iterable[bytes]) -> None:
    """Check that some of the first items of an array begin as JSON objects do.

    Args:
        path: of the file.
        items: as JSON.

    Raises:
        UserError: there are some, and none does.
    """
    items = list(filter(None, map(bytes.strip, items)))
    if items and not any(item.startswith(b"{") for item in items):
        name, what = ("messages", "chat") if items[0].startswith(b"[") else ("prompt", "prompt")
        way = f"if each item is a {what}: jq -c '.[] | {{{name}: .}}' {path} > prompts.jsonl"
        raise UserError(f'{path}: is an array without objects, but a row is one: {{"prompt": "…"}}; {way}')


def require_no_array(path: str, first: bytes) -> None:
    """Check that the first line of a file of lines does not open an array of objects.

    Raises:
        UserError: it does.
    """
    if _ARRAY.match(first):
        raise UserError(f"{path}: begins like a JSON array; if it is, give --input-format json")


def require_no_csv(first: bytes, columns: Iterable[str]) -> None:
    """Check that the first line of stdin is not the header of a CSV file with one of these columns.

    Raises:
        UserError: it is.
    """
    text = first.decode("utf-8", "replace").strip()
    cells = {cell.strip(' "') for cell in text.replace(";", ",").replace("\t", ",").split(",")}
    if not text.startswith("{") and cells & set(columns):
        raise UserError("stdin: begins like CSV; if it is, give --input-format csv")


def listed(names: list[str]) -> str:
    """The first of some names, for messages."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
