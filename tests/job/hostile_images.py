"""A whole attack: pictures, references and servers that mean harm, each with what its row may come to.

``None`` is for those that look like an attack and hold a picture: it is served, within the bounds.
"""

import base64
import itertools
import os
import socket
import struct
import threading
import zlib
from contextlib import contextmanager, suppress

import numpy as np
from PIL import Image

from tests.io.images.picture_files import chunk, hostile_files, picture, png, saved
from tests.io.images.test_contents import BROKEN, FORBIDDEN_PATHS, FORBIDDEN_URLS, LONG, MISSING, NO_FILES
from tests.io.images.test_download import FORBIDDEN_TARGETS, LYING, answer, redirect

BROKEN_OR_LARGE = {"invalid_image", "image_too_large"}
# One that is open to the world, and one that only this machine reaches: both are this machine.
PUBLIC, INNER = "127.0.0.2", "127.0.0.1"
# Bytes of a file that is none of a row.
LARGE = 10 << 20
# What the names of listed hosts resolve to.
PRIVATE = {
    "loopback.test": [INNER],
    "metadata.test": ["169.254.169.254"],
    "mixed.test": [PUBLIC, INNER],
    "mixed-other.test": [INNER, PUBLIC],
    "mapped.test": [f"::ffff:{INNER}"],
    "loopback6.test": ["::1"],
    "nat64.test": ["64:ff9b::7f00:1"],
    "sixtofour.test": ["2002:7f00:1::"],
    "teredo.test": ["2001:0:7f00:1::"],
    "unique-local.test": ["fd00::1"],
    "link-local.test": ["fe80::1"],
    "zero.test": ["0.0.0.0"],
    "carrier.test": ["100.64.0.1"],
    "ten.test": ["10.0.0.1"],
    "broadcast.test": ["255.255.255.255"],
    "multicast.test": ["224.0.0.1"],
    "documents.test": ["192.0.2.1"],
    "compatible.test": ["::127.0.0.1"],
    "nobody.test": [],
}
# Numbers that the system's resolver reads as an address of this machine or its network.
SPELLINGS = (
    "127.0.0.1",
    "localhost",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "127.1",
    "0x7f.1",
    "0",
    "10.1",
    "[::1]",
)


