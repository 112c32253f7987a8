"""Files become pixels as transformers makes them, and hostile files become errors with a name."""

import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, TiffImagePlugin

from rosebatch.core.errors import RowError, UserError
from rosebatch.io.images.decode import DecodeLimits, decode, processes
from tests.io.images.picture_files import good_files, hostile_files, picture, saved

# A thousandth of what the headers promise, and less than a process takes that decodes it.
LIMITS = DecodeLimits(pixels=1_000_000, memory=128 << 20)


def error_of(content, limits=LIMITS):
    with pytest.raises(RowError) as caught:
        decode(content, limits)
    assert caught.value.message.isprintable()
    return caught.value


def test_pixels_are_those_of_transformers_image_processors(transformers):
    """Alpha became black, a palette's transparent color its own, and a photo lay on its side."""
    from transformers.image_transforms import convert_to_rgb

    for name, content in good_files().items():
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        if upright.mode == "I;16":
            # transformers makes nearly all of it white.
            continue
        found = decode(content)
        assert (found.rgb.dtype, found.rgb.flags.c_contiguous) == (np.uint8, True)
        np.testing.assert_array_equal(found.rgb, convert_to_rgb(upright, return_numpy=True), err_msg=name)


def test_pixels_without_alpha_are_pillows():
    """The same by Pillow alone: of all frames and pages the first."""
    for name, content in good_files().items():
        with Image.open(io.BytesIO(content)) as image:
            plain = "A" not in image.getbands() and "transparency" not in image.info and image.mode != "I;16"
            if plain and "turned" not in name:
                np.testing.assert_array_equal(decode(content).rgb, np.asarray(image.convert("RGB")), err_msg=name)


def test_the_digest_is_of_the_pixels():
    """Two files of one picture are the same to a cache; another shape or pixel is not."""
    base = decode(saved("PNG"))
    assert len(base.digest) == 32
    assert decode(saved("BMP")).digest == decode(saved("PNG", compress_level=0)).digest == base.digest
    flat = Image.frombytes("RGB", (7, 9), picture().tobytes())
    other = picture()
    other.putpixel((8, 6), (1, 2, 3))
    assert len({base.digest, decode(saved("PNG", flat)).digest, decode(saved("PNG", other)).digest}) == 3


def test_pixels_stay_when_the_process_goes_on():
    """The next image overwrote those that came through the same memory."""
    first = decode(good_files()["png-RGB"])
    before = first.rgb.copy()
    decode(good_files()["jpeg-CMYK"])
    processes.end_all()
    np.testing.assert_array_equal(first.rgb, before)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory a process took")
def test_hostile_files_are_errors_within_the_bounds():
    """Bombs, giant headers, other formats and broken files: each is its row's error, and the process lives on.

    What a header promises takes gigabytes.
    """
    assert len(hostile_files()) > 150
    processes.end_all()
    decode(good_files()["png-RGB"])
    (process,) = processes.waiting
    before = peak_memory(process.pid)
    codes = {name: error_of(content).code for name, content in hostile_files().items()}
    assert set(codes.values()) == {"invalid_image", "image_too_large"}
    assert {codes[f"{kind}-16000x16000"] for kind in ("png", "gif", "bmp", "jpeg", "webp", "tiff")} == {
        "image_too_large"
    }
    assert [name for name in codes if name.startswith(("other", "saved")) and codes[name] != "invalid_image"] == []
    assert processes.waiting == [process]
    assert peak_memory(process.pid) - before < LIMITS.memory


