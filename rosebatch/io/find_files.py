"""Which files an input means: a path, a URL, a folder or a pattern."""

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rosebatch.core.errors import UserError
from rosebatch.io.files import as_path, failing, file_name, is_url, remote, url_identity
from rosebatch.io.formats import READ, named
from rosebatch.io.hive import is_partition
from rosebatch.io.saved_datasets import DESCRIPTIONS, STATE, saved_files
from rosebatch.io.unsupported_formats import WAY_OF_IMAGES, is_unsupported_data, is_visible, require_all_read

WILD = "*?["
_IF_A_PROMPT = """; a prompt itself goes to stdin: echo '{"prompt": "…"}' | rosebatch generate -"""
# A folder, its folders and its files.
_Walked = tuple[str, list[str], list[str]]
# A whole repository. Splits and configurations have folders of their own there.
_DATASET = re.compile(r"hf://datasets/[^/]+/[^/]+/?")


def find_files(source: str) -> list[str]:
    """The files of a source, in the order of their names; those of a saved data set, in its own order.

    Args:
        source: a path or URL of a file, a folder or a glob; ``-`` for stdin. A folder means the files in it that
            are read, and those in its folders with names such as ``year=2024``, without those whose names begin with
            ``.`` or ``_``; a data set on the Hub, for those at any depth.

    Raises:
        UserError: there are no files, a folder is unreadable, or has data in files that are not read.
    """
    source = as_path(source)
    try:
        paths = _find_remote(source) if is_url(source) else _find_local(source)
    except OSError as error:
        raise UserError(f"{error.filename or source}: {error.strerror or error}") from None
    if paths is None:
        return [source]
    if not paths:
        raise UserError(
            f"{source}: no files found; a folder needs .jsonl, .json, .csv, .parquet or .arrow files, a pattern must "
            f"match some, and images need {WAY_OF_IMAGES}"
        )
    return paths


def would_find(source: str, path: str) -> bool:
    """Whether a folder or glob would read a file, once it is there, or refuse it. Both are local, or both are URLs."""
    source = as_path(source)
    if is_url(source):
        source, path = source.rstrip("/"), url_identity(path)
        is_folder = not any(mark in source.partition("?")[0] for mark in WILD)
        source = url_identity(source)
    else:
        is_folder = Path(source).is_dir()
        if not is_folder and Path(source).exists():
            return False
        source, path = _real_pattern(source), os.path.realpath(path)
    if not is_folder:
        return _matches(path.split("/"), source.split("/"))
    inside = path.removeprefix(f"{source}/").split("/")
    # In the folder itself, and in its partitions, .json files are rows, too.
    here = all(map(is_partition, inside[:-1])) and (_wanted(inside[-1]) or is_unsupported_data(inside[-1]))
    return path.startswith(f"{source}/") and all(map(is_visible, inside)) and (here or _is_data(inside[-1]))


def _find_local(source: str) -> list[str] | None:
    """The files that a path names; None if the source is itself a file, a pipe or a device."""
    path = Path(source)
    if path.is_dir():

        def listed(folder: str) -> dict[str, bool]:
            return {each.name: each.is_dir() for each in Path(folder).iterdir()}

        return _in_folder(str(path), listed, os.walk, lambda file: Path(file).read_bytes())
    if source == "-" or path.exists():
        return None
    if any(mark in source for mark in WILD):
        # pathlib's glob refuses absolute patterns.
        return sorted(each for each in glob.glob(source, recursive=True) if not Path(each).is_dir())  # noqa: PTH207
    raise UserError(f"{source}: no such file or folder{_IF_A_PROMPT if ' ' in source else ''}")


