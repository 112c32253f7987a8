"""Other names of a row's fields, and carried fields whose names look like settings."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.io.fields import OPTION_FIELDS, SAMPLING_FIELDS, TOOL_FIELDS

# Names that other tools have for sampling fields.
SAME_AS = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
# An object of sampling fields.
NESTED = "sampling_params"
_OTHER_NAMES = frozenset({*SAME_AS, NESTED})
_KNOWN = frozenset({*OPTION_FIELDS, *SAMPLING_FIELDS, *TOOL_FIELDS, *_OTHER_NAMES})
# Settings of other tools that mean nothing here.
_ELSEWHERE = frozenset(
    {"do_sample", "max_length", "min_length", "num_beams", "stop_sequences", "stream", "system_prompt"}
)
# Inputs that are not text, as other tools name them.
_NO_TEXT = frozenset(
    {
        *("image", "images", "image_url", "image_urls", "video", "videos", "video_url", "audio", "audios", "audio_url"),
        *("input_audio", "multi_modal_data", "multimodal_data", "mm_data", "pixel_values"),
    }
)
# A carried field may well be called "prompts" or "temperature_c".
_SIMILAR = 0.94


def require_text(values: Mapping[str, Any]) -> None:
    """Check that a row, or a prompt's mapping, has nothing that a model would have to see or hear.

    Raises:
        RowError: it has: the answer would be to the text alone.
    """
    for name in sorted(_NO_TEXT.intersection(values)):
        if values[name] is not None:
            raise RowError("unsupported_field", f"{name}: only text is served; without it, the row is a text alone")


def with_own_names(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row under their own names. They win over those of ``sampling_params``; a null is as if left out.

    Raises:
        RowError: a field and another name of it differ, or ``sampling_params`` is no object of sampling fields.
    """
    if _OTHER_NAMES.isdisjoint(values):
        return values
    nested = values.get(NESTED)
    own = _with_own_names({name: value for name, value in values.items() if name != NESTED})
    if isinstance(nested, str):
        # So a table may have it.
        with suppress(msgspec.DecodeError):
            nested = msgspec.json.decode(nested)
    if nested is None or nested != nested:
        return own
    if not isinstance(nested, Mapping):
        raise RowError("invalid_field", f"sampling_params: expected an object, got {type(nested).__name__}")
    nested = _with_own_names(nested)
    if unknown := nested.keys() - SAMPLING_FIELDS:
        raise RowError("invalid_field", f"sampling_params: {min(unknown)} is no sampling field")
    return {**nested, **own}


def _with_own_names(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in values.items() if value is not None}
    for name, meaning in SAME_AS.items():
        if name in found and (value := found.pop(name)) != found.setdefault(meaning, value):
            raise RowError("invalid_field", f"{name} is another name of {meaning}: keep one of them")
    return found


def unclear_names(names: Iterable[str]) -> tuple[str, ...]:
    """Those of some carried fields that look like settings."""
    found = [name for name in names if _looks_like_a_setting(name)]
    return tuple(found)


@lru_cache(4096)
def _looks_like_a_setting(name: str) -> bool:
    if name in _KNOWN:
        return False
    return name in _ELSEWHERE or _plain(name) in _PLAIN or bool(get_close_matches(name, _KNOWN, 1, _SIMILAR))


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


_PLAIN = frozenset(map(_plain, _KNOWN))
