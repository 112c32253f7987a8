"""Starcoder 2: a plain MLP, biases, and a sliding window."""

from rosebatch.model.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.sublayers import MLP, PlainMLP, load_linear
from rosebatch.model.weights import WeightSource


class Starcoder2(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    mlp_matrices = 2

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """See ``LayerNormDecoder``."""
        c = self.config
        up_name, down_name = [f"{prefix}mlp.c_fc"], [f"{prefix}mlp.c_proj"]
        up = load_linear(self.ops, weights, up_name, (c.intermediate_size,), c.hidden_size, bias=c.mlp_bias)
        down = load_linear(self.ops, weights, down_name, (c.hidden_size,), c.intermediate_size, bias=c.mlp_bias)
        return PlainMLP(self.ops, c.activation, up, down)