def _find_remote(source: str) -> list[str] | None:
    """The same for a URL."""
    file_system, inside = remote(source)
    with failing(lambda why: UserError(f"{source}: {why}")):
        if any(mark in source.partition("?")[0] for mark in WILD):
            # Like a shell's pattern, it does not match hidden files.
            paths = sorted(each for each in file_system.glob(inside) if not each.rpartition("/")[2].startswith("."))
        elif file_name(source).lower().endswith(READ) and file_system.exists(inside):
            return None
        elif _DATASET.fullmatch(source):
            found = sorted(file_system.find(inside))
            paths = [path for path in found if _in_dataset(path.removeprefix(inside).strip("/"))]
        elif file_system.isdir(inside):

            def listed(folder: str) -> dict[str, bool]:
                files = file_system.ls(folder, detail=True)
                return {file_name(each["name"].rstrip("/")): each["type"] == "directory" for each in files}

            paths = _in_folder(inside.rstrip("/"), listed, file_system.walk, file_system.cat_file, source.rstrip("/"))
        else:
            # Unlike exists(), it raises if the file system cannot be reached.
            with suppress(FileNotFoundError):
                file_system.info(inside)
                return None
            raise UserError(f"{source}: no such file or folder")
    return [file_system.unstrip_protocol(each) for each in paths]


def _in_folder(
    folder: str,
    listed: Callable[[str], dict[str, bool]],
    walk: Callable[[str], Iterable[_Walked]],
    read: Callable[[str], bytes],
    shown: str | None = None,
) -> list[str]:
    """The files of a folder, and of its folders that are partitions.

    Args:
        folder: its path.
        listed: the names in a folder, and whether each is a folder itself.
        walk: as ``os.walk``.
        read: gives the contents of a file.
        shown: the folder in messages, if it has another name there.
    """
    shown, found = shown or folder, listed(folder)
    names = [name for name, is_folder in found.items() if not is_folder]
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        raise UserError(f"{shown}: is a model, which --model names: INPUT is a file of prompts")
    saved = saved_files(shown, names, lambda name: read(f"{folder}/{name}"))
    if saved is not None:
        return [f"{folder}/{name}" for name in saved]
    folders = [name for name in found if found[name] and is_visible(name)]
    inner = list(filter(is_partition, folders))
    unread = [name for name in folders if name not in inner and _holds_data(walk(f"{folder}/{name}"))]
    wanted = list(filter(_wanted, names))
    require_all_read(shown, names, unread, _pattern(shown, wanted))
    paths = [f"{folder}/{name}" for name in wanted]
    for name in inner:
        paths += _in_folder(f"{folder}/{name}", listed, walk, read, f"{shown}/{name}")
    return sorted(paths)


def _in_dataset(path: str) -> bool:
    """Whether a file of a data set's repository holds rows, by its path there."""
    *folders, name = path.split("/")
    return all(map(is_visible, folders)) and _wanted(name) and name != STATE


def _wanted(name: str) -> bool:
    return name.lower().endswith(READ) and is_visible(name) and name not in DESCRIPTIONS


def _is_data(name: str) -> bool:
    """Whether a file in an inner folder is rows of a user, rather than the settings of a model."""
    return (_wanted(name) and named(name).kind != "json") or is_unsupported_data(name)


def _holds_data(walked: Iterable[_Walked]) -> bool:
    """Whether a folder has data at any depth, from what ``os.walk`` gives for it. It ends with the first file."""
    for _, folders, names in walked:
        folders[:] = filter(is_visible, folders)
        if any(map(_is_data, names)):
            return True
    return False


def _pattern(folder: str, wanted: Sequence[str]) -> str:
    """A pattern of the files that are read, for messages."""
    first = min(wanted, default=".jsonl").lower()
    return f"'{folder}/*{next((each for each in READ if first.endswith(each)), '.jsonl')}'"


def fixed_part(pattern: str) -> str:
    """The folder of a local pattern that is before its first wild part, with links followed."""
    parts = _absolute(pattern)
    return os.path.realpath("/".join(parts[: _first_wild(parts)]) or "/")


def _real_pattern(pattern: str) -> str:
    """A local pattern with links followed, as far as it names a folder."""
    parts = _absolute(pattern)
    return "/".join([fixed_part(pattern).rstrip("/"), *parts[_first_wild(parts) :]])


def _absolute(pattern: str) -> list[str]:
    return os.path.abspath(pattern).split("/")  # noqa: PTH100


def _first_wild(parts: Sequence[str]) -> int:
    return next((place for place, part in enumerate(parts) if any(mark in part for mark in WILD)), len(parts))


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Whether a glob matches a path, both split at slashes. Only a part with a leading dot matches hidden names."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        hidden = next((place for place, part in enumerate(parts) if part.startswith(".")), len(parts))
        return any(_matches(parts[place:], pattern[1:]) for place in range(hidden + 1))
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
