"""The gated delta rule: a sequence keeps a state of fixed size in place of K and V."""

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
from rosebatch.ops.gated_delta import TILE_ROWS, DeltaState, DeltaWeights, delta_kernels, reference


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeltaSpec(MixerSpec):
    """See ``MixerSpec``, and ``rosebatch_kernels.gated_delta`` for the formula.

    The inputs are ``qkv [T, C]``, q then k then v as projected, and ``a, b [T, value_heads]``, rows at any stride.
    Where each channel of a key has a decay of its own, a is ``[T, value_heads · key_dim]``. The output is
    ``[T, value_heads · value_dim]``.

    Attributes:
        key_heads, value_heads: a key head serves ``value_heads / key_heads`` successive value heads.
        key_dim, value_dim: of a head of each kind.
        weights: of the convolution and of the decay.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    weights: DeltaWeights

    @property
    def channels(self) -> int:
        """Channels of q, k and v together."""
        return len(self.weights.conv)

    @property
    def states(self) -> tuple[StateShape, ...]:
        """See ``DeltaState``: the convolution's last inputs, and the rule's matrices."""
        channels, taps = self.weights.conv.shape
        memory = self.value_heads, self.key_dim, self.value_dim
        return StateShape((taps, channels)), StateShape(memory, torch.float32)

    @property
    def chunk_unit(self) -> int:
        """See ``MixerSpec``: tiles begin where a chunk does."""
        return TILE_ROWS

    def torch_step(self, step: TorchContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """Continue each sequence's state by its new tokens."""
        qkv, a, b = inputs
        kernels = delta_kernels(by_channel=self.weights.by_channel) if qkv.is_cuda else reference
        return kernels.prefill(qkv, a, b, DeltaState(*step.states(self)), step.chunks, self.weights)

    @classmethod
    def triton_mixer(cls, specs: Sequence["DeltaSpec"], setup: TritonSetup) -> "TritonDelta":
        """See ``MixerSpec``."""
        return TritonDelta(specs)


class TritonDelta(TritonMixer[DeltaSpec]):
    """The kind in the Triton runner."""

    def __init__(self, specs: Sequence[DeltaSpec]) -> None:
        self.kernels = delta_kernels(by_channel=specs[0].weights.by_channel)

    def packed(self, spec: DeltaSpec, step: PackedContext, inputs: tuple[Tensor, ...], wanted: Tensor | None) -> Tensor:
        """See ``TritonMixer``."""
        out = self.kernels.prefill(*inputs, DeltaState(*step.states(spec)), step.chunks, spec.weights)
        return out if wanted is None else out[wanted]

    def decode(self, spec: DeltaSpec, step: DecodeContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """See ``TritonMixer``."""
        rows = step.state_slots, step.positions, step.limits
        return self.kernels.decode(*inputs, DeltaState(*step.states(spec)), *rows, spec.weights)
