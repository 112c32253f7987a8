"""Tools that many rows offer are one object for all of them, so what is made of them is made once."""

import marshal
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rosebatch.core.plain import SCALARS, TEXT

# Of a table. One that is full is emptied.
_MAX_TOOLS, _MAX_SEEN, _MAX_TEXTS = 64, 4096, 1024
# Bytes of tools, characters of a text. Larger ones would fill the memory.
_LONGEST = 1 << 14
_USUAL_INDENTS = (None, 2, 4)


class SharedTools(tuple[Mapping[str, Any], ...]):
    """Tools that several rows have. All in them are plain values of JSON, which nobody changes.

    Attributes:
        memory: bytes, once somebody has estimated them.
    """

    memory: int | None = None


# By their bytes; hashes of bytes that came once; every list and object in them by its address, which it keeps alive.
_SHARED: dict[bytes, SharedTools] = {}
_SEEN: set[int] = set()
_PARTS: dict[int, Any] = {}
_TEXTS: dict[tuple[int, int | None], str] = {}


def shared_tools(given: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Equal tools; the same object for all rows from the second on, if they are short. No caller changes it."""
    try:
        # Version 0 depends on values alone. It tells 1 from 1.0 and True, and keeps the order of names.
        key = marshal.dumps(cast(Any, given), 0)
    except ValueError:
        return tuple(given)
    if len(key) > _LONGEST:
        return tuple(given)
    found = _SHARED.get(key)
    if found is None and hash(key) in _SEEN:
        # A copy: the caller may change its own.
        found = SharedTools(marshal.loads(key))
        parts = _parts_of(found)
        if parts is None:
            return tuple(given)
        if len(_SHARED) == _MAX_TOOLS:
            _forget()
        _SHARED[key] = found
        _PARTS.update((id(part), part) for part in parts)
    if found is None:
        if len(_SEEN) == _MAX_SEEN:
            _SEEN.clear()
        _SEEN.add(hash(key))
    return tuple(given) if found is None else found


def is_shared(value: Any) -> bool:
    """Whether a list or an object is part of shared tools."""
    return id(value) in _PARTS


def text_of(value: Any, indent: int | None) -> str | None:
    """The JSON of a part of shared tools, if it was kept."""
    return _TEXTS.get((id(value), indent))


def keep_text(value: Any, indent: int | None, text: str) -> None:
    """Keep the JSON of a value, if it is part of shared tools and short."""
    if is_shared(value) and len(text) <= _LONGEST and indent in _USUAL_INDENTS:
        if len(_TEXTS) == _MAX_TEXTS:
            _TEXTS.clear()
        _TEXTS[id(value), indent] = text


def _forget() -> None:
    # Texts first: an address without its part may be another object's.
    for table in (_TEXTS, _PARTS, _SHARED):
        table.clear()


def _parts_of(tools: SharedTools) -> list[Any] | None:
    """All lists and objects in them; None if not all is plain JSON."""
    parts: list[Any] = list(tools)
    for part in parts:
        if type(part) is dict and TEXT.issuperset(map(type, part)):
            part = part.values()
        elif type(part) is not list:
            return None
        parts += [each for each in part if type(each) not in SCALARS]
    return parts
