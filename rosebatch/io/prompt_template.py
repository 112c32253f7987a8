"""Prompts that are made of a row's columns: ``Summarize: {article}``."""

from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from string import Formatter
from typing import Any

import msgspec

from rosebatch.core.errors import FlagError, RowError


@lru_cache(64)
def parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """A template as texts, each with the name of the column behind it.

    Raises:
        FlagError: a brace stands alone, or a field is more than a name.
    """
    try:
        found = list(Formatter().parse(template))
    except ValueError as error:
        raise FlagError(f"--prompt-template: {error}; a brace of the text itself is written twice") from None
    for _, name, form, conversion in found:
        if name == "" or form or conversion:
            raise FlagError("--prompt-template: a field is the name of a column in braces, such as {text}")
    if all(name is None for _, name, _, _ in found):
        raise FlagError("--prompt-template: has no column, such as {text}, so all prompts would be the same")
    return tuple((text, name) for text, name, _, _ in found)


def names(template: str | None) -> tuple[str, ...]:
    """The columns that a template reads."""
    return () if template is None else tuple(name for _, name in parts(template) if name is not None)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The prompt of a row. What is no text stands there as JSON has it.

    Raises:
        RowError: a column is missing, null or no finite number.
    """
    return "".join(text if name is None else text + _text(name, values) for text, name in parts(template))


def _text(name: str, values: Mapping[str, Any]) -> str:
    value = values.get(name)
    # pandas has NaN where a number is missing, and JSON has neither that nor an infinity.
    if value is None or (isinstance(value, float) and not isfinite(value)):
        what = f"is missing; the row has {', '.join(values) or 'none'}"
        if name in values:
            what = "is null" if value is None else f"is {value}"
        raise RowError("missing_prompt", f"{name}, which --prompt-template names, {what}")
    if isinstance(value, str):
        return value
    encoded = msgspec.json.encode(value, enc_hook=str).decode()
    # Dates and decimals are texts in JSON.
    return encoded if isinstance(value, dict | list) or encoded[0] != '"' else str(msgspec.json.decode(encoded))
