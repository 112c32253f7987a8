"""The lines of a part file. Each ends with a CRC-32, so a damaged line never passes for a result.

::

    ["rosebatch part",2,{"created":1790000000,"input":"9f86d081"},"b28bb7a0"]
    [12,0,{"index":12,"text":"Paris."},"89abcdef"]

The first line is the manifest, with the number of this format. Each other line is ``[index,failed,row,checksum]``. A
row's checksum starts from the manifest's: a line of another run counts as damaged. A run that goes on with another
manifest writes ``["rosebatch turn",manifest,checksum]`` before its rows.
"""

import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from rosebatch.core.errors import UserError

FORMAT = 2
_NAME = b'["rosebatch part",'
_BEGIN = _NAME + b"%d," % FORMAT
# How format 1 began.
_OLDEST = b'{"format":1,'
_TURN = b'["rosebatch turn",'
_ROW = re.compile(rb"\[(\d{1,18}),([01]),")
_encode = msgspec.json.Encoder(enc_hook=str).encode
# How a line ends.
_SEAL = b',"%08x"]\n'
_END = 13


@dataclass(frozen=True, slots=True)
class PartEncoder:
    """Makes the lines of one part file, perhaps in another process than the one that writes them.

    Attributes:
        checksum: of the manifest.
        fields: of a row that are kept; None keeps all.
    """

    checksum: int
    fields: Container[str] | None

    def __call__(self, index: int, row: dict[str, Any], *, failed: bool) -> bytes:
        """The line of a row."""
        if self.fields is not None:
            row = {name: value for name, value in row.items() if name in self.fields}
        return encode_row(index, row, self.checksum, failed=failed)


class PartLine(NamedTuple):
    """A row of a part file: its index, whether it is an error row, its JSON."""

    row_index: int
    failed: bool
    row: bytes


def encode_row(index: int, row: dict[str, Any], checksum: int, *, failed: bool) -> bytes:
    """The line of a row. ``checksum`` is that of the manifest."""
    return _sealed(b"[%d,%d,%s" % (index, failed, _encode(row)), checksum)


def decode_row(line: bytes, checksum: int) -> PartLine | None:
    """The row of a line; None if the line is damaged."""
    head = _ROW.match(line)
    if head is None or not _is_whole(line, checksum):
        return None
    return PartLine(int(head[1]), head[2] == b"1", line[head.end() : -_END])


def claimed_index(line: bytes) -> int | None:
    """The index that a line begins with, its checksum unseen; None if it begins otherwise."""
    head = _ROW.match(line)
    return None if head is None else int(head[1])


def encode_manifest(manifest: dict[str, Any]) -> bytes:
    """The first line of a part file."""
    return _sealed(_BEGIN + msgspec.json.encode(manifest))


def decode_manifest(line: bytes, path: Path) -> dict[str, Any]:
    """The manifest in the first line of a part file.

    Raises:
        UserError: the line is damaged or of another format, or the file is no part file.
    """
    if line.startswith(_OLDEST) or (line.startswith(_NAME) and not line.startswith(_BEGIN)):
        raise UserError(f"{path}: another version of rosebatch wrote it; continue with that version, or delete it")
    if not line.startswith(_BEGIN):
        raise UserError(f"{path}: is not a part file of rosebatch; delete it or choose another output")
    if not _is_whole(line):
        raise UserError(f"{path}: its first line is damaged, so its rows cannot be used; delete it to start again")
    return msgspec.json.decode(line[len(_BEGIN) : -_END], type=dict[str, Any])


def encode_turn(manifest: dict[str, Any], checksum: int) -> bytes:
    """The line of a run that goes on with another manifest. ``checksum`` is that of the first one."""
    return _sealed(_TURN + msgspec.json.encode(manifest), checksum)


def decode_turn(line: bytes, checksum: int) -> dict[str, Any] | None:
    """The manifest of such a line; None for another line, or a damaged one."""
    if not line.startswith(_TURN) or not _is_whole(line, checksum):
        return None
    return msgspec.json.decode(line[len(_TURN) : -_END], type=dict[str, Any])


def manifest_checksum(line: bytes) -> int:
    """The checksum that rows start from."""
    return crc32(line)


def begins_part_file(head: bytes) -> bool:
    """Whether a file with these first bytes may be a part file, of any version of rosebatch, perhaps torn."""
    return head.startswith((_NAME, _OLDEST)) or is_torn_manifest(head)


def is_torn_manifest(content: bytes) -> bool:
    """Whether a file without a whole line is empty, or what a crash left of a manifest.

    After a power cut a file may have its new size, but zeros in place of its contents.
    """
    begun = content.rstrip(b"\0")
    return begun.startswith(_BEGIN) or _BEGIN.startswith(begun)


def _sealed(line: bytes, checksum: int = 0) -> bytes:
    return line + _SEAL % crc32(line, checksum)


def _is_whole(line: bytes, checksum: int = 0) -> bool:
    # Without a copy of a line that may be long.
    return line[-_END:] == _SEAL % crc32(memoryview(line)[:-_END], checksum)
