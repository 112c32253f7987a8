"""A tiny shape of each family: the models of the golden tests, small enough for Triton's interpreter."""

from typing import Any

from rosebatch.config.model import ModelConfig
from rosebatch.model.hf.config import parse_model_config
from tests.helpers import families

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
# Instead of a model's own values: windows end within the prompts, and one of two layers is of each kind.
_SHORT = {"sliding_window": 5, "original_max_position_embeddings": 10, "mlp_only_layers": [1]}


def _shape(kind: str, values: dict[str, Any]) -> ModelConfig:
    """Of transformers' config class and its values."""
    architecture = f"{kind.removesuffix('Config').removesuffix('Text')}ForCausalLM"
    short = {name: value for name, value in _SHORT.items() if name in values}
    short |= {name: values[name][1:3] for name in ("layer_types", "mlp_layer_types") if name in values}
    sizes = {**_SIZES, "full_attention_interval": 2, "architectures": [architecture]}
    if kind == "GPTNeoXConfig":
        # Its heads have no size of their own.
        del sizes["head_dim"]
    if "num_kv_shared_layers" in values:
        # Those that share, and one of each kind before them.
        sizes |= {"num_hidden_layers": 4, "layer_types": values["layer_types"][1:5]}
    if "kv_lora_rank" in values:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return parse_model_config({**values, **short, **sizes}, kind)


FAMILIES = {name: _shape(*entry) for name, entry in families.FAMILIES.items()}
# Biases that are added with what a sub-layer scales.
FAMILIES["granite-biases"] = _shape(*families.VARIANTS["granite-biases"])
