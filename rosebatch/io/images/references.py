"""Images that messages refer to: all forms that other tools write are read here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from sys import getsizeof
from typing import Any

from rosebatch.core.errors import RowError
from rosebatch.core.words import quoted
from rosebatch.io.images.pdf import Page
from rosebatch.io.images.picture import Picture, is_picture
from rosebatch.io.text_only import IMAGE_PARTS, OF_A_PART

# Under the policy, a text (a URL, a data URL, a path, or base64), or a path, whatever it looks like, or a page of it. A
# file. Pixels.
Source = str | Path | Page | bytes | Picture
# Of a text or a file, as much as tells it from others at both ends: data URLs of photos differ at their ends.
_END = 64
# Fields of parts that other tools write, and what serves instead.
_INSTEAD = {
    **dict.fromkeys(("url", "path", "base64", "source"), "an image is in the field {field}"),
    **dict.fromkeys(("min_pixels", "max_pixels"), "--max-pixels says how large images are"),
    **dict.fromkeys(("resized_height", "resized_width"), "--max-pixels says how large images are"),
}
# As the API names them.
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image of a row that is not read yet.

    Attributes:
        where: its place in the row, for messages to people.
        source: what it is read from.
        detail: how finely the model should see it: auto, low, high or original; None if the row does not say.
    """

    where: str
    source: Source
    detail: str | None = None

    @property
    def size(self) -> int:
        """Bytes of its source."""
        return self.source.size if isinstance(self.source, Picture) else getsizeof(self.source)


def ends_of(source: Source) -> bytes:
    """Both ends of a source, the same for the same image. Nothing of pixels: a look at them takes long."""
    if isinstance(source, Picture):
        return b" "
    if isinstance(source, bytes):
        return source[:_END] + b" " + source[-_END:]
    text = str(source)
    return f"{text[:_END]} {text[-_END:]}".encode(errors="surrogatepass")


def source_of(given: Any, where: str, code: str = "invalid_messages") -> Source:
    """What an image is read from.

    Args:
        given: a text, a path, the bytes of a file, an array, or a picture of Pillow.
        where: for messages.
        code: of the error if it is something else.

    Raises:
        RowError: it is something else, or empty.
    """
    if isinstance(given, Path | Page) or (isinstance(given, str | bytes) and given):
        return given
    try:
        if is_picture(given):
            return Picture(given)
    except RowError as error:
        raise RowError(error.code, f"{where}: {error.message}") from None
    raise RowError(code, f"{where} must be a text that is not empty, a picture, or the bytes of a file")


def image_reference(part: Any, message: int, place: int) -> ImageReference | None:
    """What a part of a message's content refers to; None if it is no image.

    Args:
        part: as the row has it.
        message: its message, counted from 0.
        place: of the part in the content, counted from 0.

    Raises:
        RowError: a field is missing, unknown, not served, or has the wrong type.
    """
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str) or kind not in IMAGE_PARTS:
        return None
    field = IMAGE_PARTS[kind]
    where = f"messages[{message}].content[{place}]"
    if part.get("file_id") is not None:
        raise RowError("unsupported_field", f"{where}: file_id is not supported: no file is kept, give {field}")
    given: Any = part.get(field)
    detail, known = None, {*OF_A_PART, field}
    if kind == "image_url" and isinstance(given, dict):
        _require_known(given, {"url", "detail"}, f"{where}.{field}")
        field, given, detail = f"{field}.url", given.get("url"), given.get("detail")
    elif field == "image_url":
        known.add("detail")
        detail = part.get("detail")
    _require_known(part, known, where, field)
    source = source_of(given, f"{where}: {field}")
    if detail is not None and detail not in _DETAILS:
        raise RowError("invalid_messages", f"{where}: detail must be {', '.join(_DETAILS)}, not {quoted(detail)}")
    return ImageReference(where, source, detail)


def _require_known(values: Mapping[str, Any], known: Iterable[str], where: str, field: str = "url") -> None:
    for name, value in values.items():
        if value is not None and name not in known:
            instead = f"; {_INSTEAD[name].format(field=field)}" if name in _INSTEAD else ""
            raise RowError("invalid_messages", f"{where} has an unknown field: {name}{instead}")
