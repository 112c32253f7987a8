"""What layers keep of each sequence, a state of fixed size: a slot for each that runs, and for each snapshot."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch.engine.cache.kv_cache import zeros
from rosebatch.engine.plan import StepPlan
from rosebatch.engine.staging import Staging
from rosebatch.model.mixers.mixer import StateShape
from rosebatch.ops.ops import Ops


def state_bytes(layers: Sequence[Sequence[StateShape]], dtype: torch.dtype) -> int:
    """Bytes that a sequence's states take in all layers."""
    return sum(math.prod(shape) * (own or dtype).itemsize for layer in layers for shape, own in layer)


class StatePool:
    """States of all layers. A slot is never cleared: a sequence's token at position 0 starts from zeros.

    Layers with states of one shape share a tensor, so that a copy of a slot is one launch for all of them.

    Args:
        layers: the states of each layer that has any, in order.
        num_slots: maximum number of concurrent sequences.
        num_snapshots: further slots.
        dtype: of activations.
        device: of the tensors.
        ops: the operators of this run.

    Attributes:
        num_snapshots: the same.
        slots: by sequence id.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[StateShape]],
        num_slots: int,
        num_snapshots: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        kinds = [tuple(layer) for layer in layers]
        own: dict[int, tuple[Tensor, ...]] = {}
        self._tensors: list[Tensor] = []
        for kind in dict.fromkeys(kinds):
            members = [layer for layer, each in enumerate(kinds) if each == kind]
            slots = len(members), 1, num_slots + num_snapshots
            tensors = [zeros((*slots, *shape), of_state or dtype, device) for shape, of_state in kind]
            self._tensors += tensors
            own |= dict(zip(members, zip(*(each[:, 0] for each in tensors), strict=True), strict=True))
        self._layers = [own[index] for index in range(len(kinds))]
        self._copy_blocks = ops.copy_blocks
        self.num_snapshots = num_snapshots
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self.slots: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(data.nbytes for data in self._tensors)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """The tensors of a layer, ``[slots, *shape]`` for each of its states; those of snapshots are the last."""
        return self._layers[index]

    def load(self, plan: StepPlan, slot_of: Callable[[int], int], staging: Staging) -> None:
        """Copy the snapshots that a plan's sequences begin with, before its forward pass; ``slot_of`` an id."""
        self.copy([(self._num_slots + snapshot, slot_of(each)) for snapshot, each in plan.state_loads], staging)

    def save(self, plan: StepPlan, slot_of: Callable[[int], int], staging: Staging) -> None:
        """Copy the states of sequences to snapshots, after the forward pass of a plan."""
        self.copy([(slot_of(each), self._num_slots + snapshot) for each, snapshot in plan.state_saves], staging)

    def copy(self, pairs: Sequence[tuple[int, int]], staging: Staging) -> None:
        """Copy (source, destination) slots in all layers; no slot is both."""
        if pairs:
            sources, destinations = staging.send(*np.array(pairs, np.int64).T)
            for data in self._tensors:
                self._copy_blocks(data, sources, destinations)

    def update(self, plan: StepPlan) -> None:
        """Release and take the slots of the sequences that a plan releases and starts."""
        if plan.reset:
            self.slots.clear()
            self._free = list(range(self._num_slots))
        self._free += [self.slots.pop(sequence_id) for sequence_id in plan.released]
        for spec in plan.started:
            self.slots[spec.id] = self._free.pop()
