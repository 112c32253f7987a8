"""Small files of images, made here: good ones of each format and mode, and hostile ones."""

import io
import struct
import zlib
from functools import cache

import numpy as np
from PIL import Image


def picture(mode="RGB", size=(9, 7)):
    """Random pixels, the same each time."""
    width, height = size
    numbers = np.random.default_rng(0)
    if mode == "I;16":
        return Image.fromarray(numbers.integers(0, 1 << 16, (height, width), np.uint16))
    bands = len(Image.new(mode, (1, 1)).getbands())
    if mode in ("1", "P"):
        bands = 3
    drawn = Image.fromarray(numbers.integers(0, 256, (height, width, bands), np.uint8).squeeze(), None)
    if mode in ("1", "P"):
        return drawn.convert(mode)
    return Image.frombytes(mode, size, drawn.tobytes())


def saved(kind, image=None, **options):
    """A file's bytes."""
    file = io.BytesIO()
    (image or picture()).save(file, kind, **options)
    return file.getvalue()


def turned(orientation):
    """EXIF data that says how a camera was held."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def frames():
    """Options for a second picture in a file. A new one each time: a format leaves its settings in it."""
    return {"save_all": True, "append_images": [Image.new("RGB", (9, 7), "red")]}


@cache
def good_files():
    """Name → bytes."""
    files = {f"jpeg-{mode}": saved("JPEG", picture(mode)) for mode in ("L", "RGB", "CMYK")}
    files["jpeg-progressive"] = saved("JPEG", progressive=True)
    files |= {
        f"{kind}-turned-{n}": saved(kind, exif=turned(n)) for kind in ("JPEG", "PNG", "WEBP") for n in range(1, 9)
    }
    files |= {f"tiff-turned-{n}": saved("TIFF", tiffinfo={0x0112: n}) for n in range(1, 9)}
    files["mpo"] = saved("MPO", **frames())
    files |= {f"png-{mode}": saved("PNG", picture(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")}
    files["png-transparent-P"] = saved("PNG", picture("P"), transparency=3)
    files["png-transparent-bytes-P"] = saved("PNG", picture("P"), transparency=bytes(range(0, 200, 5)))
    files["png-transparent-RGB"] = saved("PNG", transparency=tuple(picture().getpixel((0, 0))))
    files["png-transparent-L"] = saved("PNG", picture("L"), transparency=picture("L").getpixel((1, 1)))
    files["png-16-bit-RGB"] = png(3, 2, 16, 2, bytes(range(18)) + bytes(range(100, 118)))
    files["png-animated"] = saved("PNG", **frames())
    files |= {f"webp-{mode}": saved("WEBP", picture(mode)) for mode in ("RGB", "RGBA")}
    files["webp-lossless"] = saved("WEBP", picture("RGBA"), lossless=True)
    files["webp-animated"] = saved("WEBP", **frames())
    files |= {f"gif-{mode}": saved("GIF", picture(mode)) for mode in ("1", "L", "P", "RGB", "RGBA")}
    files["gif-animated"] = saved("GIF", **frames())
    files["gif-transparent"] = saved("GIF", picture("P"), transparency=3)
    files |= {f"bmp-{mode}": saved("BMP", picture(mode)) for mode in ("1", "L", "P", "RGB", "RGBA")}
    files |= {
        f"tiff-{mode}": saved("TIFF", picture(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16")
    }
    compressions = ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
    files |= {f"tiff-{each}": saved("TIFF", compression=each) for each in compressions}
    return files


def chunk(kind, content):
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, depth=8, color=2, rows=b"", *before, data=None):
    """A PNG.

    Args:
        rows: uncompressed, without the byte of each row that names its filter.
        before: chunks before the pixels.
        data: the compressed pixels in place of the rows.
    """
    if data is None:
        stride = len(rows) // height if rows else 0
        data = zlib.compress(b"".join(b"\0" + rows[at : at + stride] for at in range(0, len(rows), stride or 1)))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(before) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def patched(content, at, form, *values):
    """A file with other numbers at a place."""
    new = struct.pack(form, *values)
    return content[:at] + new + content[at + len(new) :]


def sized(kind, width, height):
    """A small file whose header promises so many pixels."""
    if kind == "png":
        return png(width, height)
    if kind == "gif":
        return patched(saved("GIF"), 6, "<HH", width, height)
    if kind == "bmp":
        return patched(saved("BMP"), 18, "<ii", width, height)
    if kind == "jpeg":
        content = saved("JPEG")
        return patched(content, content.index(b"\xff\xc0") + 5, ">HH", height, width)
    if kind == "webp":
        content = saved("WEBP", **frames())
        head = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
        return content[:24] + head + content[30:]
    content = saved("TIFF")
    (at,) = struct.unpack_from("<I", content, 4)
    for number in range(struct.unpack_from("<H", content, at)[0]):
        entry = at + 2 + 12 * number
        tag = struct.unpack_from("<H", content, entry)[0]
        if tag in (256, 257):
            content = patched(content, entry, "<HHII", tag, 4, 1, width if tag == 256 else height)
    return content


# First bytes of files that are not served. A good PNG follows, so that a parser that looks further finds one.
OTHER_FIRST_BYTES = {
    "html": b"<!DOCTYPE html><script>alert(1)</script>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "xml": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
    "pdf": b"%PDF-1.7\n",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "dos-eps": b"\xc5\xd0\xd3\xc6" + bytes(28),
    "zip": b"PK\x03\x04",
    "gzip": b"\x1f\x8b\x08\0\0\0\0\0",
    "xz": b"\xfd7zXZ\0",
    "zstd": b"\x28\xb5\x2f\xfd",
    "elf": b"\x7fELF\x02\x01\x01",
    "exe": b"MZ\x90\0",
    "java": b"\xca\xfe\xba\xbe",
    "script": b"#!/bin/sh\nid\n",
    "pickle": b"\x80\x05cos\nsystem\n(S'id'\ntR.",
    "mp4": b"\0\0\0\x18ftypmp42",
    "heic": b"\0\0\0\x18ftypheic",
    "avif": b"\0\0\0\x1cftypavif",
    "jpeg-2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    "j2k": b"\xff\x4f\xff\x51\0",
    "psd": b"8BPS\0\x01",
    "icon": b"\0\0\x01\0\x01\0",
    "cursor": b"\0\0\x02\0\x01\0",
    "icns": b"icns\0\0\0\x99",
    "fits": b"SIMPLE  =                    T",
    "dds": b"DDS \x7c\0\0\0",
    "xbm": b"#define a_width 9\n#define a_height 9\nstatic char a_bits[] = {\n",
    "xpm": b"/* XPM */\nstatic char *a[] = {",
    "ppm": b"P6 9 9 255\n",
    "pgm-of-text": b"P2 9 9 255\n",
    "pcx": b"\x0a\x05\x01\x08",
    "sgi": b"\x01\xda\x01\x01",
    "sun": b"\x59\xa6\x6a\x95",
    "fli": b"\0\0\0\0\x11\xaf\0\0",
    "wmf": b"\xd7\xcd\xc6\x9a\0\0",
    "emf": b"\x01\0\0\0" + bytes(36) + b" EMF",
    "riff-wave": b"RIFF\x24\0\0\0WAVEfmt ",
    "riff-avi": b"RIFF\x24\0\0\0AVI LIST",
    "webm": b"\x1a\x45\xdf\xa3",
    "ole": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
    "hdf5": b"\x89HDF\r\n\x1a\n",
    "grib": b"GRIB\0\0\0\x01",
    "mpeg": b"\0\0\x01\xb3",
    "mic": b"\xd0\xcf\x11\xe0",
    "byte-order-mark": b"\xef\xbb\xbf",
    "white-space": b"\r\n",
    "png-as-text": b"\x89PNG\n\x1a\n",
    "gif-of-another-year": b"GIF88a",
    "big-endian-riff": b"RIFX\0\0\0\x24WEBPVP8 ",
}


@cache
def hostile_files():
    """Name → bytes; of each, no picture can be had."""
    good = saved("PNG")
    files = {"empty": b"", "a-zero": b"\0", "zeros": bytes(10_000), "text": b"none" * 1000}
    files |= {f"other-{name}": first + good for name, first in OTHER_FIRST_BYTES.items()}
    files |= {f"saved-{kind}": saved(kind) for kind in ("PPM", "TGA", "PCX", "SGI", "ICO", "DDS", "EPS", "PDF")}
    files["saved-XBM"] = saved("XBM", picture("1"))
    sizes = [(65_500, 65_500), (16_000, 16_000), (1, 65_500 * 1000), (1 << 31, 1), (2_000, 501), (0, 0), (0, 5), (5, 0)]
    most = {"png": 1 << 31, "gif": 1 << 16, "bmp": 1 << 31, "jpeg": 1 << 16, "webp": 1 << 24, "tiff": 1 << 32}
    for kind, limit in most.items():
        for width, height in sizes:
            # A WebP's header has no zero, and a GIF's screen is as large as its frame.
            if max(width, height) < limit and (kind not in ("gif", "webp") or min(width, height)):
                files[f"{kind}-{width}x{height}"] = sized(kind, width, height)
    files |= {f"bmp-{w}x{h}": sized("bmp", w, h) for w, h in [(-9, 7), (9, -(2**31)), (1 << 30, -7)]}
    bomb = zlib.compress(bytes(70 << 20), 9)
    files["png-text-bomb"] = png(2, 2, 8, 2, bytes(12), chunk(b"zTXt", b"a\0\0" + bomb))
    files["png-unicode-bomb"] = png(2, 2, 8, 2, bytes(12), chunk(b"iTXt", b"a\0\1\0\0\0" + bomb))
    files["png-profile-bomb"] = png(2, 2, 8, 2, bytes(12), chunk(b"iCCP", b"a\0\0" + bomb))
    text = chunk(b"tEXt", b"a\0" + bytes(1 << 20))
    files["png-many-texts"] = png(2, 2, 8, 2, bytes(12), *[text] * 70)
    files["png-pixels-are-no-zlib"] = png(2, 2, data=b"none")
    files["png-no-pixels"] = png(2, 2, data=b"")
    files["png-few-pixels"] = png(2, 2, data=zlib.compress(b"\0\1"))
    files["png-two-beginnings"] = good[:8] + good[8:33] + sized("png", 60_000, 60_000)[8:]
    files |= {f"png-{depth}-bits-of-{color}": png(2, 2, depth, color, bytes(12)) for depth, color in ((3, 2), (8, 5))}
    for at in (8, 12, 16, 20, 24, 25, 29, 32, 37, 38):
        files[f"png-byte-{at}-changed"] = patched(good, at, "B", good[at] ^ 0x11)
    gif = saved("GIF")
    at = gif.index(b",", 13 + 3 * (2 << (gif[10] & 7)))
    files["gif-frame-beyond-the-screen"] = patched(gif, at, "<cHHHH", b",", 60_000, 60_000, 5_000, 5_000)
    files["gif-no-frame"] = gif[:at] + b";"
    jpeg = saved("JPEG")
    files["jpeg-no-scan"] = jpeg[: jpeg.index(b"\xff\xda")] + b"\xff\xd9"
    files["jpeg-no-tables"] = jpeg[: jpeg.index(b"\xff\xdb")] + jpeg[jpeg.index(b"\xff\xc0") :]
    files["jpeg-9-components"] = patched(jpeg, jpeg.index(b"\xff\xc0") + 9, "B", 9)
    files["jpeg-12-bits"] = patched(jpeg, jpeg.index(b"\xff\xc0") + 4, "B", 12)
    bmp = saved("BMP")
    files["bmp-pixels-beyond-its-end"] = patched(bmp, 10, "<I", 0x7FFFFFFF)
    files |= {f"bmp-header-of-{size}": patched(bmp, 14, "<I", size) for size in (0, 1, 13, 41, 0xFFFFFFFF)}
    files |= {f"bmp-compression-{each}": patched(bmp, 30, "<I", each) for each in (1, 2, 4, 5, 9, 0xFFFFFFFF)}
    files |= {f"bmp-{each}-bits": patched(bmp, 28, "<H", each) for each in (0, 3, 64, 0xFFFF)}
    tiff = saved("TIFF")
    files |= {f"tiff-directory-at-{at}": patched(tiff, 4, "<I", at) for at in (0, 4, 0x7FFFFFFF, 0xFFFFFFFF)}
    (at,) = struct.unpack_from("<I", tiff, 4)
    entries = {struct.unpack_from("<H", tiff, at + 2 + 12 * n)[0]: at + 2 + 12 * n for n in range(tiff[at])}
    for tag, name in ((258, "bits"), (259, "compression"), (277, "samples")):
        files[f"tiff-other-{name}"] = patched(tiff, entries[tag], "<HHII", tag, 3, 1, 60_000)
        if name != "compression":
            files[f"tiff-endless-{name}"] = patched(tiff, entries[tag], "<HHII", tag, 3, 0xFFFFFFFF, 8)
    files["tiff-strips-beyond-its-end"] = patched(tiff, entries[273], "<HHII", 273, 4, 1, 0x7FFFFFFF)
    webp = saved("WEBP")
    files["webp-other-size"] = patched(webp, 4, "<I", 5)
    files["webp-giant-chunk"] = patched(webp, 16, "<I", 0x7FFFFFFF)
    files["webp-no-frame"] = patched(webp, 23, "3B", 0, 0, 0)
    files["webp-other-chunk"] = webp[:12] + b"VP9 " + webp[16:]
    return files
