"""RoBERTa (arXiv 1907.11692), XLM-RoBERTa and CamemBERT: BERT whose positions begin after the padding token's id."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rosebatch.model.families.layer_norm_encoder import LayerNormEncoder, after_padding, first_token_head, plain_encoder
from rosebatch.model.family import Architecture, Family

# Defaults of transformers' config classes.
_DEFAULTS = {
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


class Roberta(LayerNormEncoder):
    """See ``LayerNormEncoder``."""

    prefixes: ClassVar[tuple[str, ...]] = ("roberta.",)


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    return after_padding(plain_encoder(values, "roberta"), values)


ARCHITECTURES = {
    f"{name}Model": Architecture(
        model_type,
        models,
        _parse,
        _DEFAULTS,
        fallback=False,
        classifier=lambda _: first_token_head("classifier.dense", "classifier.out_proj"),
    )
    for name, model_type, models in (
        ("Roberta", "roberta", "RoBERTa"),
        ("XLMRoberta", "xlm-roberta", "XLM-RoBERTa, multilingual E5, BGE-M3 (dense)"),
        ("Camembert", "camembert", "CamemBERT"),
    )
}
FAMILY = Family("roberta", Roberta, mlp_matrices=2, bidirectional=True)
