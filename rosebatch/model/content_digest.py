"""SHA-256 of whole files by several threads. Digests of large files are remembered, so the next run does not read them.

They are in ``$XDG_CACHE_HOME/rosebatch/digests`` (default ``~/.cache/rosebatch/digests``), one small file for each
inode.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rosebatch.host.cache_folder import cache_folder
from rosebatch.host.file_state import FileState
from rosebatch.host.threads import DaemonPool, usable_cores

# One thread hashes a piece. About 60 ms with SHA instructions.
_PIECE = 2**26
_BUFFER = 2**20
_MAX_THREADS = 16
# Smaller files are hashed each time, in less than 20 ms.
_REMEMBERED = 2**24


def content_digests(paths: Sequence[Path]) -> list[str]:
    """A digest of each file's contents: SHA-256 of the SHA-256 digests of its pieces of 64 MiB.

    Raises:
        OSError: a file cannot be read.
    """
    states = [FileState.of(path) for path in paths]
    known = [_recall(state) for state in states]
    pieces = [
        (path, offset)
        for path, state, digest in zip(paths, states, known, strict=True)
        if digest is None
        for offset in range(0, max(state.size, 1), _PIECE)
    ]
    hashed = dict(zip(pieces, _hash_all(pieces), strict=True))
    digests = []
    for path, state, digest in zip(paths, states, known, strict=True):
        if digest is None:
            own = b"".join(hashed[path, offset] for offset in range(0, max(state.size, 1), _PIECE))
            digest = hashlib.sha256(own).hexdigest()
            if state.settled and FileState.of(path) == state:
                _remember(state, digest)
        digests.append(digest)
    return digests


def _hash_all(pieces: Sequence[tuple[Path, int]]) -> list[bytes]:
    """SHA-256 of each piece. An error elsewhere does not wait for these threads."""
    with DaemonPool(min(usable_cores(), _MAX_THREADS), "rosebatch-digest") as pool:
        return list(pool.map(lambda piece: _hash_piece(*piece), pieces))


def _hash_piece(path: Path, offset: int) -> bytes:
    found, buffer, left = hashlib.sha256(), memoryview(bytearray(_BUFFER)), _PIECE
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left and (count := file.readinto(buffer[:left])):
            found.update(buffer[:count])
            left -= count
    return found.digest()


def digests_dir() -> Path:
    """The folder of remembered digests; it may not exist."""
    return cache_folder("digests")


def _memo(state: FileState) -> Path:
    return digests_dir() / f"{state.device:x}-{state.inode:x}"


def _recall(state: FileState) -> str | None:
    """The digest of a file in this state, if it is known."""
    with suppress(OSError, RuntimeError, ValueError, AttributeError):
        digest, _, entry = _memo(state).read_text(encoding="ascii").partition(" ")
        if entry == _entry(state, digest):
            return digest
    return None


def _remember(state: FileState, digest: str) -> None:
    # Without a home, or with a full or read-only one, each run hashes the file. A torn memo is no memo.
    with suppress(OSError, RuntimeError):
        if state.size >= _REMEMBERED:
            memo = _memo(state)
            memo.parent.mkdir(parents=True, exist_ok=True)
            unfinished = memo.with_suffix(f".{os.getpid()}")
            unfinished.write_text(f"{digest} {_entry(state, digest)}", encoding="ascii")
            unfinished.replace(memo)


def _entry(state: FileState, digest: str) -> str:
    """What a memo has next to the digest: the file's state, and a checksum of both."""
    text = json.dumps(state)
    return f"{text} {hashlib.sha256(f'{digest} {text}'.encode()).hexdigest()}"
