"""Checksums of the files of a folder, in a file next to them: a disk may damage what it keeps."""

import json
import os
import zlib
from pathlib import Path

from rosebatch.host.sync import sync
from rosebatch.host.threads import DaemonPool

SUMS = ".checksums"
# Bytes that one thread sums at a time.
_CHUNK = 16 << 20
_THREADS = 8


def seal(folder: Path) -> None:
    """Write the checksums of all files in ``folder``, and everything to the disk.

    Raises:
        OSError: the disk is full, or fails.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = _sums(folder, [path.relative_to(folder).as_posix() for path in files])
    (folder / SUMS).write_text(json.dumps(sums) + "\n", encoding="utf-8")
    for path in (*files, folder / SUMS, folder):
        sync(path)


def is_intact(folder: Path) -> bool:
    """Whether the files that were sealed are as they were."""
    try:
        stored = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        return bool(_sums(folder, list(stored)) == stored)
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _sums(folder: Path, names: list[str]) -> dict[str, list[int]]:
    """For each file, the CRC-32 of each of its chunks, the last of which may be short or empty."""
    chunks = [(name, at) for name in names for at in range(0, (folder / name).stat().st_size + 1, _CHUNK)]
    with DaemonPool(min(_THREADS, os.cpu_count() or 1), "rosebatch-checksum") as pool:
        sums = pool.map(lambda chunk: _crc(folder / chunk[0], chunk[1]), chunks)
        found: dict[str, list[int]] = {}
        for (name, _), crc in zip(chunks, sums, strict=True):
            found.setdefault(name, []).append(crc)
    return found


def _crc(path: Path, at: int) -> int:
    with path.open("rb") as file:
        file.seek(at)
        return zlib.crc32(file.read(_CHUNK))
