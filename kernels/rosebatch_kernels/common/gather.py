"""What a layer keeps of a sequence as one tensor: its blocks, gathered from the cache with PyTorch's operators."""

import torch
from torch import Tensor


def padded_keys(seq_len: int) -> int:
    """Number of keys, masked ones included, that the last of ``seq_len`` tokens is computed with.

    It is a function of the position alone: the shapes of a product decide the order in which a library adds up. It is a
    multiple of 64. Above 512 tokens the excess is at most an eighth.
    """
    step = 64
    while step * 8 < seq_len:
        step *= 2
    return -(-seq_len // step) * step


def gather_rows(block_table: Tensor, num_blocks: int, heads: int, planes: int = 2) -> Tensor:
    """Where ``gather`` reads: ``[planes · B · heads · M]`` int64 rows of the view ``[planes · blocks · heads, ...]``.

    Args:
        block_table: ``[B, M]`` int64 block ids; entries past a sequence's end may be any valid block.
        num_blocks: blocks of the whole cache.
        heads, planes: of the cache; K and V are two planes.
    """
    numbers = torch.arange(heads, device=block_table.device)
    rows = block_table[:, None, :] * heads + numbers[None, :, None]
    return torch.stack([rows + plane * num_blocks * heads for plane in range(planes)]).view(-1)


def gather(cache: Tensor, rows: Tensor, batch: int, keys: int) -> tuple[Tensor, ...]:
    """What the first ``keys`` tokens of each sequence have in each plane, ``[B, heads, keys, width]``, in one copy.

    Args:
        cache: ``[planes, blocks, heads, block_size, width]``: K and V, say.
        rows: from ``gather_rows``.
        batch: B.
        keys: at most the table's width times block_size.
    """
    planes, _, heads, block_size, width = cache.shape
    flat = cache.view(-1, block_size, width).index_select(0, rows)
    return flat.view(planes, batch, heads, -1, width)[:, :, :, :keys].unbind()
