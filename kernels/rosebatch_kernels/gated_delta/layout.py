"""What the operators of the gated delta rule share: parameters and states."""

from typing import NamedTuple

from torch import Tensor


class DeltaWeights(NamedTuple):
    """Parameters of a layer.

    Attributes:
        conv: ``[C, taps]``, of each channel; the last factor is that of the token itself.
        conv_bias: ``[C]`` or None.
        log_rate: ``[value_heads]``; a token's decay is ``exp(-exp(log_rate) · softplus(a + dt_bias))``.
        dt_bias: ``[value_heads]``; or ``[value_heads · key_dim]``: each channel of a key has a decay of its own (KDA).
        max_beta: of a change, ``max_beta · sigmoid(b)`` is written. Beyond 1, eigenvalues of a step may be negative
            (arXiv 2411.12537).
    """

    conv: Tensor
    conv_bias: Tensor | None
    log_rate: Tensor
    dt_bias: Tensor
    max_beta: float = 1.0

    @property
    def by_channel(self) -> bool:
        """Whether each channel of a key has a decay of its own, and a number of ``a``."""
        return len(self.dt_bias) != len(self.log_rate)


class DeltaState(NamedTuple):
    """What the sequences of a layer keep, one slot each.

    Attributes:
        inputs: ``[slots, taps, C]`` in the activations' dtype: the convolution's input at position p lies in row
            ``p mod taps``. One row more than the past tokens that are read: programs write a new token's input while
            others still read the past ones.
        memory: ``[slots, value_heads, key_dim, value_dim]`` fp32, the rule's matrix S.
    """

    inputs: Tensor
    memory: Tensor

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, key size, value size."""
        _, value_heads, key_dim, value_dim = self.memory.shape
        return (self.inputs.shape[2] - value_heads * value_dim) // (2 * key_dim), value_heads, key_dim, value_dim
