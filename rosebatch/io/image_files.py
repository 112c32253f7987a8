"""Files of images as an input: each is a row, with its path as the id; of a PDF, each page."""

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from rosebatch.core.errors import FlagError, RowError, UserError
from rosebatch.io.columns import FILE_IMAGE
from rosebatch.io.files import is_url
from rosebatch.io.find_files import WILD, fixed_part
from rosebatch.io.formats import IMAGES, PDF, Kind, named
from rosebatch.io.images.contents import contents
from rosebatch.io.images.decode import count_pages
from rosebatch.io.images.pdf import Page
from rosebatch.io.images.policy import MediaPolicy
from rosebatch.io.table_values import BadValues
from rosebatch.io.unsupported_formats import is_visible, listed

_OF_ROWS = "--image-column NAME says which images rows have"
# What results take over of a row.
ROWS_OF_FILES = pa.schema([("id", pa.string())])
# A file of a few bytes may claim any number.
_MOST_PAGES = 10_000
# Files of images that are not decoded.
_UNREAD = (
    *(".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".psd", ".eps", ".ico", ".dib", ".xcf", ".pcx", ".tga"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".exr", ".hdr", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw"),
)


def find_images(source: str) -> list[str]:
    """The files of a source, in the order of their names.

    Args:
        source: a file, a folder or a glob. A folder means the images in it, but for those with a leading ``.`` or
            ``_``; all that a glob matches are rows.

    Raises:
        FlagError: it is no input of images.
        UserError: there are no files, or the folder has images that would not be read.
    """
    if source == "-" or is_url(source):
        raise FlagError(f"{source}: --prompt asks about images in files of this machine; {_OF_ROWS}")
    path = Path(source)
    try:
        if path.is_dir():
            return _in_folder(path, source)
        if not path.exists() and any(mark in source for mark in WILD):
            # pathlib's glob refuses absolute patterns.
            found = sorted(each for each in glob.glob(source, recursive=True) if not Path(each).is_dir())  # noqa: PTH207
        else:
            found = [source] if os.path.lexists(source) else []
    except OSError as error:
        raise UserError(f"{error.filename or source}: {error.strerror or error}") from None
    if not found:
        raise UserError(f"{source}: no such file or folder")
    if rows := next((each for each in found if named(each).kind is not None), None):
        raise FlagError(f"{rows}: --prompt asks about images, and this has rows; {_OF_ROWS}")
    return found


def _in_folder(folder: Path, source: str) -> list[str]:
    names = sorted(filter(is_visible, (each.name for each in folder.iterdir())))
    inner = [f"{name}/" for name in names if (folder / name).is_dir() and _has_images(folder / name)]
    wanted = (*IMAGES, PDF)
    pattern = f"'{source.rstrip('/')}/**/*{next((each for each in wanted if _ends(names, (each,))), '.png')}'"
    if inner:
        raise UserError(f"{source}: {listed(inner)} would not be read; give a pattern such as {pattern}")
    if unread := _ends(names, _UNREAD):
        raise UserError(f"{source}: {listed(unread)} would not be read; convert them to .png, or give {pattern}")
    found = [str(folder / name) for name in _ends(names, wanted) if not (folder / name).is_dir()]
    if not found:
        raise UserError(f"{source}: no images found; a folder needs files that end in {', '.join(wanted)}")
    return found


def _ends(names: Sequence[str], endings: tuple[str, ...]) -> list[str]:
    return [name for name in names if name.lower().endswith(endings)]


def _has_images(folder: Path) -> bool:
    return any(_ends(list(filter(is_visible, names)), (*IMAGES, PDF, *_UNREAD)) for _, _, names in os.walk(folder))


def image_root(source: str) -> Path:
    """The folder that links of a source's files may not lead out of: its own, or that of a glob or file."""
    path = Path(source)
    if path.is_dir():
        return path.resolve()
    return path.resolve().parent if path.exists() else Path(fixed_part(source))


def image_rows(path: str, kind: Kind, policy: MediaPolicy) -> Iterator[tuple[int, dict[str, object] | BadValues]]:
    """The rows of a file, each with the number of its page; 0 of what has none.

    Args:
        path: of the file.
        kind: an image or a PDF.
        policy: what may be read.
    """
    # A name may have any bytes, and a result is text.
    name, file = os.fsencode(path).decode(errors="backslashreplace"), Path(path).absolute()
    if kind == "image":
        yield 0, {"id": name, FILE_IMAGE: file}
        return
    try:
        count = count_pages(contents(file, policy))
        if not 0 < count <= _MOST_PAGES:
            what = "no pages" if not count else f"more than {_MOST_PAGES} pages"
            raise RowError("invalid_image", f"the PDF has {what}")
    except RowError as error:
        yield 0, BadValues({"id": name}, error)
        return
    for number in range(1, count + 1):
        yield number, {"id": f"{name}#{number}", FILE_IMAGE: Page(file, number)}


def digest_of_names(paths: Sequence[str]) -> str:
    """SHA-256 of names and sizes: a look at the contents of all photos would take as long as the job."""
    found = hashlib.sha256()
    for path in paths:
        try:
            size = Path(path).stat().st_size
        except OSError:
            # The row will say so.
            size = -1
        found.update(b"%b\0%d\0" % (os.fsencode(path), size))
    return found.hexdigest()
