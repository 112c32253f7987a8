"""A small model in a Hugging Face cache made by hand, without a network."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from rosebatch import LLM
from tests.helpers.hub_cache import add_snapshot
from tests.helpers.small_llama import TEMPLATE, save_llama, save_tokenizer

NAME, COMMIT = "Qwen/Qwen3-0.6B", "c0ffee"
# More than the tokenizer has: token ids in the docs are those of a large model.
VOCAB = 8000


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds a model of 2 layers with a tokenizer of bytes, under a name that the docs use."""
    cache = tmp_path_factory.mktemp("hub")
    snapshot = add_snapshot(cache, {}, name=NAME, commit=COMMIT)
    save_llama(snapshot, vocab_size=VOCAB, max_position_embeddings=4096)
    save_tokenizer(snapshot)
    (snapshot / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE)
    return cache


@pytest.fixture(autouse=True)
def offline(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is the only place to look. The library reads the environment once, so its constants are set."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def folder(hub: Path) -> Path:
    """Of the model."""
    return hub / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """The model by its folder."""
    with LLM(folder, max_num_seqs=8) as llm:
        yield llm
