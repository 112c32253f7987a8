"""What layers keep of each sequence, a state of fixed size: a slot for each sequence that runs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rosebatch.engine.cache.kv_cache import zeros
from rosebatch.engine.plan import StepPlan
from rosebatch.model.mixers.mixer import StateShape


def state_bytes(layers: Sequence[Sequence[StateShape]], dtype: torch.dtype) -> int:
    """Bytes that a sequence's states take in all layers."""
    return sum(math.prod(shape) * (own or dtype).itemsize for layer in layers for shape, own in layer)


class StatePool:
    """States of all layers. A slot is never cleared: a sequence's token at position 0 starts from zeros.

    Args:
        layers: the states of each layer that has any, in order.
        num_slots: maximum number of concurrent sequences.
        dtype: of activations.
        device: of the tensors.

    Attributes:
        slots: by sequence id.
    """

    def __init__(
        self, layers: Sequence[Sequence[StateShape]], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layers = [
            tuple(zeros((num_slots, *shape), own or dtype, device) for shape, own in layer) for layer in layers
        ]
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self.slots: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(state.nbytes for layer in self._layers for state in layer)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """The tensors of a layer, ``[num_slots, *shape]`` for each of its states."""
        return self._layers[index]

    def update(self, plan: StepPlan) -> None:
        """Release and take the slots of the sequences that a plan releases and starts."""
        if plan.reset:
            self.slots.clear()
            self._free = list(range(self._num_slots))
        self._free += [self.slots.pop(sequence_id) for sequence_id in plan.released]
        for spec in plan.started:
            self.slots[spec.id] = self._free.pop()
