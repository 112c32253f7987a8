"""Modules that a config lists as plain: a check, because the tensors say what is quantized."""

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from rosebatch.core.errors import UserError

# Whether an entry of a list names a module.
Matches = Callable[[str, str], bool]


def require_unlisted(field: str, entries: Iterable[str], module: str, matches: Matches) -> None:
    """Check that no entry names a module that is quantized.

    Args:
        field: of the config, for people.
        entries: of this field.
        module: that is quantized.
        matches: an entry and a module -> whether it is named.

    Raises:
        UserError: one does.
    """
    for entry in entries:
        if matches(entry, module):
            raise UserError(f"quantization_config: {field} has {entry!r}, and {module} is quantized")


def by_parts(entry: str, module: str) -> bool:
    """A whole name, or neighbouring parts of it between dots."""
    # The first test is for time: large models have thousands of modules, and lists of hundreds.
    return entry in module and f".{entry}." in f".{module}."


def by_regex(entry: str, module: str) -> bool:
    """The whole name, or ``re:`` and a pattern that it begins with."""
    return bool(re.match(entry[3:], module)) if entry.startswith("re:") else entry == module


def by_glob(entry: str, module: str) -> bool:
    """The whole name; ``*`` stands for anything."""
    return fnmatchcase(module, entry)
