"""Configs from TOML files."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import refusal

ConfigT = TypeVar("ConfigT")


def convert(values: Any, kind: type[ConfigT], source: str) -> ConfigT:
    """Build a config from plain values.

    Raises:
        UserError: an unknown key, a wrong type or an impossible value; ``source`` says where it is.
    """
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise refusal(source, error) from None


def load_toml(path: Path, kind: type[ConfigT]) -> ConfigT:
    """Read a config from a TOML file.

    Raises:
        UserError: the file cannot be read, is no TOML, or does not fit ``kind``.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    return convert(values, kind, str(path))
