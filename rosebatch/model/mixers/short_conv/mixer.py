"""Short convolutions: a sequence keeps the last tokens' numbers in place of K and V."""

from collections.abc import Sequence
from dataclasses import dataclass

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
from rosebatch.ops.short_conv import conv_kernels, reference


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ConvSpec(MixerSpec):
    """See ``MixerSpec``, and ``rosebatch_kernels.short_conv.kernel`` for the formula.

    The input is ``[T, 3 · C]``, the output ``[T, C]``.

    Attributes:
        weight: ``[C, taps]``, of each channel; the last factor is that of the token itself.
    """

    weight: Tensor

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The last tokens' numbers."""
        channels, taps = self.weight.shape
        return (StateShape((taps, channels)),)

    def torch_step(self, step: TorchContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """Continue each sequence by its new tokens."""
        kernels = conv_kernels() if inputs[0].is_cuda else reference
        return kernels.prefill(*inputs, *step.states(self), step.chunks, self.weight)

    @classmethod
    def triton_mixer(cls, specs: Sequence["ConvSpec"], setup: TritonSetup) -> "TritonConv":
        """See ``MixerSpec``."""
        return TritonConv()


class TritonConv(TritonMixer[ConvSpec]):
    """The kind in the Triton runner."""

    def __init__(self) -> None:
        self.kernels = conv_kernels()

    def packed(self, spec: ConvSpec, step: PackedContext, inputs: tuple[Tensor, ...], wanted: Tensor | None) -> Tensor:
        """See ``TritonMixer``."""
        out = self.kernels.prefill(*inputs, *step.states(spec), step.chunks, spec.weight)
        return out if wanted is None else out[wanted]

    def decode(self, spec: ConvSpec, step: DecodeContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """See ``TritonMixer``."""
        rows = step.state_slots, step.positions, step.limits
        return self.kernels.decode(*inputs, *step.states(spec), *rows, spec.weight)
