"""What the model families share: the contract with attention, the contract of a model, rotary tables."""

import math
from typing import Protocol

import torch
from torch import Tensor

from rosebatch.config import RopeConfig


class Attention(Protocol):
    """The attention of one step, over whatever cache the runner keeps."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new tokens' K and V to the cache and attend over all of each sequence.

        Args:
            layer: counted from 0.
            q: ``[T, heads, D]``.
            k, v: ``[T, kv_heads, D]``.

        Returns:
            ``[T, heads · D]``.
        """
        ...


class Model(Protocol):
    """A causal language model over packed tokens: sequences stand one behind the other, without padding."""

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states ``[T, H]`` before the output projection, of ``input_ids [T]`` at ``positions [T]``, int64."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, V]`` logits of the rows ``hidden [S, H]``: asked only for rows that are sampled."""
        ...


def rope_tables(rope: RopeConfig, head_dim: int, max_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin``, ``[max_len, 1, D]`` each, in the form that ``rosebatch_kernels.rope`` takes."""
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * _inverse_frequencies(rope, head_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each channel pair: ``[D / 2]`` fp32."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        # Long waves are stretched by the factor, short ones kept, those between interpolated (Llama 3.1's rule).
        wavelengths = 2 * math.pi / frequencies
        turns = rope.original_max_position_embeddings / wavelengths
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    return frequencies
