"""Command R and Command R7B: attention and MLP in parallel, norms without bias, rotation of neighbouring channels."""

from torch import Tensor

from rosebatch.model.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.rope import interleaved_qkv_order


class Cohere(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    norm_bias = False

    def qkv_order(self) -> Tensor:
        """See ``interleaved_qkv_order``."""
        return interleaved_qkv_order(self.config)
