"""What a model of text can be given: a row, or a message, with anything to see or hear is an error."""

from collections.abc import Mapping, Sequence
from typing import Any

from rosebatch.core.errors import RowError

# Inputs that are not text, as other tools name them.
_NO_TEXT = frozenset(
    {
        *("image", "images", "image_url", "image_urls", "video", "videos", "video_url", "audio", "audios", "audio_url"),
        *("input_audio", "multi_modal_data", "multimodal_data", "mm_data", "pixel_values"),
    }
)
# Kinds of the parts of a message that are text, and the names of their texts.
_TEXTS = ("text", "refusal")
# What else such a part may have: it says how a server keeps the text, or where an answer has it from.
OF_A_PART = {"type", "id", "cache_control", "prompt_cache_breakpoint", "annotations", "logprobs"}
_NO_CALLS: tuple[Sequence[Any], ...] = ([], ())
# Who says nothing without content; others call tools, think, or return nothing.
_SPEAKERS = ("user", "system", "developer")


def require_text(values: Mapping[str, Any]) -> None:
    """Check that a row, a message, or a prompt's mapping has nothing that a model would have to see or hear.

    Raises:
        RowError: it has: the answer would be to the text alone.
    """
    if _NO_TEXT.isdisjoint(values):
        return
    for name in sorted(_NO_TEXT.intersection(values)):
        if values[name] is not None:
            raise RowError("unsupported_field", f"{name}: only text is served; without it, this is a text alone")


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as one string: text parts are joined by line breaks.

    No content is None. Other nulls are left out, and so is an empty list of calls: templates ask whether there is one.

    Raises:
        RowError: a part is not text, something else is in the message, or a user's or system's has no content.
    """
    content = message.get("content")
    if type(content) is str and len(message) == 2 and "role" in message:
        return message
    require_text(message)
    if None in message.values() or content is None or message.get("tool_calls") in _NO_CALLS:
        if content is None and message.get("role") in _SPEAKERS:
            raise _no_content(message)
        message = {name: value for name, value in message.items() if value is not None}
        if content is None:
            # Also where a table, which leaves out nulls, has lost its place: a template may print whole messages.
            message = {"role": message["role"], "content": None, **message}
        if message.get("tool_calls") in _NO_CALLS:
            del message["tool_calls"]
    if not isinstance(content, list):
        return message
    return {**message, "content": joined_text(content)}


def no_text_alone() -> RowError:
    """The error of a message with more than text."""
    return RowError("invalid_messages", "only text parts are supported in message content")


def joined_text(parts: Sequence[Any]) -> str:
    """The texts of the parts of a message's content, joined by line breaks.

    Raises:
        RowError: a part is not text, or has more than its text.
    """
    return "\n".join(map(text_of, parts))


def _no_content(message: dict[str, Any]) -> RowError:
    """Its text may be in a field of another name: the answer would be to an empty message."""
    others = [name for name, value in message.items() if value is not None and name not in ("role", "name")]
    has = f", but {', '.join(others)}" if others else ""
    return RowError("invalid_messages", f"a message of the role {message['role']} has no content{has}")


def text_of(part: Any) -> str:
    """The text of a part of a message.

    Raises:
        RowError: it is no text, or has more than its text.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXTS or not isinstance(text := part.get(kind), str):
        raise no_text_alone()
    for name, value in part.items():
        if value is not None and name not in OF_A_PART and name != kind:
            raise RowError("invalid_messages", f"a {kind} part of a message's content has an unknown field: {name}")
    return text
