"""Images that messages refer to: all forms that other tools write are read here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rosebatch.core.errors import RowError
from rosebatch.core.words import quoted
from rosebatch.io.text_only import OF_A_PART

# Kinds of parts, and the field that has the image: chats of OpenAI, its responses, Qwen.
_IMAGES = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
# As the API names them.
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image of a chat that is not read yet.

    Attributes:
        message: its message, counted from 0.
        part: its part of the message's content, counted from 0.
        source: a URL, a data URL, a path, or base64.
        detail: how finely the model should see it: auto, low, high or original; None if the row does not say.
    """

    message: int
    part: int
    source: str
    detail: str | None = None

    @property
    def where(self) -> str:
        """Its place, for messages to people."""
        return _where(self.message, self.part)


def image_references(messages: Iterable[Mapping[str, Any]]) -> list[ImageReference]:
    """The images of a chat, in its order.

    Raises:
        RowError: see ``image_reference``.
    """
    return [
        found
        for number, message in enumerate(messages)
        if isinstance(content := message.get("content"), list)
        for place, part in enumerate(content)
        if (found := image_reference(part, number, place)) is not None
    ]


def image_reference(part: Any, message: int, place: int) -> ImageReference | None:
    """What a part of a message's content refers to; None if it is no image.

    Args:
        part: as the row has it.
        message: its message, counted from 0.
        place: of the part in the content, counted from 0.

    Raises:
        RowError: a field is missing, unknown, not served, or has the wrong type.
    """
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str) or kind not in _IMAGES:
        return None
    field = _IMAGES[kind]
    where = _where(message, place)
    if part.get("file_id") is not None:
        raise RowError("unsupported_field", f"{where}: file_id is not supported: no file is kept, give {field}")
    given: Any = part.get(field)
    detail, known = None, {*OF_A_PART, field}
    if kind == "image_url" and isinstance(given, dict):
        _require_known(given, {"url", "detail"}, f"{where}.{field}")
        field, given, detail = f"{field}.url", given.get("url"), given.get("detail")
    elif kind != "image":
        known.add("detail")
        detail = part.get("detail")
    _require_known(part, known, where)
    if not isinstance(given, str) or not given:
        raise RowError("invalid_messages", f"{where}: {field} must be a text that is not empty")
    if detail is not None and detail not in _DETAILS:
        raise RowError("invalid_messages", f"{where}: detail must be {', '.join(_DETAILS)}, not {quoted(detail)}")
    return ImageReference(message, place, given, detail)


def _where(message: int, place: int) -> str:
    return f"messages[{message}].content[{place}]"


def _require_known(values: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for name, value in values.items():
        if value is not None and name not in known:
            raise RowError("invalid_messages", f"{where} has an unknown field: {name}")
