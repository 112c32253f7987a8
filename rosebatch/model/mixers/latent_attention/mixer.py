"""Latent attention: one latent of each token for all heads, from which keys and values are products."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.config.model import Planes
from rosebatch.model.mixers.mixer import (
    DecodeContext,
    MixerSpec,
    PackedContext,
    QueryTiles,
    TorchContext,
    TritonContext,
    TritonMixer,
    TritonSetup,
)
from rosebatch.ops.latent_attention import latent_kernels, rms_norm, rope, torch_attention


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LatentSpec(MixerSpec):
    """See ``MixerSpec``; the formula is in ``rosebatch_kernels.latent_attention.reference``.

    The inputs are q ``[T, heads, W]`` in the space of latents, whose last channels are rotated here, and latents
    ``[T, W]`` as projected. q is overwritten. The output is ``[T, heads, rank]``, sums of latents.

    Attributes:
        num_heads: of q.
        rank: of a latent; W is that and the channels that are rotated.
        scale: factor on q·k.
        norm: ``[rank]``, the weight of the RMSNorm of latents.
        eps: of the norm.
    """

    num_heads: int
    rank: int
    scale: float
    norm: Tensor
    eps: float

    @property
    def width(self) -> int:
        """W: numbers that a token leaves."""
        assert self.rotary is not None, "a part of q is rotated"
        return self.rank + self.rotary.cos.shape[1]

    @property
    def planes(self) -> tuple[Planes, ...]:
        """One row of a token, for keys and values alike."""
        return (Planes(1, self.width),)

    def torch_step(self, step: TorchContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """Append the rows of all sequences, then attend: a block filled in this step can be read in it."""
        (q, latents), (plane,), rotation = inputs, step.planes(self), step.rotation(self.rotary)
        assert rotation is not None, "a part of q is rotated"
        q = torch.cat((q[..., : self.rank], rope(q[..., self.rank :], *rotation)), -1)
        own, key = latents[:, : self.rank], rope(latents[:, None, self.rank :], *rotation)[:, 0]
        new = torch.cat((rms_norm(own, self.norm, self.eps), key), 1)
        plane.view(-1, self.width).index_copy_(0, step.append_rows(self)[0].view(-1), new)

        def attend(q: Tensor, tiles: QueryTiles) -> Tensor:
            kernel = torch_attention.decode if tiles.generated else torch_attention.prefill
            return kernel(q, plane, tiles.rows[0], tiles.mask, self.rank, self.scale)

        return step.attend(self, q, attend)

    @classmethod
    def triton_mixer(cls, specs: Sequence["LatentSpec"], setup: TritonSetup) -> "TritonLatents":
        """See ``MixerSpec``."""
        return TritonLatents(specs, setup)


class TritonLatents(TritonMixer[LatentSpec]):
    """The kind in the Triton runner."""

    verifies = True

    def __init__(self, specs: Sequence[LatentSpec], setup: TritonSetup) -> None:
        heads = {spec.num_heads for spec in specs}
        self.kernels = latent_kernels(heads, setup.switches, setup.dtype, setup.device)

    def packed(
        self, spec: LatentSpec, step: PackedContext, inputs: tuple[Tensor, ...], wanted: Tensor | None
    ) -> Tensor:
        """See ``TritonMixer``. Rows of all chunks are written before any is read."""
        q, (plane,) = self._prepare(spec, step, inputs), step.planes(spec)
        tiles = step.tiles if wanted is None else step.last_tiles
        out = self.kernels.prefill(q, plane, step.table(spec), tiles, rank=spec.rank, scale=spec.scale)
        return out if wanted is None else out[wanted]

    def decode(self, spec: LatentSpec, step: DecodeContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """See ``TritonMixer``."""
        q, (plane,) = self._prepare(spec, step, inputs), step.planes(spec)
        where = step.table(spec), step.positions, step.limits
        return self.kernels.decode(q, plane, *where, rank=spec.rank, scale=spec.scale, queries=step.queries)

    def decode_form(self, batch: int, *, divided: bool) -> Hashable:
        """See ``TritonMixer``."""
        return self.kernels.decode_form(batch)

    def _prepare(self, spec: LatentSpec, step: TritonContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """q, rotated; the new rows are in the cache."""
        q, latents = inputs
        assert spec.rotary is not None, "a part of q is rotated"
        where = step.table(spec), step.rows(), step.positions
        options = {"rotary": step.rotary_tables(spec.rotary), "rotary_rows": step.rotary_rows}
        self.kernels.prepare(q, latents, step.planes(spec)[0], *where, norm=spec.norm, eps=spec.eps, **options)
        return q
