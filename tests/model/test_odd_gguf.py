"""A .gguf file may hold anything: it runs, or one line says what is wrong with it."""

import json
import os
import random
import struct

import pytest

from tests.model import gguf_files
from tests.model.odd_folders import TooLongError, outcome

pytestmark = pytest.mark.usefixtures("cache", "hub", "nobody_to_ask")

U32, F32, STRING, ARRAY, U64, F64 = 4, 6, 8, 9, 10, 12
TEXT = struct.pack("<Q", 3) + b"a\nb"
# Type and bytes of a value of metadata.
ODD_VALUES = {
    "zero": (U32, struct.pack("<I", 0)),
    "one": (U32, struct.pack("<I", 1)),
    "2^32-1": (U32, struct.pack("<I", 2**32 - 1)),
    "2^63": (U64, struct.pack("<Q", 2**63)),
    "negative": (5, struct.pack("<i", -1)),
    "nan": (F32, struct.pack("<f", float("nan"))),
    "infinity": (F64, struct.pack("<d", float("inf"))),
    "text": (STRING, TEXT),
    "endless-text": (STRING, struct.pack("<Q", 2**63)),
    "not-utf-8": (STRING, struct.pack("<Q", 2) + b"\xff\xfe"),
    "true": (7, b"\1"),
    "empty-array": (ARRAY, struct.pack("<IQ", U32, 0)),
    "endless-array": (ARRAY, struct.pack("<IQ", U32, 2**60)),
    "endless-array-of-arrays": (ARRAY, struct.pack("<IQ", ARRAY, 2**60)),
    "deep-array": (ARRAY, struct.pack("<IQ", ARRAY, 1) * 2000 + struct.pack("<IQ", U32, 0)),
    "array-of-texts": (ARRAY, struct.pack("<IQ", STRING, 2) + TEXT + TEXT),
    "unknown-type": (99, b""),
}
KEYS = [
    "general.architecture",
    *(f"llama.{name}" for name in ("context_length", "embedding_length", "block_count", "feed_forward_length")),
    *(f"llama.attention.{name}" for name in ("head_count", "head_count_kv", "layer_norm_rms_epsilon")),
    *("llama.rope.freq_base", "llama.rope.scaling.type", "llama.rope.scaling.factor"),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges")),
    *(f"tokenizer.ggml.{name}" for name in ("eos_token_id", "bos_token_id", "add_bos_token")),
    "tokenizer.chat_template",
]
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a good file."""
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    gguf_files.write(path, "llama", gguf_files.random_model("llama-linear"), add_bos=True, template="x")
    return path.read_bytes()


def value_end(content, kind, at):
    """Where a value of metadata ends."""
    if kind == STRING:
        return at + 8 + struct.unpack_from("<Q", content, at)[0]
    if kind == ARRAY:
        inner, count = struct.unpack_from("<IQ", content, at)
        at += 12
        for _ in range(count):
            at = value_end(content, inner, at)
        return at
    return at + _SIZES[kind]


def with_value(content, key, kind, value):
    """The file with another value of a key. Tensors are moved to where the longer metadata leaves them."""
    name = struct.pack("<Q", len(key)) + key.encode()
    at = content.index(name) + len(name)
    end = value_end(content, struct.unpack_from("<I", content, at)[0], at + 4)
    # Padding of 32 bytes follows the header: a change of length has to keep to it.
    header = content[:at] + struct.pack("<I", kind) + value
    padding = -(len(header) - end) % 32
    return header + content[end : -padding or None]


def cases(content):
    """Names, and what the file holds."""
    for key in KEYS:
        for name, value in ODD_VALUES.items():
            yield f"{key}-{name}", with_value(content, key, *value)
        yield f"{key}-missing", content.replace(key.encode(), key[:-1].encode() + b"?")
    for name, merge in (("one", b"a a"), ("none", b"   "), ("unknown", b"\xc4\xa0\xff")):
        raw = struct.pack("<Q", len(merge)) + merge
        yield f"merge-{name}", with_value(content, "tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", STRING, 1) + raw)
    for at, what in ((4, "version"), (8, "tensors"), (16, "fields")):
        for value in (0, 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1):
            size = 4 if what == "version" else 8
            yield f"{what}-{value}", content[:at] + struct.pack("<Q", value)[:size] + content[at + size :]
    name = b"token_embd.weight"
    at = content.index(name) + len(name)
    for value in (0, 1, 3, 5, 2**31, 2**32 - 1):
        yield f"dimensions-{value}", content[:at] + struct.pack("<I", value) + content[at + 4 :]
        yield f"kind-{value}", content[: at + 20] + struct.pack("<I", value) + content[at + 24 :]
    for value in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1):
        for place, what in ((4, "columns"), (12, "rows"), (24, "offset")):
            raw = content[: at + place] + struct.pack("<Q", value) + content[at + place + 8 :]
            yield f"{what}-{value}", raw
    generator = random.Random(0)
    header = content.index(b"blk.1") + 500
    for number in range(300):
        changed = bytearray(content)
        place = generator.choice((generator.randrange(24), generator.randrange(1200), generator.randrange(header)))
        changed[place] ^= 1 << generator.randrange(8)
        yield f"flip-{number}-at-{place}", bytes(changed)


def complaint(content, folder):
    """What is wrong with how a file is treated."""
    path = folder / "model.gguf"
    path.write_bytes(content)
    try:
        line = outcome(path, dtype="float32")
    except (Exception, TooLongError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    if line is None:
        return None
    if str(path) not in line and "rosebatch/gguf/model-" not in line:
        return f"does not name the file: {line}"
    if not line.isprintable() or len(line) - len(str(folder)) > 350:
        return f"not one short line: {line!r}"
    return None


def test_the_good_file_runs(whole, tmp_path):
    """Otherwise each odd one would be refused for another reason than its own."""
    (tmp_path / "model.gguf").write_bytes(whole)
    assert outcome(tmp_path / "model.gguf", dtype="float32") is None


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, 12))])
def test_odd_files(whole, tmp_path, part):
    """Merges that are no pairs, endless arrays and counts in the header: tracebacks, "unexpected", hangs."""
    found = {}
    for name, content in list(cases(whole))[part::12]:
        wrong = complaint(content, tmp_path)
        if wrong:
            found[name] = wrong
    assert not found, json.dumps(found, indent=1)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)]
)
def test_what_is_no_file(tmp_path, make):
    """To open a named pipe waits for ever, and a device never ends."""
    make(tmp_path / "model.gguf")
    line = outcome(tmp_path / "model.gguf")
    assert line is not None
    assert str(tmp_path / "model.gguf") in line
