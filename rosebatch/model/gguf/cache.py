"""The cache of converted .gguf files, in ``$XDG_CACHE_HOME/rosebatch/gguf`` (default ``~/.cache/rosebatch/gguf``).

Each model is a folder ``NAME-KEY``. The key is a hash of the content of the file, the dtype and the version of the
converter, so copies of a file share one conversion and a changed file never gets the weights of its old content.
A damaged conversion is found by its checksums and replaced.
"""

import fcntl
import hashlib
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rosebatch.core.errors import UserError
from rosebatch.host.cache_folder import cache_folder
from rosebatch.host.ending_signals import before_the_end
from rosebatch.host.sync import sync
from rosebatch.model import checksums
from rosebatch.model.content_digest import content_digests, digests_dir

# Listing the cache does not need it.
if TYPE_CHECKING:
    import torch

_LOCK = ".lock"
_OTHER_FOLDER = "make room, or let XDG_CACHE_HOME name a folder with room for the weights"
# Folders that are being written or deleted.
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A converted model: the name of its folder, and its size in bytes."""

    name: str
    num_bytes: int


def cache_dir() -> Path:
    """The folder of all converted models; it may not exist."""
    return cache_folder("gguf")


def converted_folder(path: Path, dtype: "torch.dtype") -> Path:
    """The transformers folder of a .gguf file in ``dtype``. The first call converts the file.

    A conversion that is damaged is made anew, with a warning on stderr.

    Raises:
        UserError: the file is broken or its model is not supported, or the cache cannot be written.
    """
    from rosebatch.model.gguf.convert import CONVERTER_VERSION

    try:
        cache = cache_dir()
        cache.mkdir(parents=True, exist_ok=True)
        # Any changed byte, of weights or metadata, has to change the key.
        parts = [*content_digests([path]), str(dtype), CONVERTER_VERSION]
        key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
        found = next(cache.glob(f"*-{key}"), None)
        _sweep(cache)
        if found is not None and checksums.is_intact(found):
            return found
        return _convert(path, dtype, found or cache / f"{path.stem}-{key}")
    except OSError as error:
        raise UserError(f"{path}: cannot convert the model ({error}); {_OTHER_FOLDER}") from None


def may_be_converted(path: Path) -> bool:
    """Whether the cache may have a .gguf file. That is found by its name, without reading it."""
    return any(cache_dir().glob(f"{escape(path.stem)}-*"))


def cached_models() -> list[CachedModel]:
    """All converted models, by name."""
    cache = cache_dir()
    folders = sorted(f for f in cache.iterdir() if not f.name.startswith(".")) if cache.is_dir() else []
    return [CachedModel(folder.name, _num_bytes(folder)) for folder in folders]


def clear_cache() -> int:
    """Delete all converted models, what failed conversions have left and remembered digests of weights.

    A running conversion stays.

    Returns:
        the bytes freed.

    Raises:
        UserError: something cannot be deleted.
    """
    cache, digests = cache_dir(), digests_dir()
    try:
        freed = _delete(digests) if digests.is_dir() else 0
        if not cache.is_dir():
            return freed
        with _locked(cache, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
            entries = [e for e in cache.iterdir() if e.name != _LOCK and (alone or not e.name.startswith(_TEMPORARY))]
            return freed + sum(_delete(entry) for entry in entries)
    except OSError as error:
        raise UserError(f"{cache}: cannot clear the cache ({error}); delete that folder") from None


def _convert(path: Path, dtype: "torch.dtype", folder: Path) -> Path:
    """Convert a file into a new folder, which appears complete or not at all, and replaces a damaged one."""
    from rosebatch.model.gguf.convert import convert

    with _locked(folder.parent, fcntl.LOCK_SH):
        # Another process may have replaced it by now.
        if folder.exists() and not checksums.is_intact(folder):
            if sys.stderr is not None:
                sys.stderr.write(f"rosebatch: warning: {folder}: the converted model is damaged; converting again\n")
            _delete(folder)
        working = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder.parent))
        remove = partial(shutil.rmtree, working, ignore_errors=True)
        try:
            with before_the_end(remove):
                convert(path, dtype, working)
                checksums.seal(working)
            try:
                working.rename(folder)
            except OSError:
                # Another process was faster; its folder is as good.
                if not folder.exists():
                    raise
            sync(folder.parent)
        finally:
            remove()
    return folder


def _sweep(cache: Path) -> None:
    """Delete what killed conversions have left, unless a conversion is running."""
    left = list(cache.glob(f"{_TEMPORARY}*"))
    if left:
        # The cache may be read-only.
        with suppress(OSError), _locked(cache, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
            for each in left if alone else ():
                shutil.rmtree(each, ignore_errors=True)


@contextmanager
def _locked(cache: Path, kind: int) -> Iterator[bool]:
    """Hold the lock of the cache: conversions share it, clearing takes it alone. Yields False without the lock."""
    with (cache / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file, kind)
            held = True
        except OSError:
            # Another process has it, or the file system has no locks.
            held = False
        yield held


def _delete(entry: Path) -> int:
    """Delete a file or folder; returns its size in bytes.

    It is renamed first: a run that starts meanwhile finds a complete folder or none. No folder is made for that: a
    full disk may have no room for one.
    """
    trash = entry.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
    # Another process may have deleted it already.
    with suppress(FileNotFoundError):
        entry.rename(trash)
        freed = _num_bytes(trash)
        if trash.is_dir():
            shutil.rmtree(trash)
        else:
            trash.unlink()
        return freed
    return 0


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder, *folder.rglob("*")) if file.is_file())
