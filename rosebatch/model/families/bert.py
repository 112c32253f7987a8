"""BERT (arXiv 1810.04805): learned positions, types of tokens, a plain MLP."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.families.layer_norm_encoder import LayerNormEncoder, first_token_head, plain_encoder
from rosebatch.model.family import Architecture, Family

# Defaults of transformers' config class.
BERT_DEFAULTS = {
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    return plain_encoder(values, "bert")


ARCHITECTURES = {
    "BertModel": Architecture(
        "bert",
        "BERT, MiniLM, BGE, E5, GTE 1, Arctic Embed",
        _parse,
        BERT_DEFAULTS,
        fallback=False,
        classifier=lambda _: first_token_head("bert.pooler.dense", "classifier"),
    ),
}
FAMILY = Family("bert", LayerNormEncoder, mlp_matrices=2, bidirectional=True)
