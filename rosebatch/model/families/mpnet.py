"""MPNet (arXiv 2004.09297): BERT with a bias on scores, by the distance of a key."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rosebatch.model.families.layer_norm_encoder import LayerNormEncoder, after_padding, first_token_head, plain_encoder
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf.fields import supported
from rosebatch.model.weights import WeightSource

# transformers' class takes so many, whatever its config says.
_BUCKETS = 32
_MAX_DISTANCE = 128
# Defaults of transformers' config class.
_DEFAULTS = {
    "vocab_size": 30527,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "relative_attention_num_buckets": _BUCKETS,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


class MPNet(LayerNormEncoder):
    """See ``LayerNormEncoder``."""

    prefixes: ClassVar[tuple[str, ...]] = ("mpnet.",)
    qkv_names: ClassVar[tuple[str, ...]] = tuple(f"attention.attn.{name}" for name in "qkv")
    out_name: ClassVar[str] = "attention.attn.o"
    attention_norm_name: ClassVar[str] = "attention.LayerNorm"

    def load_bias(self, weights: WeightSource) -> Tensor | None:
        """See ``LayerNormEncoder``: all layers have the same bias."""
        shape, longest = (_BUCKETS, self.config.num_heads), self.config.max_model_len
        table = weights.get(f"{self.prefix}encoder.relative_attention_bias.weight", shape)
        return table[_buckets(torch.arange(1 - longest, longest, device=table.device))].T.contiguous()


def _buckets(distances: Tensor) -> Tensor:
    """The bucket of each distance from a query to a key (T5's rule, arXiv 1910.10683): near ones have one each."""
    half, near = _BUCKETS // 2, _BUCKETS // 4
    size = distances.abs()
    # As transformers rounds it.
    steps = torch.log(size.clamp(min=1).float() / near) / math.log(_MAX_DISTANCE / near) * (half - near)
    far = (near + steps.long()).clamp(max=half - 1)
    return half * (distances > 0) + torch.where(size < near, size, far)


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    supported("relative_attention_num_buckets", values["relative_attention_num_buckets"], (_BUCKETS,))
    return after_padding({**plain_encoder(values, "mpnet"), "token_types": 0}, {**values, "pad_token_id": 1})


ARCHITECTURES = {
    "MPNetModel": Architecture(
        "mpnet",
        "MPNet, all-mpnet-base",
        _parse,
        _DEFAULTS,
        fallback=False,
        classifier=lambda _: first_token_head("classifier.dense", "classifier.out_proj"),
    )
}
FAMILY = Family("mpnet", MPNet, mlp_matrices=2, bidirectional=True)
