"""The process that decodes images."""

import sys
import warnings
from io import BytesIO
from typing import IO, Any

# Only these parsers are there: Image.open would import those of all formats otherwise.
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from rosebatch.host.within_limits import answer_all
from rosebatch.io.images.pdf import page_count, page_picture
from rosebatch.io.images.upright import upright_rgb

_FORMATS = (
    BmpImagePlugin.BmpImageFile.format,
    GifImagePlugin.GifImageFile.format,
    JpegImagePlugin.JpegImageFile.format,
    PngImagePlugin.PngImageFile.format,
    TiffImagePlugin.TiffImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
)
# Of a TIFF's picture: what it is, and the bits of what are no pages.
_KIND, _NO_PAGE = 254, 0b101


def main() -> None:
    """Answer until stdin ends: a request has the limits, and a file as content."""
    # Pillow warns of more pixels than its limit, before it decodes any, and refuses twice as many.
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    with open(int(sys.argv[1]), "wb", buffering=0, closefd=False) as shared:
        answer_all(lambda request, content: _answer(request, content, shared))


def _answer(request: dict[str, Any], content: bytes, shared: IO[bytes]) -> dict[str, Any]:
    """Write the pixels, and answer with their shape; or answer how many pages there are."""
    if request["what"] == "pages":
        return {"pages": page_count(content)}
    page = request["page"]
    Image.MAX_IMAGE_PIXELS = most = request["pixels"]
    try:
        found = Image.open(BytesIO(content), formats=_FORMATS) if page is None else page_picture(content, page, most)
        _require_one_page(found)
        rgb = upright_rgb(found)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return {"exceeds": "pixels"}
    except UnidentifiedImageError:
        raise ValueError("it is no JPEG, PNG, WebP, GIF, BMP or TIFF file, or its beginning is broken") from None
    shared.seek(0)
    left = memoryview(rgb.tobytes())
    while left:
        left = left[shared.write(left) :]
    return {"height": rgb.height, "width": rgb.width}


def _require_one_page(image: Image.Image) -> None:
    """Check that a TIFF file has a single page. Smaller copies of it, and masks, are none.

    Raises:
        ValueError: it has several: the others would be left out.
    """
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return
    pages = 0
    for number in range(image.n_frames):
        image.seek(number)
        pages += not int(image.tag_v2.get(_KIND, 0)) & _NO_PAGE
    image.seek(0)
    if pages > 1:
        raise ValueError(f"it has {pages} pages, and an image is one of them: save each as a file")
