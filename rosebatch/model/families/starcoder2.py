"""Starcoder 2: a plain MLP, biases, and a sliding window."""

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.sublayers import MLP, load_plain_mlp
from rosebatch.model.weights import WeightSource


class Starcoder2(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    mlp_matrices = 2

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """See ``LayerNormDecoder``."""
        return load_plain_mlp(self.config, self.ops, weights, f"{prefix}mlp.c_fc", f"{prefix}mlp.c_proj")
