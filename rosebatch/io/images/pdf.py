"""Pages of PDFs: which there are, and their pictures. Only the process that decodes imports pypdfium2."""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rosebatch.core.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

# Dots of a page's picture an inch: small print stays readable. A page of A4 has four million pixels.
_DPI = 200
_POINTS = 72


@dataclass(frozen=True, slots=True)
class Page:
    """A page as the source of an image.

    Attributes:
        path: of the PDF.
        number: counted from 1.
    """

    path: Path
    number: int


def require_pdfium() -> None:
    """Check that PDFs can be read.

    Raises:
        UserError: pypdfium2 is not installed.
    """
    if find_spec("pypdfium2") is None:
        raise UserError("PDFs need pypdfium2, which is not installed; pip install 'rosebatch[pdf]'")


def page_count(content: bytes) -> int:
    """The pages of a PDF."""
    import pypdfium2

    return len(pypdfium2.PdfDocument(content))


def page_picture(content: bytes, number: int, most: int) -> "Image.Image":
    """The picture of a page, which is less fine if it is very large.

    Args:
        content: of the PDF.
        number: of the page, counted from 1.
        most: pixels.

    Raises:
        ValueError: it has no size, or an endless one.
    """
    import pypdfium2

    document = pypdfium2.PdfDocument(content)
    # Before there is a page: else what is filled into forms is not drawn.
    document.init_forms()
    page = document[number - 1]
    width, height = page.get_size()
    scale = min(_finest(width, height, most), _DPI / _POINTS) if width > 0 < height else 0
    # That of an endless side is no number.
    if not scale > 0:
        raise ValueError(f"the page has {width:g} by {height:g} points")
    picture: Image.Image = page.render(scale=scale).to_pil()
    return picture


def _finest(width: float, height: float, most: int) -> float:
    """Pixels a point of a page that has so many, if a pixel more on each side."""
    half, area = (width + height) / 2, width * height
    return (math.sqrt(half * half + area * (most - 1)) - half) / area