def peak_memory(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.parametrize(
    "name",
    ["jpeg-RGB", "jpeg-progressive", "png-RGB", "png-animated", "webp-lossless", "gif-P", "bmp-RGB", "tiff-tiff_lzw"],
)
def test_a_file_that_is_cut_is_an_error_or_whole(name):
    """A cut file was a picture with grey below. What is missing may only be what comes behind the pixels."""
    content = good_files()[name]
    whole, lost = decode(content), 0
    for size in range(len(content)):
        try:
            assert decode(content[:size], LIMITS).digest == whole.digest, size
        except RowError as error:
            assert error.code == "invalid_image"
            lost = size + 1
    assert lost > len(content) / 3


def test_as_many_pixels_as_the_limit():
    """One more is too many: the bound was off by one, or by two times."""
    content = saved("PNG", picture(size=(9, 7)))
    assert decode(content, DecodeLimits(pixels=63)).rgb.shape == (7, 9, 3)
    error = error_of(content, DecodeLimits(pixels=62))
    assert (error.code, error.message) == ("image_too_large", "it has more than 62 pixels")


@pytest.mark.parametrize(
    ("limits", "message"),
    [(DecodeLimits(memory=8 << 20), "more than 0.00781 GiB"), (DecodeLimits(seconds=0.001), "more than 0.001 s")],
)
def test_memory_and_time_are_bounded(limits, message):
    """A file within the bound of pixels may take too much all the same; the next one finds a process."""
    error = error_of(saved("PNG", Image.new("L", (3000, 3000))), limits)
    assert error.code == "image_too_large"
    assert message in error.message
    assert decode(good_files()["png-L"]).rgb.shape == (7, 9, 3)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_process_that_dies_is_replaced(number):
    """A library that crashes must cost one row."""
    processes.end_all()
    decode(good_files()["png-L"])
    (process,) = processes.waiting
    os.kill(process.pid, number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert error_of(good_files()["png-L"]).code in ("invalid_image", "image_too_large")
    assert processes.waiting == []
    assert decode(good_files()["png-L"]).rgb.shape == (7, 9, 3)


def test_no_process_can_be_started(monkeypatch):
    """The row's error, not the end of the job."""
    processes.end_all()
    monkeypatch.setattr("sys.executable", "/nonexistent")
    assert error_of(good_files()["png-L"]).code == "image_not_read"


def test_without_pillow(monkeypatch):
    """The extra is named, in place of an exit status for every row."""
    processes.end_all()
    monkeypatch.setattr("rosebatch.io.images.decode.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rosebatch\[images\]"):
        decode(good_files()["png-L"])


def tiff(*kinds):
    """A file with a picture of each kind: 0 says nothing, 1 is a smaller copy, 2 a page, 4 a mask."""
    file = io.BytesIO()
    with TiffImagePlugin.AppendingTiffWriter(file) as writer:
        for kind in kinds:
            tags = TiffImagePlugin.ImageFileDirectory_v2()
            tags[254] = kind
            picture().save(writer, "TIFF", tiffinfo=tags)
            writer.newFrame()
    return file.getvalue()


@pytest.mark.parametrize(("kinds", "pages"), [((2, 2, 2), 3), ((0, 0), 2), ((0, 1, 0), 2)])
def test_pages_of_a_tiff(kinds, pages):
    """All but the first were left out, and the answer was to that one."""
    error = error_of(tiff(*kinds))
    assert (error.code, error.message) == (
        "invalid_image",
        f"it has {pages} pages, and an image is one of them: save each as a file",
    )


def test_copies_and_masks_of_a_tiff_are_no_pages():
    """Cameras and maps have smaller copies of the picture behind it."""
    expected = decode(tiff(0)).digest
    assert decode(tiff(0, 1, 1, 5)).digest == decode(tiff(0, 4)).digest == expected


def test_greys_of_16_bits_are_not_white():
    """Pillow makes all from 255 on white: a scan of 16 bits was an empty page, without a word."""
    greys = np.array([[0, 255, 256, 30_000, 65_535]] * 3, np.uint16)
    for kind in ("PNG", "TIFF"):
        file = io.BytesIO()
        Image.fromarray(greys).save(file, kind)
        assert decode(file.getvalue()).rgb[1, :, 2].tolist() == [0, 0, 1, 117, 255]


@pytest.mark.parametrize("numbers", [np.float32([[0.0, 0.5, 1.0]]), np.int32([[0, 70_000, 5]]), np.int32([[-1, 5, 7]])])
def test_greys_without_a_white_are_errors(numbers):
    """It is not said what is white: floats between 0 and 1 were a black picture."""
    file = io.BytesIO()
    Image.fromarray(numbers).save(file, "TIFF")
    with pytest.raises(RowError, match="greys are no numbers of 8 or 16 bits"):
        decode(file.getvalue())
