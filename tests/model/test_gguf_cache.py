"""The cache of converted GGUF files: what shares a conversion, what does not, and how it is emptied."""

import errno
import fcntl
import os
import resource
import shutil
import signal
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError, UserError
from rosebatch.engine.cache.memory import DeviceMemory
from rosebatch.host.sync import sync
from rosebatch.launch import plan
from rosebatch.model import checksums, content_digest
from rosebatch.model.checksums import SUMS
from rosebatch.model.content_digest import digests_dir
from rosebatch.model.gguf import cache as gguf_cache
from rosebatch.model.gguf import convert as gguf
from rosebatch.model.gguf.cache import CachedModel, cache_dir, cached_models, clear_cache, converted_folder
from tests.helpers.forks import FORKS, in_fork
from tests.helpers.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("cache")


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


@pytest.fixture
def remembers(monkeypatch):
    """Digests of small files too, and of new ones."""
    monkeypatch.setattr(content_digest, "_REMEMBERED", 0)
    monkeypatch.setattr("rosebatch.host.file_state._TICK_NS", -(10**9))


def test_the_second_call_does_not_read_the_file(file, fake_convert, remembers, monkeypatch):
    """To hash an 8 GB file takes as long as to load it."""
    folder = converted_folder(file, torch.float32)
    monkeypatch.delattr(content_digest, "_hash_piece")
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


def test_a_cache_that_is_read_only(file, fake_convert, remembers):
    """Filled when a container was built, say: found all the same, without a place for digests."""
    folder = converted_folder(file, torch.float32)
    shutil.rmtree(digests_dir())
    digests_dir().write_text("no folder can be made here")
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


def limited(path, size, home):
    """Convert while no file may grow further than so many bytes; returns the error.

    Args:
        path: of the file.
        size: bytes.
        home: of the cache; the process has the environment of the first test that made one.
    """
    os.environ["XDG_CACHE_HOME"] = home
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(UserError) as error:
        converted_folder(path, torch.float32)
    return str(error.value)


def test_a_full_disk(write_gguf, toy, cache, monkeypatch):
    """It was called an unreadable GGUF file. No half folder stays, and the cache can be cleared there."""
    path = write_gguf("llama", toy)
    for size in (100, 3000, 20000):
        message = in_fork(limited, path, size, os.environ["XDG_CACHE_HOME"])
        assert message.startswith(f"{path}: cannot convert the model (")
        assert "File too large" in message and message.endswith(
            "XDG_CACHE_HOME name a folder with room for the weights"
        )
    assert [each.name for each in cache.iterdir()] == [".lock"]
    converted_folder(path, torch.float32)

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", full)
    assert clear_cache() > 0
    assert names() == []


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


# Damage


def damage(path, at=-1):
    """One bit of a file, as a disk changes it: the file's time stays."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", SUMS])
def test_a_damaged_conversion_is_made_anew(write_gguf, toy, name, capsys):
    """One flipped bit gave other answers without a word, in every run from then on."""
    path = write_gguf("llama", toy)
    folder = converted_folder(path, torch.float32)
    good = {file.name: file.read_bytes() for file in folder.iterdir()}
    capsys.readouterr()
    for at in (-3, len(good[name]) // 2):
        damage(folder / name, at)
        assert converted_folder(path, torch.float32) == folder
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == good
        assert capsys.readouterr().err == (
            f"rosebatch: warning: {folder}: the converted model is damaged; converting again\n"
        )
    assert converted_folder(path, torch.float32) == folder
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "break_it",
    [
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "config.json").write_bytes(b""),
        lambda folder: (folder / SUMS).unlink(),
        lambda folder: (folder / SUMS).write_bytes(b""),
        lambda folder: (folder / SUMS).write_text("3"),
        lambda folder: (folder / SUMS).write_text('{"config.json": null}'),
    ],
)
def test_a_conversion_that_lost_a_file(file, fake_convert, break_it):
    """What a crash of the machine leaves: empty files, missing ones."""
    folder = converted_folder(file, torch.float32)
    break_it(folder)
    assert converted_folder(file, torch.float32) == folder
    assert len(fake_convert) == 2
    assert (folder / "config.json").read_text() == "{}"


def test_files_of_several_chunks(tmp_path, monkeypatch):
    """Every byte counts, at the edges of chunks too."""
    monkeypatch.setattr(checksums, "_CHUNK", 4)
    for size in (0, 1, 3, 4, 5, 8, 9):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "a").write_bytes(bytes(size))
        checksums.seal(folder)
        assert checksums.is_intact(folder)
        for at in range(size):
            damage(folder / "a", at)
            assert not checksums.is_intact(folder)
            damage(folder / "a", at)
        assert checksums.is_intact(folder)
        (folder / "a").write_bytes(bytes(size + 1))
        assert not checksums.is_intact(folder)


def test_a_digest_that_a_crash_left_empty(file, fake_convert, remembers, tmp_path):
    """Two files with no digest had one key: the second got the weights of the first."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"another model")
    converted_folder(file, torch.float32)
    converted_folder(other, torch.float32)
    assert len(list(digests_dir().iterdir())) == 2
    for memo in digests_dir().iterdir():
        memo.write_text("")
    assert converted_folder(file, torch.float32) != converted_folder(other, torch.float32)
    assert len(fake_convert) == 2


