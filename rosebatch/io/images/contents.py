"""The bytes that a source stands for, if they may be read."""

import binascii
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rosebatch.core.errors import RowError
from rosebatch.io.images.download import download
from rosebatch.io.images.local_file import read_local
from rosebatch.io.images.policy import MediaPolicy

# Characters of a path or URL. To resolve a path takes the square of its length.
_LONGEST = 8192
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
# Base64 of the formats' first bytes, and nothing that makes it a path. Nothing is tried twice: it may be long.
_BASE64 = re.compile(r"(?:/9j/|iVBORw0KGgo|UklGR|R0lGOD|Qk[0-3]|SUkqA|TU0AK)[A-Za-z0-9+/\r\n]*+=*+\s*+")


def contents(source: str | Path | bytes, policy: MediaPolicy) -> bytes:
    """The file of an image, as it is. Any thread may call this.

    Args:
        source: as a reference has it; bytes are the file.
        policy: what may be read.

    Raises:
        RowError: ``image_not_allowed``: the policy forbids it; ``image_too_large``: it has too many bytes;
            ``image_not_read``: it is not there, or what has it fails or is slow; ``invalid_image``: the source is no
            reference.
    """
    if isinstance(source, bytes):
        policy.require_size(len(source))
        return source
    if isinstance(source, Path):
        return read_local(str(source), policy)
    if _BASE64.fullmatch(source):
        return _decoded(source, policy)
    scheme = found[1].lower() if (found := _SCHEME.match(source)) else ""
    if scheme == "data":
        head, comma, data = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RowError("invalid_image", "a data URL must have base64: data:image/png;base64,...")
        return _decoded(data, policy)
    if len(source) > _LONGEST:
        raise RowError("invalid_image", f"a path or URL has at most {_LONGEST} characters")
    match scheme:
        case "":
            return read_local(source, policy)
        case "file":
            return read_local(_path(source), policy)
        case "http" | "https":
            return download(source, policy)
    raise RowError("image_not_allowed", f"{scheme}: is not served; a path with a colon may begin with ./")


def _decoded(text: str, policy: MediaPolicy) -> bytes:
    text = text.replace("\n", "").replace("\r", "")
    # At most two of the last three bytes are none.
    policy.require_size(len(text) // 4 * 3 - 2)
    try:
        content = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise RowError("invalid_image", f"its base64 is broken: {error}") from None
    policy.require_size(len(content))
    return content


def _path(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise RowError("invalid_image", f"the URL is broken: {error}") from None
    if parts.netloc not in ("", "localhost"):
        raise RowError("image_not_allowed", "a file: URL of another host is not read")
    if parts.query or parts.fragment:
        raise RowError("invalid_image", "a file: URL has %3F and %23 in place of ? and #")
    return unquote(parts.path, errors="surrogateescape")
