"""What a file holds: by its name and, where these are known, by its first bytes."""

from typing import Literal, NamedTuple

Kind = Literal["lines", "json", "parquet", "arrow", "csv", "image", "pdf"]
Compression = Literal["gzip", "zstd", "bz2", "xz"]

# What holds JSON: lines, or with "json" perhaps an array.
JSON_KINDS: tuple[Kind, ...] = ("lines", "json")
TABLES: tuple[Kind, ...] = ("parquet", "arrow", "csv")
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_PACKED: dict[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
}
# A frame of zstd that readers skip; some writers begin with one.
_SKIPPED = tuple(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))
_BINARY: dict[bytes, Kind] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
MAGIC_BYTES = 8

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc")
CSV = (".csv", ".tsv")
JSONL = (".jsonl", ".ndjson", ".jsonlines")
JSON = (".json",)
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg")
IMAGES = (*_JPEG, ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PDF = ".pdf"
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(JSONL, "lines"),
    **dict.fromkeys(JSON, "json"),
    **dict.fromkeys(PARQUET, "parquet"),
    **dict.fromkeys(ARROW, "arrow"),
    **dict.fromkeys(CSV, "csv"),
}
# Text can be compressed as a whole; Parquet and Arrow compress their own columns.
READ = (*_KINDS, *(text + packed for text in (*JSONL, *JSON, *CSV) for packed in COMPRESSIONS))


class Named(NamedTuple):
    """What the name of a file says.

    Attributes:
        kind: None if the extension is none of ours.
        compression: of the whole file.
        separator: of the cells of a CSV file.
    """

    kind: Kind | None
    compression: Compression | None
    separator: str


def named(name: str) -> Named:
    """The format of a file by its name: ``answers.jsonl.gz`` holds lines, and is compressed with gzip."""
    name = name.lower()
    ending = next((each for each in COMPRESSIONS if name.endswith(each)), "")
    stem = name.removesuffix(ending)
    kind = next((kind for suffix, kind in _KINDS.items() if stem.endswith(suffix)), None)
    return Named(kind, COMPRESSIONS.get(ending), "\t" if stem.endswith(".tsv") else ",")


def compression_of(head: bytes) -> Compression | None:
    """How a file with these first bytes is compressed."""
    if head.startswith(_SKIPPED):
        return "zstd"
    return next((found for magic, found in _PACKED.items() if head.startswith(magic)), None)


def table_of(head: bytes) -> Kind | None:
    """The kind of a table that begins with these bytes; None for text."""
    return next((kind for magic, kind in _BINARY.items() if head.startswith(magic)), None)
