"""The cache of converted GGUF files: what shares a conversion, what does not, and how it is emptied."""

import fcntl
import hashlib
import os
import shutil
from threading import Event, Thread

import pytest
import torch

from rosebatch.errors import UserError
from rosebatch.model import gguf, gguf_cache
from rosebatch.model.gguf_cache import CachedModel, cache_dir, cached_models, clear_cache, converted_folder

pytestmark = pytest.mark.usefixtures("one_thread", "cache")


def names():
    """The folders that the cache shows."""
    return [model.name for model in cached_models()]


@pytest.fixture
def fake_convert(monkeypatch):
    """A conversion that writes a byte of config, and counts."""
    calls = []

    def convert(path, dtype, folder):
        calls.append(path)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "convert", convert)
    return calls


@pytest.fixture
def file(tmp_path):
    """A file of 3 MB, for the fake conversion."""
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(3 << 20))
    # Not now: the clock of a file system may be too coarse to tell a change within this test.
    os.utime(path, ns=(0, 0))
    return path


def test_the_second_call_converts_nothing(write_gguf, toy, cache):
    """Conversion takes seconds at every start otherwise."""
    path = write_gguf("llama", toy)
    folder = converted_folder(path, torch.float32)
    assert folder.parent == cache == cache_dir()
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(before)
    assert converted_folder(path, torch.float32) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert names() == [folder.name]


def test_the_second_call_does_not_read_the_file(file, fake_convert, monkeypatch):
    """To hash an 8 GB file takes as long as to load it."""
    folder = converted_folder(file, torch.float32)
    monkeypatch.delattr(hashlib, "file_digest")
    assert converted_folder(file, torch.float32) == folder


def test_what_gets_a_folder_of_its_own(file, fake_convert):
    """Another dtype, one byte changed in the middle of the file: stale weights would be taken silently."""
    folders = {converted_folder(file, torch.float32), converted_folder(file, torch.bfloat16)}
    content = bytearray(file.read_bytes())
    content[len(content) // 2 + 12345] ^= 1
    file.write_bytes(content)
    folders.add(converted_folder(file, torch.float32))
    assert len(folders) == len(fake_convert) == 3
    assert sorted(folder.name for folder in folders) == names()


def test_copies_share_one_conversion(file, fake_convert, tmp_path):
    """Wherever they are, whatever they are called, whenever they were written; each took its gigabytes."""
    folder = converted_folder(file, torch.float32)
    os.utime(file, ns=(1, 1))
    assert converted_folder(file, torch.float32) == folder
    (tmp_path / "elsewhere").mkdir()
    for copy in (tmp_path / "elsewhere" / file.name, tmp_path / "another name.gguf"):
        shutil.copy(file, copy)
        assert converted_folder(copy, torch.float32) == folder
    assert len(fake_convert) == 1


def test_another_converter_converts_again(file, fake_convert, monkeypatch):
    """A mended conversion must not leave its users with the old weights."""
    before = converted_folder(file, torch.float32)
    monkeypatch.setattr(gguf, "CONVERTER_VERSION", gguf.CONVERTER_VERSION + 1)
    assert converted_folder(file, torch.float32) != before


def test_a_cache_that_is_read_only(file, fake_convert, cache):
    """Filled when a container was built, say: found all the same, without a place for digests."""
    folder = converted_folder(file, torch.float32)
    shutil.rmtree(cache / ".digests")
    (cache / ".digests").write_text("no folder can be made here")
    assert converted_folder(file, torch.float32) == folder
    assert len(fake_convert) == 1


def test_a_failed_conversion_leaves_nothing(write_gguf, toy, cache):
    """Half a folder would be taken for a whole one at the next start."""
    path = write_gguf("llama", toy, pre="unknown-to-us")
    for _ in range(2):
        with pytest.raises(UserError):
            converted_folder(path, torch.float32)
    assert names() == []
    assert list(cache.glob(".tmp-*")) == []


def test_a_cache_that_cannot_be_written(write_gguf, toy, tmp_path):
    """A file where the folder should be: one line for the user."""
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(UserError, match="cannot convert the model"):
        converted_folder(write_gguf("llama", toy), torch.float32)


def test_two_conversions_of_one_file(file, monkeypatch, cache):
    """Two runs that start together: the slower one takes the other's folder, and its own is removed."""
    inner = []

    def convert(path, dtype, folder):
        if not inner:
            inner.append(None)
            inner[0] = converted_folder(path, dtype)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "convert", convert)
    assert converted_folder(file, torch.float32) == inner[0]
    assert names() == [inner[0].name]
    assert list(cache.glob(".tmp-*")) == []


# Emptying it


def test_sizes(file, fake_convert, cache):
    """By name, with all that is inside; not what the cache keeps for itself."""
    assert cached_models() == []
    folder = converted_folder(file, torch.float32)
    (folder / "sub").mkdir()
    (folder / "sub" / "weights").write_bytes(b"12345")
    (cache / "abc-0123456789ab").mkdir()
    assert cached_models() == [CachedModel("abc-0123456789ab", 0), CachedModel(folder.name, 7)]


def test_clearing(file, fake_convert, cache):
    """Models of this and of older versions, and what a killed conversion left behind."""
    assert clear_cache() == 0
    converted_folder(file, torch.float32)
    memo = sum(each.stat().st_size for each in (cache / ".digests").iterdir())
    for name in ("old-0123456789ab", "old-0123456789abx7f_k2qz", ".tmp-killed"):
        (cache / name).mkdir()
        (cache / name / "model.safetensors").write_bytes(b"1234567890")
    assert clear_cache() == 2 + 30 + memo
    assert [path.name for path in cache.iterdir()] == [".lock"]
    assert clear_cache() == 0
    converted_folder(file, torch.float32)
    assert len(fake_convert) == 2


def test_clearing_beside_a_conversion(file, monkeypatch, cache):
    """The conversion ends as if nothing had happened; what others finished is deleted."""
    begun, go = Event(), Event()

    def convert(path, dtype, folder):
        (folder / "first").write_text("1")
        begun.set()
        assert go.wait(30)
        (folder / "second").write_text("2")

    monkeypatch.setattr(gguf, "convert", convert)
    found = []
    thread = Thread(target=lambda: found.append(converted_folder(file, torch.float32)))
    thread.start()
    assert begun.wait(30)
    (cache / "old-0123456789ab").mkdir()
    clear_cache()
    assert names() == []
    go.set()
    thread.join()
    assert sorted(path.name for path in found[0].iterdir()) == ["first", "second"]


def test_a_file_system_without_locks(file, fake_convert, monkeypatch):
    """Some network file systems: models are converted and deleted all the same."""

    def flock(descriptor, kind):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    converted_folder(file, torch.float32)
    assert clear_cache() > 0
    assert names() == []


def test_a_cache_that_cannot_be_cleared(file, fake_convert, monkeypatch):
    """One line that names the folder."""
    converted_folder(file, torch.float32)

    def fail(path):
        raise PermissionError("not yours")

    monkeypatch.setattr(gguf_cache.shutil, "rmtree", fail)
    with pytest.raises(UserError, match=r"rosebatch/gguf: cannot clear the cache \(not yours\)"):
        clear_cache()
