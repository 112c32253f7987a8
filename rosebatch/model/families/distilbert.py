"""DistilBERT (arXiv 1910.01108): BERT without types of tokens."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rosebatch.model.families.layer_norm_encoder import LayerNormEncoder, first_token_head, plain_encoder
from rosebatch.model.family import Architecture, Family

# Its config has other names for the same fields.
_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
# Defaults of transformers' config class, which has no field for the norms' epsilon.
_DEFAULTS = {
    "dim": 768,
    "n_layers": 6,
    "n_heads": 12,
    "hidden_dim": 3072,
    "activation": "gelu",
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
}


class DistilBert(LayerNormEncoder):
    """See ``LayerNormEncoder``."""

    prefixes: ClassVar[tuple[str, ...]] = ("distilbert.",)
    layers_name: ClassVar[str] = "transformer.layer"
    qkv_names: ClassVar[tuple[str, ...]] = tuple(f"attention.{name}_lin" for name in "qkv")
    out_name: ClassVar[str] = "attention.out_lin"
    attention_norm_name: ClassVar[str] = "sa_layer_norm"
    mlp_names: ClassVar[tuple[str, str]] = ("ffn.lin1", "ffn.lin2")
    mlp_norm_name: ClassVar[str] = "output_layer_norm"


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    return plain_encoder(values, "distilbert", **_NAMES)


ARCHITECTURES = {
    "DistilBertModel": Architecture(
        "distilbert",
        "DistilBERT",
        _parse,
        _DEFAULTS,
        fallback=False,
        classifier=lambda _: first_token_head("pre_classifier", "classifier", "relu"),
    )
}
FAMILY = Family("distilbert", DistilBert, mlp_matrices=2, bidirectional=True)