def of_data(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def flat(kind, mode, size, **options):
    """A large picture of one colour: a small file."""
    return saved(kind, Image.new(mode, size), **options)


def many_scans(scans):
    """A JPEG whose last scan comes again and again: all its pixels are decoded for each."""
    content = flat("JPEG", "L", (6000, 6000), progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * scans + content[-2:]


def many_frames(kind, count):
    first, second = (Image.new("RGB", (64, 64), colour) for colour in ("red", "lime"))
    return saved(kind, first, save_all=True, append_images=[second, first] * (count // 2), duration=10)


def with_exif(tiff):
    """A JPEG with this EXIF data."""
    content, body = saved("JPEG"), b"Exif\0\0" + tiff
    return content[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + content[2:]


def tiff(entries, rest=b"", following=0):
    """A little TIFF: a directory of tag, type, count and value; what follows is behind it."""
    body = b"".join(struct.pack("<HHII", *each) for each in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + struct.pack("<I", following) + rest


def gray(*others, width=9, height=7, strips=True):
    """The entries of a TIFF without colour, and more of them."""
    base = {256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1), 277: (3, 1, 1)}
    if strips:
        base |= {273: (4, 1, 8), 278: (4, 1, height), 279: (4, 1, width * height)}
    base |= {tag: (kind, count, value) for tag, kind, count, value in others}
    return [(tag, *base[tag]) for tag in sorted(base)]


def orientation(kind, count, value):
    return with_exif(tiff([(0x0112, kind, count, value)]))


def pictures():
    """Name → file and what may come of it."""
    good = saved("PNG")
    side = 9_500
    found = {f"file-{name}": (content, BROKEN_OR_LARGE) for name, content in hostile_files().items()}
    # Its million of pixels is within the real bound, and a GIF without data is a picture.
    for kind in ("gif", "jpeg", "bmp", "webp", "tiff", "png"):
        found.pop(f"file-{kind}-2000x501", None)
    found |= {
        f"bomb-{kind}": (flat(kind, mode, (side, side)), "image_too_large")
        for kind, mode in (("PNG", "1"), ("JPEG", "L"), ("GIF", "L"), ("BMP", "1"))
    }
    found["bomb-TIFF"] = (flat("TIFF", "1", (side, side), compression="group4"), "image_too_large")
    found["bomb-TIFF-deflate"] = (
        flat("TIFF", "L", (10_000, 10_000), compression="tiff_adobe_deflate"),
        "image_too_large",
    )
    found["bomb-WEBP"] = (flat("WEBP", "RGB", (16_383, 6_000), lossless=True, method=0), "image_too_large")
    # Pillow would take seconds to write it: each row has a byte, and that of its filter.
    thin = png(1, 100_000_000, 1, 0, data=zlib.compress(bytes(200_000_000)))
    found["bomb-thin-PNG"] = (thin, "image_too_large")
    found["bomb-wide-PNG"] = (flat("PNG", "1", (100_000_000, 1)), "image_too_large")
    # As many pixels as an image may have: each is served, or takes too much.
    found |= {
        f"giant-{kind}-{mode}": (flat(kind, mode, (9_400, 9_500), **more), {None, "image_too_large"})
        for kind, mode, more in (
            ("PNG", "RGBA", {}),
            ("JPEG", "CMYK", {}),
            ("WEBP", "RGBA", {"lossless": True, "method": 0}),
        )
    }
    found["bomb-PNG-in-PNG"] = (png(2, 2, data=zlib.compress(zlib.compress(bytes(1 << 20)))), "invalid_image")
    found["bomb-scans"] = (many_scans(20_000), "image_too_large")
    found["bomb-PNG-behind-its-rows"] = (png(2, 2, data=zlib.compress(bytes(60 << 20), 9)), None)
    for kind, count in (("GIF", 2000), ("PNG", 1000), ("WEBP", 500)):
        found[f"animated-{kind}"] = (many_frames(kind, count), None)
    found["pages-TIFF"] = (many_frames("TIFF", 300), "invalid_image")
    # Of a GIF each frame may be as large as the screen.
    found["animated-GIF-of-giant-frames"] = (
        saved("GIF", Image.new("L", (4000, 4000)), save_all=True, append_images=[Image.new("L", (4000, 4000), 9)] * 3),
        None,
    )
    apng = chunk(b"acTL", struct.pack(">II", 0xFFFFFFF, 0))
    found["animated-PNG-that-claims-frames"] = (png(2, 2, 8, 2, bytes(12), apng), {*BROKEN_OR_LARGE, None})
    # What describes a picture.
    loop = tiff([(0x8769, 4, 1, 8), (0x0112, 3, 1, 1)])
    found["exif-loop"] = (with_exif(loop), None)
    found["exif-directory-after-itself"] = (with_exif(tiff([(0x0112, 3, 1, 1)], following=8)), None)
    found["exif-many-entries"] = (
        with_exif(tiff([(0x9000 + n, 4, 1, n) for n in range(5000)])),
        {None, "invalid_image"},
    )
    found["exif-giant-count"] = (with_exif(tiff([(0x9286, 7, 0xFFFFFFFF, 8)])), None)
    found["exif-count-times-size"] = (with_exif(tiff([(0x9286, 12, 0x20000001, 8)])), None)
    found["exif-is-empty"] = (with_exif(b""), {None, "invalid_image"})
    found["exif-is-none"] = (with_exif(b"none" * 99), {None, "invalid_image"})
    for number, each in enumerate(
        [(3, 1, 0), (3, 1, 9), (3, 1, 65535), (2, 4, 0x41414141), (3, 2, 0x60006), (12, 1, 8)]
    ):
        found[f"exif-orientation-{number}"] = (orientation(*each), {None, "invalid_image"})
    found["exif-in-PNG"] = (png(2, 2, 8, 2, bytes(12), chunk(b"eXIf", loop)), None)
    found["exif-in-a-PNG-text"] = (
        png(2, 2, 8, 2, bytes(12), chunk(b"tEXt", b"Raw profile type exif\0\nexif\n9\n" + b"zz" * 99)),
        {None, "invalid_image"},
    )
    found["xmp-orientation"] = (
        png(2, 2, 8, 2, bytes(12), chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + b'tiff:Orientation="6"' * 9000)),
        {None, "invalid_image"},
    )
    entities = b"".join(b'<!ENTITY a%d "%b">' % (n, b"&a%d;" % (n - 1) * 10 if n else b"lol") for n in range(10))
    laughs = b"XML:com.adobe.xmp\0\0\0\0\0<!DOCTYPE x [" + entities + b"]><x>&a9;</x>"
    found["xmp-of-a-billion-laughs"] = (png(2, 2, 8, 2, bytes(12), chunk(b"iTXt", laughs)), None)
    profile = zlib.compress(b"\0" * 36 + b"acsp" + b"\xff" * (1 << 19))
    found["icc-is-none"] = (png(2, 2, 8, 2, bytes(12), chunk(b"iCCP", b"a\0\0" + profile)), {None, "invalid_image"})
    icc = b"".join(
        b"\xff\xe2" + struct.pack(">H", 65_000) + b"ICC_PROFILE\0" + bytes([n, 255]) + bytes(64_984)
        for n in range(1, 256)
    )
    jpeg = saved("JPEG")
    found["icc-of-255-parts"] = (jpeg[:2] + icc + jpeg[2:], {None, "invalid_image"})
    found["jpeg-many-comments"] = (
        jpeg[:2] + (b"\xff\xfe\xff\xff" + bytes(65_533)) * 300 + jpeg[2:],
        {None, *BROKEN_OR_LARGE},
    )
    found["mpo-that-claims-pictures"] = (
        jpeg[:2]
        + b"\xff\xe2\x00\x60MPF\0"
        + tiff([(0xB001, 4, 1, 0xFFFFFFF), (0xB002, 7, 0xFFFFFF0, 8)])
        + bytes(40)
        + jpeg[2:],
        {None, "invalid_image"},
    )
    found["gif-comments"] = (
        (gif := saved("GIF"))[: (at := 13 + 3 * (2 << (gif[10] & 7)))]
        + (b"!\xfe" + b"\xff" * 256 * 4000 + b"\0")
        + gif[at:],
        {None, *BROKEN_OR_LARGE},
    )
    # TIFFs.
    pixels = bytes(63)
    weird = {
        "plain": (gray(), pixels, None),
        "strip-count": (gray((273, 4, 0x3FFFFFFF, 8)), pixels, BROKEN_OR_LARGE),
        "strip-of-4-gigabytes": (gray((279, 4, 1, 0xFFFFFFFF)), pixels, {None, *BROKEN_OR_LARGE}),
        "one-row-a-strip": (gray((278, 4, 1, 0)), pixels, {None, *BROKEN_OR_LARGE}),
        "tiles": (
            gray((322, 4, 1, 1 << 30), (323, 4, 1, 1 << 30), (324, 4, 1, 8), (325, 4, 1, 9)),
            pixels,
            {None, *BROKEN_OR_LARGE},
        ),
        "tiles-of-nothing": (
            gray((322, 4, 1, 0), (323, 4, 1, 0), (324, 4, 1, 8), strips=False),
            pixels,
            BROKEN_OR_LARGE,
        ),
        "colour-map": (gray((262, 3, 1, 3), (320, 3, 0xFFFFFF, 8)), pixels, {None, *BROKEN_OR_LARGE}),
        "colour-map-of-few": (gray((262, 3, 1, 3), (320, 3, 3, 8)), pixels, {None, *BROKEN_OR_LARGE}),
        "type-of-nothing": (gray((258, 99, 1, 8)), pixels, {None, *BROKEN_OR_LARGE}),
        "ratio-by-zero": (gray((282, 5, 1, 200), (283, 5, 1, 200)), bytes(200), {None, *BROKEN_OR_LARGE}),
        "jpeg-inside": (gray((259, 3, 1, 7)), pixels, BROKEN_OR_LARGE),
        "old-jpeg-inside": (gray((259, 3, 1, 6)), pixels, BROKEN_OR_LARGE),
        "lzw-of-nothing": (gray((259, 3, 1, 5)), pixels, {None, *BROKEN_OR_LARGE}),
        "fax-of-nothing": (gray((259, 3, 1, 4), (258, 3, 1, 1)), pixels, {None, *BROKEN_OR_LARGE}),
        "lzma-of-nothing": (gray((259, 3, 1, 34925)), pixels, BROKEN_OR_LARGE),
        "samples-of-64-bits": (gray((258, 3, 1, 64)), pixels, BROKEN_OR_LARGE),
        "many-entries": (gray(*((40_000 + n, 4, 1, n) for n in range(20_000))), pixels, {None, *BROKEN_OR_LARGE}),
        "negative-sizes": (gray((256, 9, 1, 0xFFFFFFFF)), pixels, BROKEN_OR_LARGE),
        "size-is-a-text": (gray((256, 2, 4, 0x41414141)), pixels, BROKEN_OR_LARGE),
        "sub-directory-loop": (
            gray((330, 4, 1, 8), (34665, 4, 1, 8), (34853, 4, 1, 8)),
            pixels,
            {None, *BROKEN_OR_LARGE},
        ),
        "icc-beyond-its-end": (gray((34675, 7, 0x7FFFFFFF, 8)), pixels, {None, *BROKEN_OR_LARGE}),
        "xmp-of-a-gigabyte": (gray((700, 1, 1 << 30, 8)), pixels, {None, *BROKEN_OR_LARGE}),
        "photoshop-resources": (gray((34377, 7, 63, 8)), pixels, {None, *BROKEN_OR_LARGE}),
    }
    found |= {f"tiff-{name}": (tiff(entries, rest), code) for name, (entries, rest, code) in weird.items()}
    found["tiff-next-is-itself"] = (tiff(gray(), pixels, following=8), None)
    found["tiff-big"] = (b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 1 << 60), BROKEN_OR_LARGE)
    # Files that are two things.
    zip_end = b"PK\5\6" + bytes(18)
    found |= {
        "both-png-and-zip": (good + zip_end, None),
        "both-png-and-script": (good + b"<script>alert(1)</script><?php system('id') ?>", None),
        "both-gif-and-script": (gif[:6] + b"/*" + gif[8:] + b"*/=1;alert(1)", BROKEN_OR_LARGE | {None}),
        "both-jpeg-and-pdf": (jpeg[:2] + b"\xff\xfe\0\x0b%PDF-1.7\n" + jpeg[2:], None),
        "both-pdf-and-png": (b"%PDF-1.7\n" + good, "invalid_image"),
        "both-bmp-and-png": (b"BM" + good, "invalid_image"),
        "both-html-and-jpeg": (b"<html><!--" + jpeg + b"-->", "invalid_image"),
        "both-jpeg-and-png": (jpeg[:-2] + good, {None, "invalid_image"}),
        "svg-with-a-link": (
            b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
            "invalid_image",
        ),
        "eps-with-a-program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) (r) file\n", "invalid_image"),
        "ico-of-a-png": (saved("ICO", picture(size=(16, 16))), "invalid_image"),
    }
    # Cut, and with other bytes.
    numbers = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        content = saved(kind)
        found[f"cut-{kind}"] = (content[: len(content) // 2], "invalid_image")
        for number in range(6):
            changed = np.frombuffer(content, np.uint8).copy()
            places = numbers.integers(4, len(changed), 5)
            changed[places] ^= numbers.integers(1, 256, 5, dtype=np.uint8)
            found[f"changed-{kind}-{number}"] = (changed.tobytes(), {None, *BROKEN_OR_LARGE})
    return found


def references(root):
    """Name → source and what may come of it; files below the root lie there afterwards."""
    outside = root.parent / "outside"
    outside.mkdir()
    # Whoever reads it gets an answer.
    (outside / "secret.png").write_bytes(saved("PNG"))
    (root / "folder").mkdir()
    (root / "a.png").write_bytes(saved("PNG"))
    (root / "large.png").touch()
    os.truncate(root / "large.png", 65 << 20)
    links = {
        "out": "../outside/secret.png",
        "beside": "../outside",
        "top": "/",
        "loop": "loop",
        "passwd": "/etc/passwd",
        "zero": "/dev/zero",
        "random": "/dev/urandom",
        "full": "/dev/full",
        "memory": "/proc/self/mem",
        "environ": "/proc/self/environ",
        "dangling": "nothing",
        "folder/up": "../../outside/secret.png",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
    table = {
        "image_not_allowed": [
            *FORBIDDEN_PATHS[::2], *FORBIDDEN_URLS[::2], *filter(None, NO_FILES), "out", "beside/secret.png",
            "folder/up", "top/etc/passwd", "passwd", "zero", "random", "full", "memory", "environ", "fifo",
            "{root}/../outside/secret.png",
        ],
        "image_not_read": [*MISSING[::2], "socket", "dangling", "loop"],
        "invalid_image": [*(each for each in BROKEN if "\ud800" not in each), *LONG[3:6]],
        "image_too_large": ["large.png"],
    }  # fmt: skip
    found = {f"{code}-{number}": (each, code) for code, some in table.items() for number, each in enumerate(some)}
    # Of links that only the root of other tests has.
    others = ("own", "alias", "absolute", "chain")
    return {
        name: (each.replace("{root}", str(root)), {code, "image_not_read"} if each.split("/")[0] in others else code)
        for name, (each, code) in found.items()
    }


def of_servers(port):
    """Name → URL, what may come of it, and the answers of the server, if it may be asked."""
    endless, large_or_slow = itertools.repeat, {"image_too_large", "image_not_read"}
    piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    served = {
        "endless": ([*answer(body=b""), endless(bytes(1 << 20))], large_or_slow),
        "endless chunks": ([*answer("Transfer-Encoding: chunked", body=b""), endless(piece)], large_or_slow),
        "endless header": ([b"HTTP/1.1 200 OK\r\n", endless(b"A: b\r\n")], large_or_slow),
        "endless continues": ([endless(b"HTTP/1.1 100 Continue\r\n\r\n")], large_or_slow),
        "a giant length": (answer("Content-Length: 99999999999999999999"), "image_too_large"),
        "a byte now and then": ([*answer("Content-Length: 1000", body=b""), endless(None)], "image_not_read"),
        "a header now and then": ([b"HTTP/1.1 200 OK\r\nA: ", endless(None)], "image_not_read"),
        "nothing ever": ([endless(b"")], "image_not_read"),
        "less than its length": (answer("Content-Length: 99999", body=saved("PNG")), "image_not_read"),
        "a page": (answer("Content-Type: image/png", body=b"<html>none</html>"), "invalid_image"),
        "a bomb": (answer(body=flat("PNG", "1", (9_500, 9_500))), "image_too_large"),
        "a picture": (answer(body=saved("PNG")), None),
        "rebinding": (redirect(f"http://rebinding.test:{port}/again"), "image_not_allowed"),
        "a circle": (redirect("/a-circle"), "image_not_allowed"),
        "a chain": (redirect("/a-chain?next"), "image_not_allowed"),
    }
    found = {f"lying-{name}": (answers, "image_not_read") for name, answers in LYING.items()}
    found |= {f"server-{name}": each for name, each in served.items()}
    for number, target in enumerate(FORBIDDEN_TARGETS.replace("{port}", str(port)).split()):
        found[f"redirect-{number}"] = (redirect(target), "image_not_allowed")
    for name in PRIVATE:
        found[f"redirect-{name}"] = (redirect(f"http://{name}:{port}/"), "image_not_allowed")
    paths = {name: "/" + name.replace(" ", "-").removeprefix("server-") for name in found}
    rows = {
        name: (f"http://{'rebinding' if name == 'server-rebinding' else 'site'}.test:{port}{paths[name]}", code)
        for name, (_, code) in found.items()
    }
    rows |= {f"address-{name}": (f"http://{name}:{port}/", "image_not_allowed") for name in PRIVATE}
    rows |= {
        f"spelling-{name}": (f"http://{name}:{port}/", {"image_not_allowed", "image_not_read"}) for name in SPELLINGS
    }
    return rows, {paths[name]: answers for name, (answers, _) in found.items()}


def listed(port):
    names = ("site.test", "rebinding.test", *PRIVATE, *(each.strip("[]") for each in SPELLINGS))
    return [f"{name}:{port}" for name in names]


class Resolver:
    """Names of this attack; all others by the system."""

    def __init__(self, look_up):
        self.look_up = look_up
        self.times = 0

    def __call__(self, host, port):
        if host == "rebinding.test":
            # Another address at each look.
            self.times += 1
            return [PUBLIC] if self.times == 1 else [INNER]
        return PRIVATE[host] if host in PRIVATE else [PUBLIC] if host == "site.test" else self.look_up(host, port)


@contextmanager
def servers(answers):
    """Both servers on one port; yields it, and the connections that the inner one had.

    Args:
        answers: called with the port: gives the answers by path. Of an answer, None is a byte that comes slowly.
    """
    ended, asked = threading.Event(), []

    def answer_one(connection, of_path):
        with suppress(OSError), connection:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                if not (piece := connection.recv(4096)):
                    return
                request += piece
            for piece in of_path.get(request.split()[1].decode().partition("?")[0], [b""]):
                for each in [piece] if isinstance(piece, bytes) else piece:
                    if ended.is_set():
                        return
                    if not each:
                        ended.wait(0.05)
                    connection.sendall(b"x" if each is None else each)

    def serve(listener, of_path):
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                if of_path is None:
                    asked.append(connection.getpeername())
                    connection.close()
                else:
                    threading.Thread(target=answer_one, args=(connection, of_path), daemon=True).start()

    with socket.create_server((PUBLIC, 0)) as public:
        port = public.getsockname()[1]
        with socket.create_server((INNER, port)) as inner:
            for listener, of_path in ((public, answers(port)), (inner, None)):
                threading.Thread(target=serve, args=(listener, of_path), daemon=True).start()
            try:
                yield port, asked
            finally:
                ended.set()
                for listener in (public, inner):
                    listener.shutdown(socket.SHUT_RDWR)


def as_text(source, name, root):
    """Of a file, a data URL, or a path if it is large; a text as it is."""
    if isinstance(source, str):
        return source
    if len(source) < LARGE:
        return of_data(source)
    (root / name).write_bytes(source)
    return name
