"""The fields of a ``quantization_config``: one of another type is an error that names it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rosebatch.host.model_files import shown

Choice = TypeVar("Choice", bound=str | None)


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of the config. A field that is null counts as absent. All methods raise ValueError.

    Attributes:
        values: of the object.
        path: to the object, for people.
    """

    values: Mapping[str, Any]
    path: str = "quantization_config"

    def get(self, *names: str) -> Any:
        """The first of these fields that there is; None without any."""
        return self.values.get(self._first(names))

    def _first(self, names: Sequence[str]) -> str:
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def unserved(self, name: str, value: object) -> ValueError:
        """The error of a field with this value."""
        what = f"{name} is missing" if value is None else f"{name} {shown(value)} is not supported"
        return ValueError(f"{self.path}: {what}")

    def choice(self, name: str, served: Sequence[Choice]) -> Choice:
        """One of these values."""
        value: Choice = self.get(name)
        if value not in served:
            raise self.unserved(name, value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise self.unserved(name, value)
        return default if value is None else value

    def integer(self, least: int, most: int, *names: str) -> int:
        """A number in this range."""
        value = self.get(*names)
        if type(value) is not int or not least <= value <= most:
            raise self.unserved(self._first(names), value)
        return value

    def group(self, *names: str) -> int | None:
        """The neighbours that share a scale; -1 is all of them, None if there is no such field."""
        value: int | None = self.get(*names)
        if value is not None and (type(value) is not int or not (value == -1 or value > 0)):
            raise self.unserved(self._first(names), value)
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        """The rows and columns that share a scale, as a list or as ``128x128``; None if there is no such field."""
        value = self.get(name)
        if value is None:
            return None
        sizes = [int(part) if part.isdecimal() else 0 for part in value.split("x")] if isinstance(value, str) else value
        if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
            raise self.unserved(name, value)
        return sizes[0], sizes[1]

    def names(self, *names: str) -> tuple[str, ...]:
        """A list of names, empty if there is no such field."""
        value = self.get(*names)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{self.path}: {self._first(names)} is no list of names: {shown(value)}")
        return tuple(value)

    def objects(self, name: str) -> "dict[str, Fields]":
        """The objects in one, by name; empty if there is no such field."""
        outer = self.object(name)
        return {each: outer.object(each) for each in outer.values}

    def object(self, name: str) -> "Fields":
        """An object, empty if there is no such field."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.path}: {name} is no object: {shown(value)}")
        return Fields(value or {}, f"{self.path}: {name}")
