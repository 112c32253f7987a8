"""The states of layers with the gated delta rule: one slot for each seat, taken and released with it."""

import math
from collections.abc import Sequence

import torch

from rosebatch.engine.cache.kv_cache import zeros
from rosebatch.engine.plan import StepPlan
from rosebatch.model.mixers.delta.spec import StateSpec
from rosebatch.ops.ops import DeltaState


def state_bytes(specs: Sequence[StateSpec], dtype: torch.dtype) -> int:
    """Bytes that a sequence's states take in all layers."""
    inputs = sum(math.prod(spec.input_shape) for spec in specs) * dtype.itemsize
    return inputs + sum(math.prod(spec.memory_shape) for spec in specs) * torch.float32.itemsize


class StatePool:
    """States of all layers. A slot is never cleared: a sequence's token at position 0 starts from zeros.

    Args:
        specs: of each layer with a state, in order.
        num_slots: most sequences at a time.
        dtype: of activations.
        device: where the states lie.

    Attributes:
        slots: by sequence id.
    """

    def __init__(self, specs: Sequence[StateSpec], num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        fp32 = torch.float32
        self._layers = [
            DeltaState(
                zeros((num_slots, *spec.input_shape), dtype, device),
                zeros((num_slots, *spec.memory_shape), fp32, device),
            )
            for spec in specs
        ]
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self.slots: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(part.nbytes for layer in self._layers for part in layer)

    def layer(self, index: int) -> DeltaState:
        """One layer's states."""
        return self._layers[index]

    def update(self, plan: StepPlan) -> None:
        """Release and take the slots of the sequences whose seats a plan releases and takes."""
        if plan.reset:
            self.slots.clear()
            self._free = list(range(self._num_slots))
        self._free += [self.slots.pop(sequence_id) for sequence_id in plan.released]
        for spec in plan.started:
            self.slots[spec.id] = self._free.pop()
