"""Attention in the layers of Qwen's towers: a patch sees those of its image, or of its window."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rosebatch.ops.qkv import rotation


class Run(NamedTuple):
    """Images or windows of as many patches each, one after the other: their attention is one call."""

    number: int
    patches: int


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """The runs of images or windows with so many patches."""
    return [Run(sum(1 for _ in equal), length) for length, equal in groupby(lengths)]


class PatchAttention(torch.nn.Module):
    """In place of transformers' layer, which rotates in a dozen steps, and has a call for each image and window.

    Args:
        own: transformers'; the weights of its products are shared.
        device: of these.
    """

    def __init__(self, own: Any, device: torch.device) -> None:
        super().__init__()
        self.qkv, self.proj = own.qkv, own.proj
        kv_heads = getattr(own, "num_key_value_heads", own.num_heads)
        self._heads, self._scale, self._rotate_ = (own.num_heads, kv_heads, kv_heads), own.scaling, rotation(device)

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Sequence[Run], position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """``[T, H]``; transformers gives the arguments their names.

        Args:
            hidden_states: ``[T, H]``.
            cu_seqlens: which patches see each other.
            position_embeddings: cos and sin ``[T, D]`` fp32.
        """
        qkv = self.qkv(hidden_states)
        self._rotate_(qkv, *position_embeddings, heads=sum(self._heads[:2]))
        runs = qkv.unflatten(1, (sum(self._heads), -1)).split([number * patches for number, patches in cu_seqlens])
        attended = [self._attend(each.unflatten(0, run)) for each, run in zip(runs, cu_seqlens, strict=True)]
        out: Tensor = self.proj(attended[0] if len(attended) == 1 else torch.cat(attended))
        return out

    def _attend(self, qkv: Tensor) -> Tensor:
        """``[number · patches, heads · D]`` of a run's ``[number, patches, heads of all three, D]``."""
        q, k, v = qkv.transpose(1, 2).split(self._heads, 1)
        grouped = len(k[0]) < len(q[0])
        found = scaled_dot_product_attention(q, k, v, scale=self._scale, enable_gqa=grouped)
        return found.transpose(1, 2).flatten(2).flatten(0, 1)
