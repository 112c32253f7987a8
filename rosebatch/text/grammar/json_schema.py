"""A JSON schema as llguidance can keep it: every answer that it lets through matches the schema that was given.

llguidance refuses keywords that it does not know, also where they ask for nothing. It loses digits of numbers, and
counts a key that comes twice as two. Such parts are left out, written in another way, or refused here.
"""

from decimal import Decimal
from typing import Any

from rosebatch.text.grammar.schema_formats import with_kept_format
from rosebatch.text.grammar.schema_numbers import (
    require_kept,
    require_kept_multiple,
    require_kept_together,
    with_kept_bounds,
)
from rosebatch.text.grammar.schema_patterns import kept_pattern

# Keywords whose values are no schemas, and those that hold schemas by name.
_VALUES = frozenset({"const", "enum", "default", "examples", "x-guidance"})
_BY_NAME = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Keywords by which several schemas hold for one value.
_COMBINE = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
# Keywords with values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), (True, {})),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("not", "uniqueItems"), (False,)),
}
# Keywords that mean something together with another one only.
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}


def kept_schema(schema: Any, *, lenient: bool) -> Any:
    """A schema that llguidance can keep.

    Args:
        schema: as parsed from JSON.
        lenient: whether an object may get fewer keys than it asks for.

    Raises:
        ValueError: a part of it cannot be kept.
        RecursionError: it has too many levels.
    """
    found = _Rewriter(lenient)
    kept = found.schema(schema)
    if found.combines:
        require_kept_together(found.multiples)
    return kept


class _Rewriter:
    def __init__(self, lenient: bool) -> None:
        self.combines = False
        self.multiples: list[Decimal] = []
        self._lenient = lenient

    def schema(self, given: Any) -> Any:
        """A schema, or a list of schemas."""
        if isinstance(given, list):
            return [self.schema(each) for each in given]
        if not isinstance(given, dict):
            return given
        kept: dict[str, Any] = {}
        for name, value in _without_neutral(given).items():
            if name in _BY_NAME and isinstance(value, dict):
                kept[name] = {key: self.schema(each) for key, each in value.items()}
            elif name == "patternProperties" and isinstance(value, dict):
                others = given.get("properties") or given.get("additionalProperties") is not False
                kept[name] = {kept_pattern(key, exact=bool(others)): self.schema(each) for key, each in value.items()}
                if len(kept[name]) < len(value):
                    raise ValueError("two patternProperties are the same")
            elif name == "pattern" and isinstance(value, str):
                kept[name] = kept_pattern(value)
            else:
                kept[name] = value if name in _VALUES else self.schema(value)
        self._check(kept)
        return with_kept_format(with_kept_bounds(kept))

    def _check(self, schema: dict[str, Any]) -> None:
        self.combines |= not _COMBINE.isdisjoint(schema)
        for name in ("const", "enum"):
            require_kept(schema.get(name))
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool):
            self.multiples.append(require_kept_multiple(multiple))
        least, required = schema.get("minProperties"), schema.get("required")
        named = len(set(map(str, required))) if isinstance(required, list) else 0
        if isinstance(least, int) and least > named + 1 and not self._lenient:
            raise ValueError(f"minProperties {least}: keys that differ cannot be kept; give more of them in required")


def _without_neutral(schema: dict[str, Any]) -> dict[str, Any]:
    """Without keywords that ask for nothing, and with integers for counts."""
    kept = {name: value for name, value in schema.items() if not _is_neutral(name, value, schema)}
    for name in _COUNTS:
        if isinstance(count := kept.get(name), float) and count.is_integer():
            kept[name] = int(count)
    return kept


def _is_neutral(name: str, value: Any, schema: dict[str, Any]) -> bool:
    if name in _NEUTRAL:
        # Not by ==, for which 0 is False.
        return any(value is each or (value == {} and each == {}) for each in _NEUTRAL[name])
    if name == "if":
        return "then" not in schema and "else" not in schema
    return name in _NEEDS and _NEEDS[name] not in schema
