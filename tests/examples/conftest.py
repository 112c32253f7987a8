"""Models for the examples."""

import pytest
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, BertModel

from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.small_llama import save_llama
from tests.job.tool_templates import TEMPLATES, chat_backend


@pytest.fixture
def chat_model(tmp_path):
    """A random model whose template has tools and reasoning."""
    folder, backend = tmp_path / "model", chat_backend()
    save_llama(folder, vocab_size=backend.get_vocab_size(), max_position_embeddings=4096, initializer_range=0.02)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    return folder


HEADS = {
    "classes": (BertForSequenceClassification, 2),
    "entities": (BertForTokenClassification, 3),
    "pairs": (BertForSequenceClassification, 1),
    "embeddings": (BertModel, 2),
}


@pytest.fixture
def with_head(tmp_path):
    """The folder of a tiny encoder for an example."""

    def made(name):
        kind, labels = HEADS[name]
        sizes = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 2}
        kind(BertConfig(**sizes, vocab_size=300, num_labels=labels)).save_pretrained(tmp_path / "model")
        byte_backend().save(str(tmp_path / "model" / "tokenizer.json"))
        return tmp_path / "model"

    return made
