"""Bidirectional attention, over whole prompts: each token sees those after it too, and nothing is kept of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.model.mixers.mixer import (
    DecodeContext,
    MixerSpec,
    PackedContext,
    TorchContext,
    TritonMixer,
    TritonSetup,
)
from rosebatch.ops.bidirectional_attention import bidirectional_kernel, torch_attention
from rosebatch.ops.ops import QKNorm


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BidirectionalSpec(MixerSpec):
    """See ``MixerSpec``. The input is ``[T, (heads + 2 · kv_heads) · D]``, q then k then v as projected.

    The output is ``[T, heads · D]``.

    Attributes:
        num_heads, num_kv_heads: of q, and of k and v.
        head_dim: D.
        scale: factor on q·k.
        qk_norm: what q and k go through before the rotation.
        bias: ``[heads, 2 · M - 1]``, added to scores by the distance of a key; see
            ``rosebatch_kernels.bidirectional_attention``. None for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qk_norm: QKNorm | None = None
    bias: Tensor | None = None

    @property
    def whole_prompts(self) -> bool:
        """See ``MixerSpec``."""
        return True

    def torch_step(self, step: TorchContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """Attend to prompts of one length at a time: no row is padding, and the bits of a row are its prompt's own."""
        prompts, rotation = step.prompts(), step.rotation(self.rotary)
        if rotation is not None:
            rotation = prompts.ordered(rotation[0]), prompts.ordered(rotation[1])
        qkv = prompts.ordered(*inputs)
        heads = step.ops.split_heads(qkv, self.num_heads, self.num_kv_heads, rotation, self.qk_norm)
        sizes = [count * length for count, length in prompts.shapes]
        parts = []
        for shape, *rows in zip(prompts.shapes, *(x.split(sizes) for x in heads), strict=True):
            q, k, v = (x.unflatten(0, shape) for x in rows)
            parts.append(torch_attention.attend(q, k, v, self.scale, self.window, self.bias).flatten(2).flatten(0, 1))
        return prompts.restored(torch.cat(parts))

    @classmethod
    def triton_mixer(cls, specs: Sequence["BidirectionalSpec"], setup: TritonSetup) -> "TritonBidirectional":
        """See ``MixerSpec``."""
        return TritonBidirectional(setup)


class TritonBidirectional(TritonMixer[BidirectionalSpec]):
    """The kind in the Triton runner."""

    def __init__(self, setup: TritonSetup) -> None:
        self.kernel = bidirectional_kernel(setup.device)

    def packed(
        self, spec: BidirectionalSpec, step: PackedContext, inputs: tuple[Tensor, ...], wanted: Tensor | None
    ) -> Tensor:
        """See ``TritonMixer``; all rows are computed."""
        (qkv,), rotary = inputs, spec.rotary
        rotation = None
        if rotary is not None:
            rows = step.positions if step.rotary_rows is None else step.rotary_rows
            rotation = rotary.cos[rows][:, None], rotary.sin[rows][:, None]
        q, k, v = step.ops.split_heads(qkv, spec.num_heads, spec.num_kv_heads, rotation, spec.qk_norm)
        options = {"scale": spec.scale, "window": spec.window, "bias": spec.bias}
        out = self.kernel(q, k, v, step.chunks.chunks, step.chunks.tiles, **options)
        return out if wanted is None else out[wanted]

    def decode(self, spec: BidirectionalSpec, step: DecodeContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """See ``TritonMixer``."""
        raise AssertionError("nothing is generated")
