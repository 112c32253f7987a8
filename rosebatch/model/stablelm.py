"""StableLM: a gated MLP, rotary positions on a part of each head."""

import torch

from rosebatch.model.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.weights import WeightSource
from rosebatch.ops import QKNorm


class StableLM(LayerNormDecoder):
    """See ``LayerNormDecoder``."""
