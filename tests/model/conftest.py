"""Files of the smallest models, and a cache of the tests' own for converted models."""

import pytest
import torch

from tests.model.gguf_files import random_model, write


@pytest.fixture(scope="module")
def one_thread():
    """More threads slow such small models down, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.fixture
def toy():
    """The smallest file that can be converted, for tests that are not about weights."""
    return random_model("llama")
