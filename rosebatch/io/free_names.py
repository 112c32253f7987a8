"""Whether the fields of an input have names that results need for themselves, and those that flags name."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa

from rosebatch.core.errors import FlagError
from rosebatch.io.columns import Columns
from rosebatch.io.result_names import collision_message, collisions, in_order, reserved_names

_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
# Fields that a message names.
_MAX_SEEN = 100
# The names of a line's fields. The values are only skipped.
_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class TakenNames:
    """The names that were found so far, each with the first place of it.

    Args:
        result_column: see ``rosebatch.io.result_names``.
        columns: which fields results take over. No others can collide.
        names: the fields of a result.
        prompts: the fields of which a row has one.

    Attributes:
        absent: fields that ``--columns`` and ``--id-column`` name, and that were not met yet.
    """

    def __init__(
        self, result_column: str | None, columns: Columns, names: Sequence[str], prompts: Sequence[str]
    ) -> None:
        self._result_column = result_column
        self._columns = columns
        self._names = names
        self._prompts = prompts
        self._reserved = reserved_names(result_column, names)
        self._found: dict[str, str] = {}
        # Until a line may have a prompt, the fields of all lines, and where the first one has rows inside.
        self._without_prompt: dict[str, None] | None = {}
        self._inside: str | None = None
        self.absent = {name for name in (*(columns.carried or ()), columns.id) if name is not None}

    def add_table(self, schema: pa.Schema, path: str) -> None:
        """Look at the columns of a file."""
        types: dict[str, Any] = {field.name: [] if isinstance(field.type, _LISTS) else None for field in schema}
        self.absent.difference_update(types)
        self._add(types, path, is_table=True)

    def add_line(self, line: bytes, file: str, number: int) -> None:
        """Look at a line. A broken one has no names; it fails by itself."""
        try:
            names = _NAMES.decode(line)
            if self.absent:
                self.absent.difference_update(names)
            if (seen := self._without_prompt) is not None:
                if self._columns.may_have_prompt(names, self._prompts):
                    self._without_prompt = None
                elif len(seen) < _MAX_SEEN:
                    if not seen:
                        self._inside = self._rows_inside(names)
                    seen |= dict.fromkeys(names)
            if not self._reserved.isdisjoint(names):
                self._add(msgspec.json.decode(line), f"{file}{number}", is_table=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return

    def require_prompts(self, source: str) -> None:
        """Check that some line may have a prompt, unless there is none that can be read.

        Raises:
            FlagError: none has. The fields of all lines are in the message.
        """
        if self._without_prompt:
            jq = self._inside and f"jq -c {shlex.quote(self._inside)} {shlex.quote(source)} > prompts.jsonl"
            way = jq and f"rows are inside of one: {jq}"
            self._columns.require_in(list(self._without_prompt), source, self._prompts, way)

    def _rows_inside(self, names: Mapping[str, msgspec.Raw]) -> str | None:
        """What jq calls the rows inside of an object: in a list, or each as a field. None without any."""
        for name, raw in names.items():
            with suppress(msgspec.DecodeError):
                items = _ITEMS.decode(raw)
                if items and self._columns.may_have_prompt(items[0], self._prompts):
                    return (
                        f".{name}[]"
                        if name.isascii() and name.isidentifier()
                        else f".[{msgspec.json.encode(name).decode()}][]"
                    )
        with suppress(msgspec.DecodeError):
            if names and all(
                self._columns.may_have_prompt(_NAMES.decode(raw), self._prompts) for raw in names.values()
            ):
                return ".[]"
        return None

    def _add(self, values: Mapping[str, Any], where: str, *, is_table: bool) -> None:
        carried = {name: value for name, value in values.items() if self._columns.carries(name, is_table=is_table)}
        for name in collisions(carried, self._result_column, self._names):
            self._found.setdefault(name, where)

    def require_none(self, source: str, path: str) -> None:
        """Check that nothing was found.

        Args:
            source: of the input, for the message.
            path: its first file. A place that is all of this file is not named.

        Raises:
            FlagError: something was. All names are in the message.
        """
        if self._found:
            names = in_order(self._found, self._names)
            where = self._found[names[0]]
            place = source if where == path else f"{source}, {where}"
            raise FlagError(f"{place}: {collision_message(names, self._result_column)}")
