"""Texts of messages: a row, a message or a part of it with anything else to see or hear is an error."""

from collections.abc import Mapping, Sequence
from typing import Any

from rosebatch.core.errors import RowError
from rosebatch.core.words import quoted

# Inputs that are not text, as other tools name them. Images have other places here.
_COLUMNS = ("image", "images", "image_url", "image_urls")
_IMAGES = frozenset({*_COLUMNS, "multi_modal_data", "multimodal_data", "mm_data", "pixel_values"})
NO_TEXT = _IMAGES | {"video", "videos", "video_url", "audio", "audios", "audio_url", "input_audio"}
# Where the images of a row, and of a message, are.
IN_ROWS = "images of rows are parts of messages, or in a column: --image-column {column}"
_IN_MESSAGES = "images of a message are parts of its content"
# Kinds of parts that are images, and the field that has them: chats of OpenAI, its responses, Qwen, vLLM's library.
IMAGE_PARTS = {"image_url": "image_url", "input_image": "image_url", "image": "image", "image_pil": "image_pil"}
# Kinds of the parts of a message that are text, and the names of their texts.
_TEXTS = ("text", "refusal")
# What else such a part may have: it says how a server keeps the text, or where an answer has it from.
OF_A_PART = {"type", "id", "cache_control", "prompt_cache_breakpoint", "annotations", "logprobs"}
_NO_CALLS: tuple[Sequence[Any], ...] = ([], ())
# Who says nothing without content; others call tools, think, or return nothing.
_SPEAKERS = ("user", "system", "developer")


def is_media(name: str, value: Any) -> bool:
    """Whether a field of a row has something to see or hear: error rows do not repeat it."""
    return value is not None and name in NO_TEXT


def require_text(values: Mapping[str, Any], images: str = IN_ROWS) -> None:
    """Check that a row, a message, or a prompt's mapping has nothing in a field that a model would have to see or hear.

    Args:
        values: by the names of its fields.
        images: where its images are, for messages.

    Raises:
        RowError: it has: the answer would be to the text alone.
    """
    if NO_TEXT.isdisjoint(values):
        return
    for name in sorted(NO_TEXT.intersection(values)):
        if values[name] is not None:
            told = images.format(column=name if name in _COLUMNS else "NAME")
            told = told if name in _IMAGES else "only texts and images are served"
            raise RowError("unsupported_field", f"{name}: {told}")


def plain_message(message: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """A message without images, its content as one string: text parts are joined by line breaks.

    No content is None. Other nulls are left out, and so is an empty list of calls: templates ask whether there is one.

    Args:
        message: of a chat.
        number: of the message, counted from 0.

    Raises:
        RowError: a part is not text, something else is in the message, or a user's or system's has no content.
    """
    content = message.get("content")
    if type(content) is str and len(message) == 2 and "role" in message:
        return message
    require_text(message, _IN_MESSAGES)
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
    return {**message, "content": joined_text(content, f"messages[{number}].content")}


def joined_text(parts: Sequence[Any], where: str) -> str:
    """The texts of the parts of a message's content, joined by line breaks.

    Args:
        parts: of the content.
        where: its place in the row.

    Raises:
        RowError: a part is not text, or has more than its text.
    """
    return "\n".join([text_of(part, f"{where}[{place}]") for place, part in enumerate(parts)])


def _no_content(message: dict[str, Any]) -> RowError:
    """Its text may be in a field of another name: the answer would be to an empty message."""
    others = [name for name, value in message.items() if value is not None and name not in ("role", "name")]
    has = f", but {', '.join(others)}" if others else ""
    return RowError("invalid_messages", f"a message of the role {message['role']} has no content{has}")


def text_of(part: Any, where: str) -> str:
    """The text of a part of a message.

    Args:
        part: as the row has it.
        where: its place in the row.

    Raises:
        RowError: it is no text, or has more than its text.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXTS:
        what = "a part without a type is" if kind is None else f"parts of type {quoted(kind)} are"
        kinds = ", ".join(["text", *IMAGE_PARTS])
        raise RowError("invalid_messages", f"{where}: {what} not supported: types of parts are {kinds}")
    if not isinstance(text := part.get(kind), str):
        raise RowError("invalid_messages", f"{where}.{kind} must be a text")
    for name, value in part.items():
        if value is not None and name not in OF_A_PART and name != kind:
            raise RowError("invalid_messages", f"{where} has an unknown field: {name}")
    return text
