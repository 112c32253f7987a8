"""What the operators of Mamba2 share: parameters and states."""

from typing import NamedTuple

from torch import Tensor


class MambaWeights(NamedTuple):
    """Parameters of a layer.

    Attributes:
        conv: ``[C, taps]``, of each channel; the last factor is that of the token itself.
        conv_bias: ``[C]`` or None.
        log_rate: ``[heads]``; a token's decay is ``exp(-exp(log_rate) · step)``, its step ``softplus(dt + dt_bias)``.
        dt_bias: ``[heads]``.
        skip: ``[heads]``, the share of a token's own x in its result.
    """

    conv: Tensor
    conv_bias: Tensor | None
    log_rate: Tensor
    dt_bias: Tensor
    skip: Tensor


class MambaState(NamedTuple):
    """What the sequences of a layer keep, one slot each.

    Attributes:
        inputs: ``[slots, taps, C]`` in the activations' dtype: the convolution's input at position p lies in row
            ``p mod taps``. One row more than the past tokens that are read: programs write a new token's input while
            others still read the past ones.
        memory: ``[slots, heads, head_dim, size]`` fp32, the matrix S of each head.
    """

    inputs: Tensor
    memory: Tensor

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Heads, their size, groups that share B and C, rows of these."""
        _, heads, head_dim, size = self.memory.shape
        return heads, head_dim, (self.inputs.shape[2] - heads * head_dim) // (2 * size), size
