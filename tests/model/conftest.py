"""Files of the smallest models, and caches of our own: for conversions, and of the Hugging Face Hub."""

import builtins

import pytest

from tests.helpers.hub_cache import add_snapshot, without_network
from tests.model.gguf_files import random_model, write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the tests' own: nothing of the user's is read or written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rosebatch" / "gguf"


@pytest.fixture
def write_gguf(tmp_path):
    """Runs ``write`` in the test's folder and gives the file's path."""

    def write_file(*args, file="model.gguf", **kwargs):
        write(tmp_path / file, *args, **kwargs)
        return tmp_path / file

    return write_file


@pytest.fixture(scope="session")
def toy():
    """The smallest model that can be converted, for tests that are not about weights."""
    return random_model("llama")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache folder of our own, and a network that is down."""
    return without_network(monkeypatch, tmp_path / "hub")


@pytest.fixture
def add(hub):
    """Put a snapshot into the cache as the library does: links to blobs, and a ref to the commit."""

    def call(files, **where):
        return add_snapshot(hub, {file: content.encode() for file, content in files.items()}, **where)

    return call


class QuestionError(BaseException):
    """Not an Exception: nothing may handle it."""


@pytest.fixture
def nobody_to_ask(monkeypatch):
    """A question is a failure."""

    def ask(*args):
        raise QuestionError("somebody was asked")

    monkeypatch.setattr(builtins, "input", ask)
