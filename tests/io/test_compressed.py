"""Compressed JSONL and CSV: read whole or refused, and written with the same bytes each time."""

import bz2
import gzip
import importlib
import io
import lzma
import random
import sys
import uuid
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.compressed import decompressed, open_compressed
from rosebatch.io.reader import PromptReader

PACK = {
    "gz": lambda data: gzip.compress(data, mtime=0),
    "zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
NAMES = {"gz": "gzip", "zst": "zstd", "bz2": "bz2", "xz": "xz"}
LINES = b"".join(b'{"prompt":"%d"}\n' % number for number in range(3000))


def prompts(source):
    return [row.prompt for row in PromptReader(str(source), {})]


def unpacked(content, compression):
    return decompressed(io.BufferedReader(io.BytesIO(content)), compression).read()


def importable(name):
    try:
        return bool(importlib.import_module(name))
    except ImportError:
        return False


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("parts", [1, 3])
def test_all_members_are_read(tmp_path, ending, parts):
    """Of files that cat, pzstd or a rotating log put together, other readers take the first member alone."""
    path, size = tmp_path / f"in.jsonl.{ending}", len(LINES) // parts + 1
    path.write_bytes(b"".join(PACK[ending](LINES[start : start + size]) for start in range(0, len(LINES), size)))
    assert PromptReader(str(path), {}).count() == 3000
    assert prompts(path) == [str(number) for number in range(3000)]


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("what", ["half", "last byte", "second member", "garbage behind", "empty"])
def test_damage_is_an_error(tmp_path, ending, what):
    """The rows behind it would be missing from the results, exit code 0. Python's bz2 and lzma ignore a bad member."""
    whole = PACK[ending](LINES)
    content = {
        "half": whole[: len(whole) // 2],
        "last byte": whole[:-1],
        "second member": whole + whole[: len(whole) // 2],
        "garbage behind": whole + b"garbage",
        "empty": b"",
    }[what]
    path = tmp_path / f"in.jsonl.{ending}"
    path.write_bytes(content)
    kind = "is empty" if what == "empty" else f"damaged {NAMES[ending]} data: "
    with pytest.raises(UserError, match=rf"in\.jsonl\.{ending}: {kind}") as found:
        prompts(path)
    if what in ("half", "last byte", "second member"):
        assert str(found.value).endswith("it ends too early")


@pytest.mark.parametrize("ending", PACK)
def test_flipped_bits_are_an_error(tmp_path, ending):
    """Checksums of the format must count: a changed row is no row of the user."""
    content = bytearray(PACK[ending](LINES))
    content[len(content) // 2] ^= 0x10
    path = tmp_path / f"in.jsonl.{ending}"
    path.write_bytes(content)
    if ending == "zst":
        # The frame has no checksum, so what still decodes is what was written, as far as anybody can tell.
        return
    with pytest.raises(UserError, match="damaged"):
        prompts(path)


def test_padding_of_xz():
    """Streams may have zeros between them, in groups of four."""
    one = lzma.compress(b"a")
    assert unpacked(one + bytes(8) + one + bytes(4), "xz") == b"aa"
    with pytest.raises(OSError, match="ends too early"):
        unpacked(one + bytes(3), "xz")


@pytest.mark.parametrize("size", [0, 1, 1 << 18, (1 << 18) + 1, 3_000_000])
def test_padding_of_gzip(size):
    """Tapes and some object stores fill the last block with zeros: gunzip takes them, and we called it damage.

    The text ends inside of a buffer, with it and behind it.
    """
    text = random.Random(size).randbytes(size // 2) + bytes(size - size // 2)
    one = gzip.compress(text)
    assert unpacked(one + bytes(5) + one + bytes(1000), "gzip") == text + text
    with pytest.raises(OSError, match="damaged gzip data"):
        unpacked(one + bytes(5) + b"a", "gzip")


# Made by zstd --long=28: a window, or the size of the one segment.
LONG = "28b52ffd0490150100c07b226964223a2261222c2270726f6d70747d0a6262227d0a0300808b9d89433b97baf68059"
LONG_SEGMENT = "28b52ffda00100001001000000000000000000000000"


def test_a_zstd_window_past_128_mib(tmp_path):
    """The message called the file damaged. With Python 3.14, or its backport, it is read."""
    (tmp_path / "in.jsonl.zst").write_bytes(bytes.fromhex(LONG))
    (tmp_path / "segment.jsonl.zst").write_bytes(bytes.fromhex(LONG_SEGMENT))
    message = r"{}.jsonl.zst: its zstd window is larger than 128 MiB: pip install backports.zstd, or pack it again"
    if importable("compression.zstd") or importable("backports.zstd"):
        assert prompts(tmp_path / "in.jsonl.zst") == ["a", "b"]
    else:
        for name in ("in", "segment"):
            with pytest.raises(UserError, match=message.format(name)):
                prompts(tmp_path / f"{name}.jsonl.zst")


def test_a_zstd_window_past_128_mib_behind_others(tmp_path):
    """The first frame says nothing of it."""
    (tmp_path / "in.jsonl.zst").write_bytes(PACK["zst"](b'{"prompt": "a"}\n') + bytes.fromhex(LONG))
    with pytest.raises(UserError, match=r"its zstd window is larger than 128 MiB behind its first frame$"):
        prompts(tmp_path / "in.jsonl.zst")


def test_a_frame_of_zstd_that_is_skipped(tmp_path):
    """pzstd begins with one; it looks like no zstd."""
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + PACK["zst"](b'{"prompt":"a"}\n'))
    assert prompts(path) == ["a"]


@pytest.mark.parametrize("ending", PACK)
def test_stdin(monkeypatch, ending):
    """By its first bytes, for it has no name."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PACK[ending](LINES))))
    reader = PromptReader("-", {})
    assert [row.prompt for row in reader] == [str(number) for number in range(3000)]
    assert not reader.is_batch


def test_an_openai_batch(tmp_path, monkeypatch):
    """Recognized in a file and on stdin."""
    content = gzip.compress(b'{"custom_id":"a","body":{"prompt":"x"},"url":"/v1/completions","method":"POST"}\n')
    (tmp_path / "in.jsonl.gz").write_bytes(content)
    assert PromptReader(str(tmp_path / "in.jsonl.gz"), {}).is_batch
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    reader = PromptReader("-", {})
    assert reader.is_batch
    assert [row.prompt for row in reader] == ["x"]


@pytest.mark.parametrize("ending", PACK)
def test_written_bytes_are_always_the_same(tmp_path, ending):
    """A resumed run must end with the bytes of a whole one: no time and no name is stored."""
    found = []
    for name, step in (("one", 1), ("another", 1000)):
        with open_compressed(tmp_path / name, NAMES[ending]) as file:
            for start in range(0, len(LINES), step):
                file.write(LINES[start : start + step])
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1]
    assert unpacked(found[0], NAMES[ending]) == LINES
    assert len(found[0]) < len(LINES) // 2


@pytest.mark.parametrize("ending", PACK)
def test_a_full_disk_is_an_error(ending):
    """What a compressor holds back is written at the end; an error there must not pass for a whole file."""
    file = open_compressed(Path("/dev/full"), NAMES[ending])
    with pytest.raises(OSError, match="No space left on device"), file:
        file.write(LINES)


def test_a_folder_at_a_url(tmp_path):
    """Compressed files of another file system are found and read like local ones."""
    root = f"memory://{uuid.uuid4().hex}"
    for name, content in (("b.jsonl.zst", b'{"prompt":"b"}\n'), ("a.jsonl.gz", b'{"prompt":"a"}\n')):
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(PACK[name.rpartition(".")[2]](content))
    assert prompts(root) == prompts(f"{root}/*.jsonl.*") == ["a", "b"]
    assert prompts(f"{root}/b.jsonl.zst") == ["b"]
