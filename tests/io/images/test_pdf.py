"""Pages of PDFs are rows: their pictures, what is wrong with one, and what they may take."""

import re
import zlib

import numpy as np
import pytest
from PIL import Image

from rosebatch.core.errors import RowError, UserError
from rosebatch.io.columns import Columns
from rosebatch.io.images import pdf
from rosebatch.io.images.decode import DecodeLimits, count_pages, decode
from rosebatch.io.images.load import load_image
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow
from tests.io.images.picture_files import saved

COLOURS = ("red", "lime", "blue")


def document(size=(72, 36), colours=COLOURS):
    """A PDF with a page of each colour, a point for each pixel."""
    first, *others = (Image.new("RGB", size, colour) for colour in colours)
    return saved("PDF", first, save_all=True, append_images=others, resolution=72)


def read(source):
    return PromptReader(str(source), {}, columns=Columns(shared="Read."))


def test_without_pdfium(tmp_path, monkeypatch):
    """The first page of a PDF would have been an error row, and all others."""
    (tmp_path / "a.pdf").write_bytes(document())
    monkeypatch.setattr(pdf, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape("pip install 'rosebatch[pdf]'")):
        read(tmp_path / "a.pdf")


@pytest.fixture
def _pdfium():
    pytest.importorskip("pypdfium2")


