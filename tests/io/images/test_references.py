"""All forms that refer to images are read in one place; what is wrong with one is told by its name."""

import pytest

from rosebatch.core.errors import RowError
from rosebatch.io.images.messages import messages_with_images
from rosebatch.io.images.references import ImageReference, image_reference

URL = "https://site.test/a.png"


@pytest.mark.parametrize(
    ("part", "source", "detail"),
    [
        ({"type": "image_url", "image_url": URL}, URL, None),
        ({"type": "image_url", "image_url": {"url": URL}}, URL, None),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, URL, "low"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": None}, "cache_control": {}}, URL, None),
        ({"type": "image_url", "image_url": URL, "detail": "high"}, URL, "high"),
        ({"type": "input_image", "image_url": URL}, URL, None),
        ({"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None}, URL, "auto"),
        ({"type": "image", "image": "a.png"}, "a.png", None),
        ({"type": "image", "image": "iVBORw0KGgo=", "id": "x"}, "iVBORw0KGgo=", None),
    ],
)
def test_forms(part, source, detail):
    """Each tool writes another one."""
    assert image_reference(part, 2, 1) == ImageReference("messages[2].content[1]", source, detail)


@pytest.mark.parametrize(
    "part", [None, "text", [], {}, {"type": "text", "text": "x"}, {"type": ["image"]}, {"type": 1}]
)
def test_what_is_no_image(part):
    """Another reader says what is wrong with it, if anything is."""
    assert image_reference(part, 0, 0) is None


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "image_url must be a text"),
        ({"type": "image_url", "image_url": ""}, "image_url must be a text"),
        ({"type": "image_url", "image_url": None}, "image_url must be a text"),
        ({"type": "image_url", "image_url": 7}, "image_url must be a text"),
        ({"type": "image_url", "image_url": [URL]}, "image_url must be a text"),
        ({"type": "image_url", "image_url": {}}, "image_url.url must be a text"),
        ({"type": "image_url", "image_url": {"url": {"url": URL}}}, "image_url.url must be a text"),
        ({"type": "image_url", "image_url": {"url": URL, "size": 1}}, ".image_url has an unknown field: size"),
        (
            {"type": "image_url", "image_url": {"url": URL, "detail": "most"}},
            "detail must be auto, low, high, original",
        ),
        ({"type": "image_url", "image_url": {"url": URL, "detail": ["low"]}}, "detail must be auto"),
        ({"type": "image_url", "image_url": {"url": URL}, "detail": "low"}, "has an unknown field: detail"),
        ({"type": "image_url", "image_url": URL, "url": URL}, "has an unknown field: url"),
        ({"type": "image_url", "image": "a.png"}, "unknown field: image"),
        ({"type": "input_image", "image_url": {"url": URL}}, "image_url must be a text"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id is not supported"),
        ({"type": "input_image", "file_id": "file-1", "image_url": URL}, "file_id is not supported"),
        ({"type": "image", "image": None}, "image must be a text"),
        ({"type": "image", "image": b""}, "image must be a text"),
        ({"type": "image", "image": ["a.png"]}, "image must be a text"),
        ({"type": "image_pil", "image_pil": {"bytes": b"a"}}, "image_pil must be a text"),
        ({"type": "image", "image": "a.png", "detail": "low"}, "has an unknown field: detail"),
        # What Qwen's, transformers' and Anthropic's forms have, and where it is here.
        ({"type": "image", "image": "a.png", "max_pixels": 9}, "an unknown field: max_pixels; --max-pixels says how"),
        ({"type": "image", "image": "a.png", "resized_height": 9}, "resized_height; --max-pixels says how large"),
        ({"type": "image", "url": URL}, "has an unknown field: url; an image is in the field image"),
        ({"type": "image", "path": "a.png"}, "has an unknown field: path; an image is in the field image"),
        ({"type": "image", "source": {"data": "iVBORw0KGgo="}}, "source; an image is in the field image"),
        ({"type": "image_url", "path": "a.png"}, "has an unknown field: path; an image is in the field image_url"),
    ],
)
def test_wrong_fields(part, message):
    """A field that is not read would give an answer to another image."""
    with pytest.raises(RowError) as caught:
        image_reference(part, 3, 4)
    assert caught.value.message.startswith("messages[3].content[4]")
    assert message in caught.value.message
    assert caught.value.code == ("unsupported_field" if "file_id" in message else "invalid_messages")


def test_images_of_a_chat_come_in_its_order():
    """The second image of a prompt was taken for the first."""
    images = [{"type": "image", "image": f"{n}.png"} for n in range(3)]
    text = {"type": "text", "text": "and"}
    messages = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [text, images[0], text, images[1]]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [images[2]]},
    ]
    _, found = messages_with_images(messages)
    assert [(each.where, each.source) for each in found] == [
        ("messages[1].content[1]", "0.png"),
        ("messages[1].content[3]", "1.png"),
        ("messages[3].content[0]", "2.png"),
    ]