def test_everything_is_on_the_disk_before_the_folder_has_its_name(file, fake_convert, cache, monkeypatch):
    """After a power cut the folder was there, with empty files."""
    done = []
    rename = Path.rename
    for module in (checksums, gguf_cache):
        monkeypatch.setattr(module, "sync", lambda path: (done.append(("sync", path.name)), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append(("rename", to.name)), rename(self, to))[1])
    named = done.index(("rename", converted_folder(file, torch.float32).name))
    assert {("sync", "config.json"), ("sync", SUMS)} <= set(done[:named])
    assert done[named - 1][1].startswith(".tmp-")
    assert done[named + 1] == ("sync", cache.name)


def test_what_a_killed_conversion_left_behind(file, fake_convert, cache):
    """Gigabytes stayed in the cache until somebody cleared it."""
    cache.mkdir(parents=True)
    (cache / ".tmp-killed").mkdir()
    (cache / ".tmp-killed" / "model.safetensors").write_bytes(b"1234567890")
    converted_folder(file, torch.float32)
    assert list(cache.glob(".tmp-*")) == []


def test_what_a_killed_conversion_left_beside_a_model(file, fake_convert, cache):
    """It stayed for as long as no other model was converted."""
    folder = converted_folder(file, torch.float32)
    (cache / ".tmp-killed").mkdir()
    assert converted_folder(file, torch.float32) == folder
    assert list(cache.glob(".tmp-*")) == []


def interrupted(file, number, home):
    """Convert until a signal comes."""

    def convert(path, dtype, folder):
        (folder / "model.safetensors").write_bytes(b"1234567890")
        os.kill(os.getpid(), number)
        raise AssertionError("the process has ended")

    os.environ["XDG_CACHE_HOME"] = home
    gguf.convert = convert
    # As of the command line.
    signal.signal(number, signal.SIG_DFL)
    converted_folder(file, torch.float32)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(file, cache, number):
    """Gigabytes stayed in the cache until the next start."""
    process = FORKS.Process(target=interrupted, args=(file, number, os.environ["XDG_CACHE_HOME"]))
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -number
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_signals_that_a_program_handles_stay_its_own(file, monkeypatch):
    """The library must not end a process that wants to go on."""
    handler, seen = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr(gguf, "convert", lambda *_: seen.append(signal.getsignal(signal.SIGINT)))
    converted_folder(file, torch.float32)
    assert seen == [handler]


def test_a_conversion_leaves_that_of_another_file_alone(file, tmp_path, monkeypatch, cache):
    """A second run must not take the running conversion of the first for one that was killed."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"another model")
    inner = []

    def convert(path, dtype, folder):
        (folder / "config.json").write_text(path.name)
        if path == file:
            inner.append(converted_folder(other, dtype))

    monkeypatch.setattr(gguf, "convert", convert)
    assert (converted_folder(file, torch.float32) / "config.json").read_text() == file.name
    assert (inner[0] / "config.json").read_text() == other.name


# Emptying it


def test_sizes(file, fake_convert, cache):
    """By name, with all that is inside; not what the cache keeps for itself."""
    assert cached_models() == []
    folder = converted_folder(file, torch.float32)
    sums = (folder / SUMS).stat().st_size
    (folder / "sub").mkdir()
    (folder / "sub" / "weights").write_bytes(b"12345")
    (cache / "abc-0123456789ab").mkdir()
    assert cached_models() == [CachedModel("abc-0123456789ab", 0), CachedModel(folder.name, 7 + sums)]


def test_clearing(file, fake_convert, remembers, cache):
    """Models of this and of older versions, what a killed conversion left behind, and digests of weights."""
    assert clear_cache() == 0
    sums = (converted_folder(file, torch.float32) / SUMS).stat().st_size
    memo = sum(each.stat().st_size for each in digests_dir().iterdir())
    for name in ("old-0123456789ab", "old-0123456789abx7f_k2qz", ".tmp-killed"):
        (cache / name).mkdir()
        (cache / name / "model.safetensors").write_bytes(b"1234567890")
    assert clear_cache() == 2 + sums + 30 + memo
    assert [path.name for path in cache.iterdir()] == [".lock"]
    assert not digests_dir().exists()
    assert clear_cache() == 0
    converted_folder(file, torch.float32)
    assert len(fake_convert) == 2


def test_clearing_beside_a_conversion(file, monkeypatch, cache):
    """The conversion ends as if nothing had happened; what others finished is deleted."""
    begun, go = Event(), Event()

    def convert(path, dtype, folder):
        (folder / "first").write_text("1")
        begun.set()
        assert go.wait(PATIENCE_SECONDS)
        (folder / "second").write_text("2")

    monkeypatch.setattr(gguf, "convert", convert)
    found = []
    thread = Thread(target=lambda: found.append(converted_folder(file, torch.float32)))
    thread.start()
    assert begun.wait(PATIENCE_SECONDS)
    (cache / "old-0123456789ab").mkdir()
    clear_cache()
    assert names() == []
    go.set()
    thread.join()
    assert sorted(path.name for path in found[0].iterdir()) == [SUMS, "first", "second"]


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


def test_a_file_that_does_not_fit_is_not_converted(write_gguf, toy, cache, monkeypatch):
    """A file of 40 GB was converted for minutes, and then it did not fit. Its header has the shape."""
    path = write_gguf("llama", toy)
    config = RunConfig(model=str(path), device="cpu", dtype="float32")
    monkeypatch.setattr(plan, "memory_of", lambda device: DeviceMemory("cpu", 1000, 1000))
    with pytest.raises(FlagError, match=r"^model does not fit: "):
        plan.plan_fitting(config)
    assert names() == []
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    found = plan.plan_fitting(config)
    assert found.source.folder.name == names()[0] and found.tokenizer_folder == found.source.folder
    assert found.fit.wanted.config == found.source.config