@pytest.mark.usefixtures("_pdfium")
def test_each_page_is_a_row(tmp_path, monkeypatch):
    """Its id has the number that readers of PDFs show; 72 points are 200 pixels."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.pdf").write_bytes(document())
    (tmp_path / "c.PDF").write_bytes(document(colours=("white",)))
    (tmp_path / "a.png").write_bytes(saved("PNG"))
    reader = read(".")
    rows = list(reader)
    assert [row.id for row in rows] == ["a.png", "b.pdf#1", "b.pdf#2", "b.pdf#3", "c.PDF#1"]
    assert [row.where for row in rows] == [row.id for row in rows]
    assert reader.count() is None and not reader.is_empty
    for row, colour in zip(rows[1:4], ([255, 0, 0], [0, 255, 0], [0, 0, 255]), strict=True):
        rgb = load_image(row.images[0], reader.media).rgb
        assert rgb.shape == (100, 200, 3)
        # Pillow keeps pictures in a PDF as JPEG.
        assert np.abs(rgb[50, 100].astype(int) - colour).max() < 3


@pytest.mark.thorough
@pytest.mark.usefixtures("_pdfium")
def test_broken_and_hostile_documents(tmp_path):
    """Each costs a row, or a page."""
    good = document()
    files = {
        "0": b"",
        "1": b"%PDF-1.7\nnone",
        "2": saved("PNG"),
        "3": good[: len(good) // 2],
        "4": re.sub(rb"/Count\s+3", b"/Count 2000000000", good),
        "5": re.sub(rb"/MediaBox \[[^]]*\]", b"/MediaBox [ 0 0 14400 14400 ]", good),
        "6": good.replace(b"/Kids", b"/Kidz"),
        "7": good,
    }
    for name, content in files.items():
        (tmp_path / f"{name}.pdf").write_bytes(content)
    reader = read(tmp_path)
    found = {}
    for row in reader:
        name = row.metadata["id"].rpartition("/")[2]
        try:
            if isinstance(row, FailedRow):
                raise row.error
            load_image(row.images[0], reader.media)
        except RowError as error:
            found.setdefault(error.code, []).append(name)
        else:
            found.setdefault("read", []).append(name)
    assert [name for name in found["read"] if name.startswith("7")] == ["7.pdf#1", "7.pdf#2", "7.pdf#3"]
    assert set(found) <= {"read", "invalid_image", "image_too_large"}
    assert {"0.pdf", "1.pdf", "2.pdf"} <= set(found["invalid_image"])
    assert [name for name in found["read"] if name.startswith("5")] == ["5.pdf#1", "5.pdf#2", "5.pdf#3"]


@pytest.mark.usefixtures("_pdfium")
def test_limits_of_a_page():
    """A poster or plan was an error row, and nothing made it smaller."""
    height, width, _ = decode(document(), DecodeLimits(pixels=5_000), page=1).rgb.shape
    assert 4_700 < height * width <= 5_000 and abs(width - 2 * height) <= 2
    assert decode(document(), DecodeLimits(pixels=21_000), page=3).rgb.shape == (100, 200, 3)
    assert count_pages(document()) == 3
    # A page of the number 0 asked for their number, and the answer was taken for an error without a text.
    for page in (4, 0, -1):
        with pytest.raises(RowError) as caught:
            decode(document(), page=page)
        assert caught.value.code == "invalid_image"


@pytest.mark.usefixtures("_pdfium")
def test_a_number_of_pages_that_nobody_has(tmp_path, monkeypatch):
    """A file of a few bytes was a job without an end."""
    (tmp_path / "a.pdf").write_bytes(document())
    monkeypatch.setattr("rosebatch.io.image_files._MOST_PAGES", 2)
    (row,) = read(tmp_path / "a.pdf")
    assert row.error.code == "invalid_image" and "more than 2 pages" in row.error.message


def written(*objects):
    """A PDF of these objects; the first is its catalog."""
    content, places = b"%PDF-1.7\n", []
    for number, each in enumerate(objects, start=1):
        places.append(len(content))
        content += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    end = b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(content))
    return content + head + table + end


def stream(content, fields=b""):
    return b"<<%b/Length %d>>\nstream\n%b\nendstream" % (fields, len(content), content)


CATALOG, PAGES = b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>"


@pytest.mark.usefixtures("_pdfium")
@pytest.mark.parametrize("has_look", [True, False])
def test_what_is_filled_into_a_form_is_drawn(has_look):
    """A page showed the form as it was before anybody wrote into it."""
    font = b"<</Font<</F 4 0 R>>>>"
    look = stream(
        b"/Tx BMC BT /F 9 Tf 1 1 Td (HHHH) Tj ET EMC", b"/Type/XObject/Subtype/Form/BBox[0 0 36 9]/Resources" + font
    )
    field = b"<</Subtype/Widget/FT/Tx/T(a)/V(HHHH)/Rect[0 0 36 9]/F 4/DA(/F 9 Tf 0 g)/P 3 0 R%b>>"
    content = written(
        b"<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[5 0 R]/NeedAppearances true/DA(/F 9 Tf 0 g)/DR%b>>>>" % font,
        PAGES,
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 36 9]/Annots[5 0 R]>>",
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        field % (b"/AP<</N 6 0 R>>" if has_look else b""),
        *[look] * has_look,
    )
    rgb = decode(content, page=1).rgb
    assert (rgb.min(), rgb.max()) == (0, 255)


def drawn(content, *others, resources=b"", box=b"0 0 9 9", catalog=CATALOG):
    """A page that is drawn by this program."""
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[%b]/Contents 4 0 R/Resources<<%b>>>>" % (box, resources)
    return written(catalog, PAGES, page, content, *others)


FORM = b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</F 5 0 R>>>>"
PICTURE = b"/Type/XObject/Subtype/Image/Width 30000/Height 30000/BitsPerComponent 1/ColorSpace/DeviceGray"
FORMS, PICTURES = {"resources": b"/XObject<</F 5 0 R>>"}, {"resources": b"/XObject<</I 5 0 R>>"}
SHOWS = stream(b"9 0 0 9 0 0 cm /I Do")
TILES = b"/Type/Pattern/PatternType 1/PaintType 1/TilingType 1/BBox[0 0 .01 .01]/XStep .0001/YStep .0001/Resources<<>>"
TOO_MUCH = {"image_too_large"}
# Made when they are asked for: some are 100 MB before they are compressed.
HOSTILE = {
    "program-bomb": (
        lambda: drawn(stream(zlib.compress(b"0 0 9 9 re f " * 2_000_000, 9), b"/Filter/FlateDecode")),
        TOO_MUCH,
    ),
    "twice-compressed": (
        lambda: drawn(
            stream(zlib.compress(zlib.compress(bytes(200 << 20))), b"/Filter[/FlateDecode/FlateDecode]"),
        ),
        {*TOO_MUCH, None},
    ),
    "form-in-itself": (lambda: drawn(stream(b"/F Do"), stream(b"/F Do /F Do", FORM), **FORMS), TOO_MUCH),
    "giant-picture": (
        lambda: drawn(
            SHOWS,
            stream(zlib.compress(bytes(900_000_000 // 8), 9), PICTURE + b"/Filter/FlateDecode"),
            **PICTURES,
        ),
        {*TOO_MUCH, None},
    ),
    "tiny-tiles": (
        lambda: drawn(
            stream(b"/Pattern cs /P scn 0 0 9 9 re f"),
            stream(b"0 0 1 1 re f", TILES),
            resources=b"/Pattern<</P 5 0 R>>",
        ),
        {*TOO_MUCH, None},
    ),
    "file-outside": (lambda: drawn(SHOWS, stream(b"", PICTURE + b"/F(/etc/passwd)"), **PICTURES), {None}),
    "script": (
        lambda: drawn(stream(b""), catalog=CATALOG[:-2] + b"/OpenAction<</S/JavaScript/JS(while(1){})>>>>"),
        {None},
    ),
    "pages-in-themselves": (
        lambda: written(CATALOG, b"<</Type/Pages/Kids[2 0 R 2 0 R]/Count 5>>"),
        {"invalid_image"},
    ),
    "deep-lists": (lambda: drawn(stream(b"[" * 100_000)), {None}),
    "giant-page": (lambda: drawn(stream(b""), box=b"0 0 99999 99999"), TOO_MUCH),
    "endless-page": (lambda: drawn(stream(b""), box=b"0 0 1e39 nan"), {*TOO_MUCH, None}),
    "page-of-nothing": (lambda: drawn(stream(b""), box=b"0 0 0 0"), {*TOO_MUCH, None}),
}


@pytest.mark.usefixtures("_pdfium")
@pytest.mark.parametrize("name", HOSTILE)
def test_programs_of_pages_are_bounded(name):
    """A page is a program: one that draws itself took all memory, or hours."""
    make, codes = HOSTILE[name]
    content = make()
    try:
        decode(content, DecodeLimits(seconds=1, memory=256 << 20), page=1)
        code = None
    except RowError as error:
        code = error.code
    assert code in codes
