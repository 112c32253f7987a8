"""What a head of drafts keeps of each token, in blocks of the model's KV cache, and the drafts that it makes of it.

Its K and V at a position are of the token there, and of the model's states at those before. So blocks that sequences
share are as true for the head as for the model: prefixes, forks and copies need no rule of their own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.plan import DraftRequest
from rosebatch.engine.torch_runner.batch import BlockTables, StepBatch
from rosebatch.model.contract import LayerStates
from rosebatch.model.eagle3.head import Eagle3Head
from rosebatch_kernels.common import host_waits


class HeadDrafts:
    """Follows the steps of the PyTorch runner with a head, and drafts between them.

    Args:
        head: the weights.
        cache: has the head's planes behind those of the model.
        layer: where they are.
        tables: of the runner.
    """

    def __init__(self, head: Eagle3Head, cache: KVCache, layer: int, tables: BlockTables) -> None:
        self.head = head
        self._tables = tables
        self._size = cache.block_size
        self._group = cache.group_of[layer]
        (self._keys, self._values), hidden = cache.layer(layer)
        # By place: ``[blocks · block_size, H]``.
        self._hidden = hidden.view(-1, hidden.shape[-1])

    def states(self) -> LayerStates:
        """Takes what the head needs of a step of the model."""
        return LayerStates(self.head.layers)

    def follow(self, batch: StepBatch, states: LayerStates) -> None:
        """Keep what the head needs of the tokens of a step. What it kept of tokens taken back is overwritten."""
        places = batch.slots[self._group]
        hidden = self.head.combine(states.joined())
        # Before any is read: a chunk may begin behind blocks that another chunk of this step computes.
        self._hidden[places] = hidden
        before, first = hidden.roll(1, 0), 0
        for chunk in batch.chunks:
            # The first token of a sequence has none before it, and is never attended to.
            before[first] = self._hidden[self._place(chunk.id, chunk.start - 1)] if chunk.start else 0
            first += len(chunk.token_ids)
        _, k, v = self.head.project(batch.input_ids, before, batch.positions)
        blocks, offsets = places // self._size, places % self._size
        self._keys[blocks, :, offsets], self._values[blocks, :, offsets] = k, v

    def _place(self, sequence_id: int, position: int) -> int:
        block = self._tables.blocks[sequence_id][self._group][position // self._size]
        return block * self._size + position % self._size

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The head's likeliest tokens after each of these sequences, one after the other."""
        most = max(each.most for each in requests)
        device = self._hidden.device
        tokens, starts = torch.tensor([(each.token_id, each.position) for each in requests], device=device).T
        before = self._hidden[[self._place(each.id, each.position - 1) for each in requests]]
        keys, values, seen = self._gather(requests, starts, most)
        known = keys.shape[2] - most
        drafts = []
        for number in range(most):
            q, k, v = self.head.project(tokens, before, starts + number)
            end = known + number
            keys[:, :, end], values[:, :, end], seen[:, end] = k, v, True
            attended = _attend(q, keys[:, :, : end + 1], values[:, :, : end + 1], seen[:, : end + 1])
            tokens, before = self.head.finish(before, attended)
            drafts.append(tokens)
        found = host_waits.to_list(torch.stack(drafts, 1))
        return [row[: each.most] for row, each in zip(found, requests, strict=True)]

    def _gather(self, requests: Sequence[DraftRequest], ends: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """K and V of all computed tokens, with room for so many: ``[B, kv_heads, S, D]``, and which are seen."""
        size = self._size
        width = max(-(-each.position // size) for each in requests)
        own = [self._tables.blocks[each.id][self._group][:width] for each in requests]
        table = torch.tensor([row + row[-1:] * (width - len(row)) for row in own], device=ends.device)
        places = torch.arange(width * size, device=ends.device)
        seen = (places > 0) & (places < ends[:, None])
        # Others may have left numbers there that are not finite.
        unseen = ~seen[:, None, :, None]
        k, v = (
            functional.pad(plane[table].transpose(1, 2).flatten(2, 3).masked_fill(unseen, 0), (0, 0, 0, most))
            for plane in (self._keys, self._values)
        )
        return k, v, functional.pad(seen, (0, most))


def _attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """``[B, heads · D]`` of queries ``[B, heads, D]``, one of each sequence."""
    grouped = q.unflatten(1, (keys.shape[1], -1))
    return functional.scaled_dot_product_attention(grouped, keys, values, seen[:, None, None]).flatten(1)
