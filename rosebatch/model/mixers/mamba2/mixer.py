"""Mamba2: a sequence keeps a matrix for each head, of fixed size."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.model.mixers.mixer import (
    DecodeContext,
    MixerSpec,
    PackedContext,
    StateShape,
    TorchContext,
    TritonMixer,
    TritonSetup,
)
from rosebatch.ops.mamba2 import TILE_ROWS, MambaState, MambaWeights, mamba_kernels, reference


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MambaSpec(MixerSpec):
    """See ``MixerSpec``, and ``rosebatch_kernels.mamba2`` for the formula.

    The inputs are ``xbc [T, C]``, x then B then C as projected, and ``dt [T, heads]``, rows at any stride. The output
    is ``[T, heads · head_dim]``.

    Attributes:
        heads, head_dim: heads, and their size.
        groups: each pair of B and C serves ``heads / groups`` successive heads.
        state_size: numbers of B and of C.
        weights: of the convolution, the decay and the steps.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    weights: MambaWeights

    @property
    def states(self) -> tuple[StateShape, ...]:
        """See ``MambaState``: the convolution's last inputs, and the matrices."""
        channels, taps = self.weights.conv.shape
        memory = self.heads, self.head_dim, self.state_size
        return StateShape((taps, channels)), StateShape(memory, torch.float32)

    @property
    def chunk_unit(self) -> int:
        """See ``MixerSpec``: tiles begin where a chunk does."""
        return TILE_ROWS

    def torch_step(self, step: TorchContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """Continue each sequence's state by its new tokens."""
        kernels = mamba_kernels() if inputs[0].is_cuda else reference
        return kernels.prefill(*inputs, MambaState(*step.states(self)), step.chunks, self.weights)

    @classmethod
    def triton_mixer(cls, specs: Sequence["MambaSpec"], setup: TritonSetup) -> "TritonMamba":
        """See ``MixerSpec``."""
        return TritonMamba()


class TritonMamba(TritonMixer[MambaSpec]):
    """The kind in the Triton runner."""

    def __init__(self) -> None:
        self.kernels = mamba_kernels()

    def packed(self, spec: MambaSpec, step: PackedContext, inputs: tuple[Tensor, ...], wanted: Tensor | None) -> Tensor:
        """See ``TritonMixer``."""
        out = self.kernels.prefill(*inputs, MambaState(*step.states(spec)), step.chunks, spec.weights)
        return out if wanted is None else out[wanted]

    def decode(self, spec: MambaSpec, step: DecodeContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """See ``TritonMixer``."""
        rows = step.state_slots, step.positions, step.limits
        return self.kernels.decode(*inputs, MambaState(*step.states(spec)), *rows, spec.weights)
