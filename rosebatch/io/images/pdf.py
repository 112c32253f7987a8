"""Pages of PDFs: which there are, and their pictures. Only the process that decodes imports pypdfium2."""

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
    """The picture of a page.

    Args:
        content: of the PDF.
        number: of the page, counted from 1.
        most: pixels.

    Raises:
        DecompressionBombError: it would have more.
    """
    import pypdfium2
    from PIL import Image

    document = pypdfium2.PdfDocument(content)
    # Before there is a page: else what is filled into forms is not drawn.
    document.init_forms()
    page = document[number - 1]
    width, height = (side * _DPI / _POINTS for side in page.get_size())
    if (width + 1) * (height + 1) > most:
        raise Image.DecompressionBombError
    picture: Image.Image = page.render(scale=_DPI / _POINTS).to_pil()
    return picture
