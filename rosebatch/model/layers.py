"""What the model families share: the contract with attention, the contract of a model, rotary tables."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rosebatch.config import RopeConfig
from rosebatch.ops import Gate, QKNorm


@dataclass(frozen=True, slots=True)
class Rotary:
    """What happens to q and k between the projection and attention.

    Attributes:
        cos, sin: ``[max_len, D]`` in the model's dtype, in the form that ``rosebatch_kernels.rope`` takes.
        qk_norm: of each head before the rotation (Qwen3, HP1).
    """

    cos: Tensor
    sin: Tensor
    qk_norm: QKNorm | None = None


class Attention(Protocol):
    """The attention of one step, over whatever cache the runner keeps."""

    def __call__(self, layer: int, qkv: Tensor, rotary: Rotary | None, gate: Gate | None = None) -> Tensor:
        """Norm and rotate q and k, write the new tokens' K and V to the cache, attend over all of each sequence.

        Args:
            layer: counted from 0.
            qkv: ``[T, (heads + 2 · kv_heads) · D]``, q then k then v, as projected; may be overwritten.
            rotary: None where positions are not rotary.
            gate: of HP1 attention; None for softmax.

        Returns:
            ``[T, heads · D]``.
        """
        ...


class Model(Protocol):
    """A causal language model over packed tokens: sequences stand one behind the other, without padding."""

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states ``[T, H]`` before the output projection, of ``input_ids [T]`` at ``positions [T]``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[S, V]`` logits of the rows ``hidden [S, H]``: asked only for rows that are sampled."""
        ...


def rope_tables(
    rope: RopeConfig, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin``, ``[max_len, D]`` each, in the form that ``rosebatch_kernels.rope`` takes."""
    positions = torch.arange(max_len, dtype=torch.float32, device=device)
    angles = positions[:, None] * _inverse_frequencies(rope, head_dim).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


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
