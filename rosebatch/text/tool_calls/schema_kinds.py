"""Which kinds of values a JSON schema takes, as far as its types, constants and references say so."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from rosebatch.text.tool_calls.call import Schema

ALL = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
TEXT = frozenset({"string"})
_KINDS: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: TEXT,
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}


def kinds_of_value(value: Any) -> frozenset[str]:
    """The kinds that a value decoded from JSON is of: an integer is a number too."""
    return _KINDS[type(value)]


def resolved(reference: object, root: Schema) -> Any:
    """What a reference into the same schema refers to; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in unquote(reference[1:]).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


class SchemaKinds:
    """Kinds of values that the parts of one schema take. What is unclear takes all.

    Args:
        root: the schema that references refer to.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        # Those under way have all kinds: a circle of references asks for nothing.
        self._referred: dict[tuple[str, str | None], frozenset[str]] = {}

    def of(self, schema: object) -> frozenset[str]:
        """Kinds of the values that a part takes."""
        return self._of(schema, None)

    def of_member(self, name: str) -> frozenset[str]:
        """Kinds that a member of the objects may have that the whole schema takes."""
        try:
            return self._of(self._root, name)
        except RecursionError:
            return ALL

    def _of(self, schema: object, member: str | None) -> frozenset[str]:
        """Of a schema, or of a member of its objects."""
        if not isinstance(schema, dict):
            return ALL
        found = _own(schema) if member is None else self._of_property(schema, member)
        if (reference := schema.get("$ref")) is not None:
            found &= self._of_reference(reference, member)
        for each in _schemas(schema.get("allOf")):
            found &= self._of(each, member)
        for name in ("anyOf", "oneOf"):
            if either := _schemas(schema.get(name)):
                found &= frozenset().union(*(self._of(each, member) for each in either))
        return found

    def _of_property(self, schema: Schema, name: str) -> frozenset[str]:
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            return self.of(properties[name])
        return self.of(schema.get("additionalProperties"))

    def _of_reference(self, reference: object, member: str | None) -> frozenset[str]:
        key = str(reference), member
        if key not in self._referred:
            self._referred[key] = ALL
            self._referred[key] = self._of(resolved(reference, self._root), member)
        return self._referred[key]


def choices(schema: Schema) -> list[Any]:
    """What values a schema lists itself; empty for none."""
    listed = schema.get("enum")
    return [schema["const"]] if "const" in schema else listed if isinstance(listed, list) else []


def _own(schema: Schema) -> frozenset[str]:
    given = schema.get("type")
    names = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    found = frozenset(names | ({"integer"} if "number" in names else set())) or ALL
    listed = choices(schema)
    return found & frozenset().union(*map(kinds_of_value, listed)) if listed else found


def _schemas(given: object) -> Iterable[object]:
    return given if isinstance(given, list) else ()
