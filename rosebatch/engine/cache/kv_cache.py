"""The tensors that hold what layers keep of each token, in blocks, and how large they are."""

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig, Planes
from rosebatch.engine.cache.host_store import HostStore
from rosebatch.engine.cache.windows import max_blocks, window_groups
from rosebatch.engine.plan import BlockCopy, StepPlan
from rosebatch.engine.staging import Staging
from rosebatch.ops.ops import Ops


def bytes_per_block(layers: Iterable[Sequence[Planes]], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all planes of these layers."""
    return block_size * sum(p.numbers * _dtype(p.dtype, dtype).itemsize for layer in layers for p in layer)


def _dtype(own: str | None, dtype: torch.dtype) -> torch.dtype:
    """Of planes, by the name of their own."""
    found = dtype if own is None else getattr(torch, own)
    assert isinstance(found, torch.dtype)
    return found


def bytes_for_longest(
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    lengths: Iterable[int],
    slots: int,
    chunk: int,
    draft_planes: tuple[Planes, ...] = (),
) -> int:
    """Bytes of a cache in which the longest sequences fit at once, with a block to spare for each.

    Args:
        config: of the model.
        block_size: tokens of a block.
        dtype: of activations.
        lengths: tokens of each sequence.
        slots: sequences at a time.
        chunk: most tokens of a step with prompts.
        draft_planes: of a head for drafts.
    """
    whole = sum(-(-length // block_size) + 1 for length in heapq.nlargest(slots, lengths))
    windows, group_of = window_groups([*config.kv_windows, *[0] * bool(draft_planes)], config.max_model_len)
    limits = {"longest": config.max_model_len, "slots": slots, "chunk": chunk}
    blocks = [min(whole, max_blocks(window, block_size, **limits)) if window else whole for window in windows]
    layers = zip([*config.kv_planes, *[draft_planes] * bool(draft_planes)], group_of, strict=True)
    return sum(blocks[group] * bytes_per_block([planes], block_size, dtype) for planes, group in layers)


class KVCache:
    """The planes of all layers, K and V for most. Layers with the same planes share tensors, if they are in one group.

    Args:
        layers: the planes of each layer, in order.
        num_blocks: of each group of layers; a block id means the same place in all layers of a group.
        block_size: tokens of a block.
        dtype: of planes that have none of their own, that of activations.
        device: of the tensors.
        ops: the operators of this run.
        group_of: the group of each layer, see ``window_groups``; None for one group.

    Attributes:
        tensors: ``[layers, number, blocks, heads, block_size, width]`` each, of layers with the same planes. A head's
            tokens of a block are contiguous.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Planes, ...]],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        group_of: Sequence[int] | None = None,
    ) -> None:
        self.num_blocks = tuple(num_blocks)
        self.group_of = tuple(group_of or [0] * len(layers))
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._copy_blocks = ops.copy_blocks
        self.tensors: list[Tensor] = []
        self._groups: list[list[Tensor]] = [[] for _ in num_blocks]
        own: dict[int, tuple[Tensor, ...]] = {}
        kinds = list(zip(self.group_of, layers, strict=True))
        for kind in dict.fromkeys(kinds):
            members = [layer for layer, each in enumerate(kinds) if each == kind]
            group, planes = kind
            # Zeros, not empty: keys past a sequence's end are masked, but a masked NaN would still spread.
            blocks = num_blocks[group]
            tensors = [
                zeros((len(members), number, blocks, heads, block_size, width), _dtype(own_dtype, dtype), device)
                for heads, width, number, own_dtype in planes
            ]
            self.tensors += tensors
            self._groups[group] += tensors
            own |= dict(zip(members, zip(*tensors, strict=True), strict=True))
        self._layers = [own[index] for index in range(len(layers))]
        self._host: HostStore | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(data.nbytes for data in self.tensors)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """The tensors of a layer, ``[number, blocks, heads, block_size, width]`` for each of its planes."""
        return self._layers[index]

    def change(self, plan: StepPlan, staging: Staging) -> None:
        """Do what a plan does to blocks before its forward pass."""
        if plan.saves:
            self._host = self._host or HostStore(self.tensors, self.device)
            self._host.save(plan.saves, staging)
        self.wipe(plan.wipes, staging)
        self.copy(plan.copies, staging)
        if self._host is not None and plan.restores:
            self._host.restore(plan.restores, staging)

    def wipe(self, blocks: Sequence[tuple[int, int]], staging: Staging) -> None:
        """Overwrite (group, block) with zeros in all layers of the group."""
        for number in {group for group, _ in blocks}:
            (index,) = staging.send(np.array([block for group, block in blocks if group == number], np.int64))
            for data in self._groups[number]:
                data.index_fill_(2, index, 0)

    def copy(self, copies: Sequence[BlockCopy], staging: Staging) -> None:
        """Copy (group, source, destination) in all layers of the group; no block is both."""
        for number in {group for group, *_ in copies}:
            pairs = [pair for group, *pair in copies if group == number]
            sources, destinations = staging.send(*np.array(pairs, np.int64).T)
            for data in self._groups[number]:
                self._copy_blocks(data, sources, destinations)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU their pages stay untouched until they are written: torch.zeros takes 0.7 s for each GiB."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
