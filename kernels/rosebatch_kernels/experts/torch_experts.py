"""A mixture of experts by PyTorch: one product for all tokens of an expert.

A token's result depends on no other token if the products promise this: its parts are added in the order of its slots.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rosebatch_kernels.common import host_waits
from rosebatch_kernels.experts.reference import activated, add_up

Product = Callable[[Tensor], Tensor]


class TorchExperts:
    """``x [T, H]`` with ``ids, weights [T, k]`` -> ``[T, H]``.

    Args:
        gate_up: a product ``[n, H] -> [n, 2 · I]`` for each expert; ``[n, I]`` with ``relu2``.
        down: a product ``[n, I] -> [n, H]`` for each.
        activation: see ``reference.parts``.
    """

    def __init__(self, gate_up: list[Product], down: list[Product], activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        """The weighted sum of each token's experts and of ``shared [T, H]``, in x's dtype."""
        count = ids.shape[1]
        parts = torch.empty(count + (shared is not None), *x.shape, dtype=torch.float32, device=x.device)
        if shared is not None:
            parts[count] = shared
        for expert in host_waits.to_list(ids.unique()):
            tokens, slots = torch.where(ids == expert)
            hidden = activated(self.activation, self.gate_up[expert](x[tokens]))
            parts[slots, tokens] = self.down[expert](hidden).float() * weights[tokens, slots, None]
        return add_up(parts, x.dtype)
