"""Sizes in bytes, as people write them."""

import re

from rosebatch.core.errors import FlagError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_size(text: str, name: str = "a size") -> int:
    """Bytes of ``512MiB``, ``4GB`` or a plain number.

    Args:
        text: as people write it.
        name: of the setting, for messages.

    Raises:
        FlagError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise FlagError(f"{name} must be like 512MiB or 4GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def in_bytes(size: str | int, name: str = "a size") -> int:
    """A size as the command line or Python gives it, in bytes; see ``parse_size``.

    Raises:
        FlagError: it is no size.
    """
    return parse_size(size, name) if isinstance(size, str) else size
