"""Rows with images on their way to the engine: what is loaded, what a prompt becomes, and what fails."""

import base64
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

from rosebatch.core.errors import FlagError, InterruptionError
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.host.threads import DaemonPool
from rosebatch.io.images.policy import NO_MEDIA, MediaPolicy
from rosebatch.io.images.references import ImageReference
from rosebatch.io.rows import FailedRow, Row, parse_row
from rosebatch.job import images as stage
from rosebatch.job.chat_rows import for_model
from rosebatch.job.images import with_images
from rosebatch.job.prepare import prepare
from rosebatch.model.vision.vision import TEXT_ALONE, Patches, Vision
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.io.images.picture_files import picture, saved

PLACEHOLDER = 257
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}{% if m.role == 'user' %}<image>{% endif %}{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def reading():
    backend = byte_backend()
    backend.add_special_tokens(["<image>"])
    return Tokenizer(backend, TEMPLATE)


class Processor:
    """A token for each pixel, in one row; a further one of an image that is alone."""

    def __call__(self, rgb, *, alone=True):
        height, width, _ = rgb.shape
        if height > 4 * width:
            raise ValueError("too tall")
        token_ids = np.full(height * width + alone, PLACEHOLDER, np.uint32)
        return Patches(rgb.reshape(-1, 3), (height, width), token_ids)


VISION = Vision(PLACEHOLDER, ("tower",), lambda max_pixels, encode: Processor(), lambda weights: None)


def data(size=(2, 1), **options):
    return "data:image/png;base64," + base64.b64encode(saved("PNG", picture("RGB", size), **options)).decode()


def chat(*parts, role="user", **fields):
    content = [
        {"type": "image", "image": p[6:]} if p.startswith("image:") else {"type": "text", "text": p} for p in parts
    ]
    return {"messages": [{"role": role, "content": content}], **fields}


def prepared(lines, reading, vision=VISION):
    rows = (parse_row(line, index=number, where="", defaults={}) for number, line in enumerate(lines))
    with DaemonPool(1, "text") as pool:
        yield from prepare(rows, reading, None, pool, sight=vision)


def loaded(items, reading, media=NO_MEDIA, vision=VISION, **more):
    return with_images(items, vision, reading, media, **more)


def served(lines, reading, media=NO_MEDIA, **more):
    return loaded(prepared(lines, reading), reading, media, **more)


def test_a_prompt_has_a_placeholder_for_each_token_of_an_image(reading):
    """Offsets count the placeholders of the images before; equal pixels have one digest, whatever their files."""
    small, large = "image:" + data(), "image:" + data((3, 2))
    same = "image:" + data(compress_level=0)
    (row,) = served([chat("a", small, "b", large, same)], reading)
    (prompt,) = row.prompts
    expected = [*b"a", *[PLACEHOLDER] * 2, *b"b", *[PLACEHOLDER] * 8]
    assert list(prompt.token_ids) == expected
    assert [(image.offset, image.num_tokens, image.grid) for image in prompt.images] == [
        (1, 2, (1, 2)),
        (4, 6, (2, 3)),
        (10, 2, (1, 2)),
    ]
    digests = [image.digest for image in prompt.images]
    assert digests[0] == digests[2] != digests[1]
    assert prompt.images[1].patches.shape == (6, 3)
    # What they were loaded from is not kept.
    assert row.row.images == ()
    (row,) = served([chat("a", small)], reading)
    (image,) = row.prompts[0].images
    assert image.num_tokens == 3
    # A model that sees it otherwise beside others gives it other vectors.
    assert image.digest != digests[0]


def test_what_is_around_an_image_is_encoded_with_the_text():
    """Gemma's line breaks before an image and those of the template are one token, which tokens put in later lack."""
    backend = byte_backend()
    backend.add_special_tokens(["<image>", "<mark>"])
    backend.add_tokens(["\n\n\n"])
    reading = Tokenizer(backend, TEMPLATE.replace("<image>", "<mark>"))
    mark, breaks = (backend.token_to_id(token) for token in ("<mark>", "\n\n\n"))
    vision = replace(VISION, in_text=("<mark>", "\n\n<mark><image>\n\n"))
    lines = [chat("a\n", "image:" + data(), "b"), chat("<mark>", "image:" + data()), chat("<mark>")]
    row, bad, text = loaded(prepared(lines, reading, vision), reading, vision=vision)
    expected = [*b"a", breaks, mark, *[PLACEHOLDER] * 3, *b"\n\nb"]
    assert list(row.prompts[0].token_ids) == expected
    assert row.prompts[0].images[0].offset == 3
    assert bad.error.message == "a text has <mark>, which stands for an image"
    assert text.error.message.startswith("the prompt has <mark>, which stands for an image, and the row has none")


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        (chat("a", "image:data:image/png;base64,AAAA"), "invalid_image", "messages[0].content[1]: it is no JPEG"),
        (chat("image:a.png"), "image_not_allowed", "messages[0].content[0]: files are read below --media-root"),
        (chat("image:https://site.test/a.png"), "image_not_allowed", "site.test is not among --media-domains"),
        (chat("image:" + data((1, 9))), "invalid_image", "messages[0].content[0]: too tall"),
        (chat(*["image:" + data()] * 4), "too_many_images", "the row has 4 images, more than 3: --limit-images"),
        (chat("<image>", "image:" + data()), "invalid_messages", "a text has <image>, which stands for an image"),
        (chat("image:" + data(), role="assistant"), "invalid_messages", "has 0 places for 1 image"),
        (chat("image:" + data(), truncate_prompt_tokens=3), "unsupported_field", "truncate_prompt_tokens"),
    ],
)
def test_bad_images_cost_their_row(reading, line, code, told):
    """The others are answered, in their order."""
    good = chat("a", "image:" + data())
    first, bad, last = served([good, line, good], reading, limit=3)
    assert isinstance(bad, FailedRow)
    assert bad.error.code == code
    assert told in bad.error.message
    assert first.prompts[0].token_ids == last.prompts[0].token_ids
    assert (first.row.index, bad.index, last.row.index) == (0, 1, 2)


