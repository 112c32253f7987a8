"""Images in a column of their own, beside a prompt that is a text."""

from collections.abc import Mapping
from typing import Any

from rosebatch.core.errors import RowError


def with_image_column(request: Mapping[str, Any], value: Any, name: str) -> dict[str, Any]:
    """A row's fields, with a chat in place of its prompt: one message of a user, the images before the text.

    Args:
        request: the fields of the row.
        value: of the column: an image, or a list of them. Each is the bytes of a file, a text as a chat has it, or an
            object of both: ``bytes``, else ``path``, as the data sets of Hugging Face have them.
        name: of the column, which may be that of a field.

    Raises:
        RowError: the row has no image, or its prompt is no text.
    """
    if value is None:
        raise RowError("missing_image", f"{name}, which --image-column names, is missing")
    fields = {field: given for field, given in request.items() if field != name}
    prompt = fields.pop("prompt", None)
    others = [field for field in ("messages", "prompt_token_ids") if fields.get(field) is not None]
    if not isinstance(prompt, str) or others:
        raise RowError("invalid_field", "--image-column needs a prompt given as text, not as messages or token ids")
    parts = [{"type": "image", "image": each} for each in images_of(value)]
    return {**fields, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]}


def images_of(value: Any) -> list[Any]:
    """What the images of a value are read from; of what is none, something else."""
    return [_source(each) for each in (value if isinstance(value, list | tuple) else [value])]


def _source(image: Any) -> Any:
    if not isinstance(image, Mapping):
        return image
    return image.get("path") if image.get("bytes") is None else image["bytes"]
