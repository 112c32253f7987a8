"""Chats with images: what of their messages a chat template gets, and which images these refer to."""

from collections.abc import Sequence
from typing import Any

from rosebatch.io.images.references import ImageReference, image_reference
from rosebatch.io.text_only import plain_message, text_of

# What a template gets in place of an image, whatever the row has. It writes the model's placeholder for it.
PLACEHOLDER = {"type": "image"}


def messages_with_images(
    messages: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], tuple[ImageReference, ...]]:
    """The messages of a chat for a template, and its images in their order.

    The content of a message without images is one string, see ``plain_message``. Else it is a list of parts: texts stay
    apart, because the template says what comes between them and images.

    Raises:
        RowError: a part is neither a text nor an image, or has a field that is unknown; see ``plain_message``. It has
            the place of the part.
    """
    for each in messages:
        if type(each.get("content")) is list:
            break
    else:
        # Nearly all chats, and three times as quick.
        return [plain_message(each, number) for number, each in enumerate(messages)], ()
    found: list[ImageReference] = []

    def message(number: int, given: dict[str, Any]) -> dict[str, Any]:
        content = given.get("content")
        if not isinstance(content, list):
            return plain_message(given, number)
        read = [image_reference(part, number, place) for place, part in enumerate(content)]
        images = [each for each in read if each is not None]
        if not images:
            return plain_message(given, number)
        found.extend(images)
        parts = [
            {"type": "text", "text": text_of(part, f"messages[{number}].content[{place}]")}
            if image is None
            else PLACEHOLDER
            for place, (part, image) in enumerate(zip(content, read, strict=True))
        ]
        return plain_message({**given, "content": "images"}) | {"content": parts}

    return [message(number, each) for number, each in enumerate(messages)], tuple(found)
