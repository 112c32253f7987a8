"""What a template gets of a chat with images, and which images these are."""

import re

import pytest

from rosebatch.core.errors import RowError
from rosebatch.io.images.messages import messages_with_images
from rosebatch.io.openai.endpoint import ParsedBody
from rosebatch.io.openai.responses import RESPONSES
from rosebatch.io.rows import FailedRow, Row, parse_row
from rosebatch.job.chat_rows import for_model
from rosebatch.model.vision.vision import Vision

IMAGE = {"type": "image", "image": "a.png"}
PLACE = {"type": "image"}


def text(content):
    return {"type": "text", "text": content}


def test_texts_stay_apart_from_images():
    """Joined by line breaks, texts around an image were other than those of the model's own template."""
    content = [text("a"), IMAGE, {**text("b"), "cache_control": {}}, {"type": "image_url", "image_url": "b.png"}]
    messages, images = messages_with_images([{"role": "user", "content": content, "name": None}])
    assert messages == [{"role": "user", "content": [text("a"), PLACE, text("b"), PLACE]}]
    assert [(image.where, image.source) for image in images] == [
        ("messages[0].content[1]", "a.png"),
        ("messages[0].content[3]", "b.png"),
    ]


def test_messages_without_images_are_as_in_a_chat_of_texts():
    """A system message must not change because the user's has an image."""
    given = [
        {"role": "system", "content": [text("a"), text("b")]},
        {"role": "user", "content": [IMAGE]},
        {"role": "assistant", "content": "c"},
    ]
    messages, images = messages_with_images(given)
    assert messages == [{"role": "system", "content": "a\nb"}, {"role": "user", "content": [PLACE]}, given[2]]
    assert [image.where for image in images] == ["messages[1].content[0]"]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"content": [IMAGE, {"type": "video", "video": "a"}]}, "content[1]: parts of type 'video' are not"),
        ({"content": [IMAGE, {**text("a"), "image": "b.png"}]}, "unknown field: image"),
        ({"content": [{"type": "image"}]}, "image must be a text"),
        ({"content": [IMAGE], "images": ["b.png"]}, "images: images of a message are parts of its content"),
    ],
)
def test_what_is_not_read_is_an_error(message, told):
    """The answer would be to a part of the message."""
    with pytest.raises(RowError, match=re.escape(told)):
        messages_with_images([{"role": "user", **message}])


def test_a_row_keeps_its_images_until_the_model_is_known():
    """A model of text must not answer to the text alone."""
    row = parse_row({"messages": [{"role": "user", "content": [text("a"), IMAGE]}]}, index=0, where="", defaults={})
    assert isinstance(row, Row)
    assert [image.source for image in row.images] == ["a.png"]
    seeing = Vision(0, (), lambda max_pixels, encode: None, lambda weights: None)
    assert for_model(row, None, seeing) is row
    refused = for_model(row, None, "it has no eyes")
    assert isinstance(refused, FailedRow)
    assert refused.error.message == "messages[0].content[1]: the model takes no images: it has no eyes"


def test_images_of_responses():
    """Its parts have other names than those of chats."""
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "a.png", "detail": "low"}]
    parsed = RESPONSES.parse({"model": "m", "input": [{"role": "user", "content": content}]}, {})
    assert isinstance(parsed, ParsedBody)
    assert parsed.fields["messages"] == [{"role": "user", "content": [text("a"), PLACE]}]
    assert [(image.source, image.detail) for image in parsed.fields["images"]] == [("a.png", "low")]
