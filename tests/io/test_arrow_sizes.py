"""Batches of Arrow IPC are refused before they are decompressed, if they are far larger than in the file."""

import io
import random

import pyarrow as pa
import pytest

from rosebatch.core.errors import UserError
from rosebatch.io import arrow_sizes
from rosebatch.io.reader import PromptReader

LIMIT = 1 << 20
CODECS = ["zstd", "lz4"]


def write(path, tables, compression, **options):
    make = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
    with make(path, tables[0].schema, options=pa.ipc.IpcWriteOptions(compression=compression, **options)) as writer:
        for table in tables:
            writer.write_table(table)


def prompts(path):
    reader = PromptReader(str(path), {}, input_format="arrow", max_row_bytes=LIMIT)
    return [row.prompt for row in reader]


def dictionary(texts):
    return pa.DictionaryArray.from_arrays(pa.array(range(len(texts)), pa.int32()), pa.array(texts))


@pytest.mark.parametrize("array", [pa.array, dictionary])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize(("name", "old"), [("in.arrow", False), ("in.arrow", True), ("in.arrows", False)])
def test_a_batch_that_fills_memory(tmp_path, name, old, compression, array):
    """20 texts of 30 MB, of one letter each, were 60 kB in the file and 1 GB in memory."""
    texts = [letter * (LIMIT - 1) for letter in "abcde"]
    write(tmp_path / name, [pa.table({"prompt": array(texts)})], compression, use_legacy_format=old)
    with pytest.raises(UserError, match=rf"Arrow file \(a batch of \d+ bytes takes {5 * (LIMIT - 1) + 24}"):
        prompts(tmp_path / name)
    some = texts[:3] if name == "in.arrow" else texts[:2]
    write(tmp_path / name, [pa.table({"prompt": array(some)})] * 3, compression, use_legacy_format=old)
    assert prompts(tmp_path / name) == some * 3


@pytest.mark.parametrize("name", ["in.arrow", "in.arrows"])
def test_a_large_batch_of_honest_texts(tmp_path, name):
    """It is nearly as large in the file: some memory is there for what somebody has stored."""
    texts = [random.Random(seed).randbytes(LIMIT // 2 - 1).hex() for seed in range(6)]
    write(tmp_path / name, [pa.table({"prompt": texts})], "zstd")
    assert prompts(tmp_path / name) == texts


@pytest.mark.parametrize("change", [4, 8, 40])
def test_damaged_metadata(tmp_path, change):
    """Whatever is there, it is the file's own error."""
    write(tmp_path / "in.arrow", [pa.table({"prompt": ["a", "b"]})], "zstd")
    whole = (tmp_path / "in.arrow").read_bytes()
    for place in range(8, len(whole), change):
        raw = io.BytesIO(whole[:place] + b"\xff" * 4 + whole[place + 4 :])
        try:
            assert len(list(arrow_sizes.each_checked(raw, LIMIT))) <= 1
        except (pa.ArrowInvalid, ValueError):
            assert raw.tell() == 0
