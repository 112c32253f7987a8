"""What a chat template sees, made with less work: plain values, and the JSON of tools that many rows share."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from rosebatch.core.plain import SCALARS, TEXT
from rosebatch.text.shared_tools import is_shared, keep_text, text_of

# The library's own: it copies all that a template sees, and leaves out objects that have methods.
_COPY = "_plain_template_data"
_INDENTS = (int, type(None))


def plain_values(library: Mapping[str, Any]) -> dict[str, Any]:
    """The library's copying function by its name, faster for plain JSON; nothing if this library has none."""
    if (copied := library.get(_COPY)) is None:
        return {}

    def plain(value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS or is_shared(value):
            return value
        if kind is list:
            return list(map(plain, value))
        if kind is dict and TEXT.issuperset(map(type, value)):
            if SCALARS.issuperset(map(type, value.values())):
                return value.copy()
            return dict(zip(value, map(plain, value.values()), strict=True))
        return copied(value)

    return {_COPY: plain}


def kept_texts(tojson: Callable[..., str]) -> Callable[..., str]:
    """The filter, with the texts of shared tools made once."""

    @wraps(tojson)
    def kept(value: Any, *args: Any, **kwargs: Any) -> str:
        indent = kwargs.get("indent")
        if args or not kwargs.keys() <= {"indent"} or type(indent) not in _INDENTS or not is_shared(value):
            return tojson(value, *args, **kwargs)
        text = text_of(value, indent)
        if text is None:
            text = tojson(value, **kwargs)
            keep_text(value, indent, text)
        return text

    return kept