def test_a_placeholder_that_the_tokenizer_lacks(reading):
    """An empty text is in each text: "a text has , which stands for an image"."""
    unknown = replace(VISION, placeholder=9999)
    (row,) = loaded(prepared([chat("a", "image:" + data())], reading, unknown), reading, vision=unknown)
    assert (row.error.code, row.error.message) == ("invalid_messages", "the chat template has 0 places for 1 image")


def test_rows_without_images_pass(reading):
    """Rows whose images are loaded do not wait for more input."""
    texts = {"messages": [{"role": "user", "content": "y"}]}, {"prompt": "x"}
    text, image, plain = prepared([texts[0], chat("image:" + data()), texts[1]], reading)
    found = list(loaded(iter([None, text, None, image, plain, image, None]), reading))
    assert [row and row.row.index for row in found] == [None, 0, None, 1, 2, 1]
    assert [found[1], found[4]] == [text, plain]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({"prompt": "a<image>"}, "invalid_prompt"),
        ({"prompt_token_ids": [97] * 99 + [PLACEHOLDER]}, "invalid_prompt"),
        ({"messages": [{"role": "user", "content": "<image>"}]}, "invalid_messages"),
    ],
)
def test_a_placeholder_without_an_image(reading, line, code):
    """The model was told of an image that it did not get, and answered."""
    bad, good = served([line, {"prompt": "a"}], reading)
    assert (bad.error.code, list(good.prompts[0].token_ids)) == (code, [97])
    assert bad.error.message.startswith("the prompt has <image>, which stands for an image, and the row has none")
    # A model of text has other tokens.
    passed, _ = loaded(prepared([line, {"prompt": "a"}], reading), reading, vision=TEXT_ALONE)
    assert passed.prompts[0].token_ids[-1] == PLACEHOLDER


def test_a_placeholder_without_an_image_or_a_tokenizer(reading):
    """Token ids are looked at all the same."""
    (row,) = loaded(prepared([{"prompt_token_ids": [97, PLACEHOLDER]}], None), None)
    assert row.error.message.startswith(f"the prompt has the token {PLACEHOLDER}, which stands for an image")


def test_token_ids_with_images_and_no_tokenizer(reading):
    """The placeholders would have been computed as tokens of text: who replaces them needs the tokenizer."""
    image = ImageReference("here", saved("PNG", picture("RGB", (2, 1))))
    fields = {"index": 0, "where": "", "metadata": {}, "sampling": SamplingParams()}
    row = Row(**fields, prompt_token_ids=(97, PLACEHOLDER), images=(image,))
    assert for_model(row, None, VISION).error.code == "no_tokenizer"
    assert for_model(row, reading).error.code == "unsupported_field"
    with DaemonPool(1, "text") as pool:
        (found,) = loaded(prepare([row], reading, None, pool, sight=VISION), reading)
    assert list(found.prompts[0].token_ids) == [97, *[PLACEHOLDER] * 3]


def test_some_images_are_loaded_ahead_and_no_more(reading, monkeypatch):
    """A file of images was loaded into memory whole, before the engine had its first row."""
    begun = []
    load = stage._load

    def counted(reference, *others):
        begun.append(reference)
        return load(reference, *others)

    monkeypatch.setattr(stage, "_load", counted)
    monkeypatch.setattr(stage, "usable_cores", lambda: 3)
    monkeypatch.setattr(stage, "_BYTES_OF_THREAD", 1)
    lines = [chat("a", "image:" + data()) for _ in range(60)]
    ahead = []
    for number, row in enumerate(served(lines, reading, max_bytes=30), start=1):
        assert isinstance(row.prompts[0].images, tuple)
        ahead.append(len(begun) - number)
    assert len(begun) == 60
    # Each has 6 bytes: five that are loaded, and those that were under way when the fifth was.
    assert max(ahead) <= 5 + stage._AHEAD * 3
    assert max(ahead) > 0


def test_files_below_the_media_root(reading, tmp_path):
    """A path is below it, whatever the working directory."""
    (tmp_path / "a.png").write_bytes(saved("PNG", picture("RGB", (2, 1))))
    media = MediaPolicy.of(str(tmp_path), " A.test,b.test:8080 ")
    assert media.domains == {"a.test", "b.test:8080"}
    found, outside = served([chat("image:a.png"), chat("image:../a.png")], reading, pickle.loads(pickle.dumps(media)))
    assert found.prompts[0].images[0].num_tokens == 2 + 1
    assert outside.error.code == "image_not_allowed"


def test_a_media_root_that_is_no_folder(tmp_path):
    """Every row with a path would have failed."""
    with pytest.raises(FlagError, match="no such folder"):
        MediaPolicy.of(str(tmp_path / "none"), None)


def test_a_media_root_without_a_name():
    """It was the working directory: rows could name all files there."""
    with pytest.raises(FlagError, match="--media-root is empty"):
        MediaPolicy.of("")


def test_a_signal_ends_the_wait_for_an_image(reading, monkeypatch):
    """It was taken for a mistake of the row, and the job went on."""
    ends = threading.Event()
    monkeypatch.setattr(stage, "_load", lambda *_: ends.wait(60))

    def check():
        raise InterruptionError(2, "")

    with pytest.raises(InterruptionError):
        list(served([chat("image:" + data())], reading, check=check))
    ends.set()
