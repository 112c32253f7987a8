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
from rosebatch.ops.ops import HeadProducts


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LatentSpec(MixerSpec):
    """See ``MixerSpec``; the formula is in ``rosebatch_kernels.latent_attention.reference``.

    The inputs are q ``[T, heads, nope + R]``, whose last channels are rotated here if positions are rotary, and latents
    ``[T, rank + R]`` as projected. q is overwritten. The output is ``[T, heads, values]``.

    Attributes:
        num_heads: of q.
        rank: of a latent.
        width: numbers that a token leaves, ``rank + R``.
        scale: factor on q·k.
        of_keys: ``[heads, rank, nope]``: takes a head's channels of q that are not rotated to the space of latents.
        of_values: ``[heads, values, rank]``: makes a head's values of latents.
        absorb, expand: products with these matrices.
        norm: ``[rank]``, the weight of the RMSNorm of latents.
        eps: of the norm.
    """

    num_heads: int
    rank: int
    width: int
    scale: float
    of_keys: Tensor
    of_values: Tensor
    absorb: HeadProducts
    expand: HeadProducts
    norm: Tensor
    eps: float

    @property
    def planes(self) -> tuple[Planes, ...]:
        """One row of a token, for keys and values alike."""
        return (Planes(1, self.width),)

    @property
    def by_chunks(self) -> bool:
        """Tokens of a chunk may see each other in another way than those before it."""
        return True

    def absorbed(self, q: Tensor) -> Tensor:
        """q in the space of latents, ``[T, heads, rank + R]``."""
        wide, nope = q.new_empty(len(q), self.num_heads, self.width), self.of_keys.shape[2]
        self.absorb(q[..., :nope], wide[..., : self.rank])
        wide[..., self.rank :] = q[..., nope:]
        return wide

    def torch_step(self, step: TorchContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """Append the rows of all sequences, then attend: a block filled in this step can be read in it."""
        (q, latents), (plane,), rotation = inputs, step.planes(self), step.rotation(self.rotary)
        q, own, key = self.absorbed(q), latents[:, : self.rank], latents[:, self.rank :]
        if rotation is not None:
            q = torch.cat((q[..., : self.rank], rope(q[..., self.rank :], *rotation)), -1)
            key = rope(key[:, None], *rotation)[:, 0]
        new = torch.cat((rms_norm(own, self.norm, self.eps), key), 1)
        plane.view(-1, self.width).index_copy_(0, step.append_rows(self)[0].view(-1), new)

        def attend(q: Tensor, tiles: QueryTiles) -> Tensor:
            kernel = torch_attention.decode if tiles.generated else torch_attention.prefill
            return kernel(q, plane, tiles.rows[0], tiles.mask, self.rank, self.scale)

        return self.expand(step.attend(self, q, attend))

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
        """See ``TritonMixer``. Rows of all chunks are written before any is read. A few rows see latents alone."""
        if wanted is None and self.kernels.expands:
            return self._expanded(spec, step, inputs)
        q, (plane,) = self._prepare(spec, step, inputs), step.planes(spec)
        tiles = step.tiles if wanted is None else step.last_tiles
        where = step.table(spec), tiles
        out = self.kernels.prefill(spec.absorbed(q), plane, *where, rank=spec.rank, scale=spec.scale)
        return spec.expand(out if wanted is None else out[wanted])

    def _expanded(self, spec: LatentSpec, step: PackedContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """The tokens of a step see each other by keys and values, and latents that were there before."""
        appended = torch.empty_like(inputs[1], memory_format=torch.contiguous_format)
        q, (plane,) = self._prepare(spec, step, inputs, appended), step.planes(spec)
        latents, rotated = appended[:, : spec.rank], appended[:, spec.rank :]
        k, v = latents @ spec.of_keys, latents @ spec.of_values.transpose(1, 2)
        fresh = k.transpose(0, 1), v.transpose(0, 1), rotated
        out, norms = self.kernels.attend_fresh(q, *fresh, step.chunks, scale=spec.scale)
        where = plane, step.table(spec), step.rows(), step.chunks
        matrices = {"of_keys": spec.of_keys, "of_values": spec.of_values}
        self.kernels.attend_prefix_(out, norms, q, *where, scale=spec.scale, **matrices)
        return out

    def decode(self, spec: LatentSpec, step: DecodeContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """See ``TritonMixer``."""
        q, (plane,) = self._prepare(spec, step, inputs), step.planes(spec)
        where = step.table(spec), step.positions, step.limits
        options = {"rank": spec.rank, "scale": spec.scale, "queries": step.queries}
        return spec.expand(self.kernels.decode(spec.absorbed(q), plane, *where, **options))

    def decode_form(self, batch: int, *, divided: bool) -> Hashable:
        """See ``TritonMixer``."""
        return self.kernels.decode_form(batch)

    def _prepare(
        self, spec: LatentSpec, step: TritonContext, inputs: tuple[Tensor, ...], appended: Tensor | None = None
    ) -> Tensor:
        """q, rotated if positions are; the new rows are in the cache, and in ``appended`` if it is given."""
        q, latents = inputs
        where = step.table(spec), step.rows(), step.positions
        tables = None if spec.rotary is None else step.rotary_tables(spec.rotary)
        options = {"rotary": tables, "rotary_rows": step.rotary_rows, "appended": appended}
        self.kernels.prepare(q, latents, step.planes(spec)[0], *where, norm=spec.norm, eps=spec.eps, **options)
        return q
