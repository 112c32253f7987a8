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


def main() -> None:
    """Answer until stdin ends: a request has the limits, and a file as content."""
    # Pillow warns of more pixels than its limit, before it decodes any, and refuses twice as many.
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    with open(int(sys.argv[1]), "wb", buffering=0, closefd=False) as shared:
        answer_all(lambda request, content: _answer(request, content, shared))


def _answer(request: dict[str, Any], content: bytes, shared: IO[bytes]) -> dict[str, Any]:
    """Write the pixels, and answer with their shape; or answer how many pages there are."""
    page = request["page"]
    if page == 0:
        return {"pages": page_count(content)}
    Image.MAX_IMAGE_PIXELS = most = request["pixels"]
    try:
        found = Image.open(BytesIO(content), formats=_FORMATS) if page is None else page_picture(content, page, most)
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
