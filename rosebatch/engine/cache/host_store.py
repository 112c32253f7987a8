"""Blocks of a KV cache in the host's memory: those of preempted sequences, until they resume."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch.engine.plan import HostCopy
from rosebatch.engine.staging import Staging

# Bytes of the two buffers on the device together.
BUFFER_BYTES = 128 << 20


class HostStore:
    """Copies blocks to the host and back, on a GPU beside its other work.

    A stream of its own moves them between pinned memory and a buffer on the device. The cache is read and written in
    the order of the plans. The host waits for nothing. A block of the host is allocated at its first use.

    Args:
        tensors: of the cache's only group, ``[layers, number, blocks, heads, block_size, width]`` each.
        device: theirs.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        # Blocks first: each is one piece on the host.
        self._tensors = [data.movedim(2, 0) for data in tensors]
        self._held: dict[int, list[Tensor]] = {}
        self._beside = _Beside(self._tensors, device) if device.type == "cuda" else None

    def save(self, copies: Sequence[HostCopy], staging: Staging) -> None:
        """Copy blocks to the host as they are at this place in the order of the plans."""
        held = [self._on_host(kept) for _, kept in copies]
        if self._beside is not None:
            self._beside.save([block for block, _ in copies], held, staging)
            return
        for (block, _), own in zip(copies, held, strict=True):
            for data, there in zip(self._tensors, own, strict=True):
                there.copy_(data[block])

    def restore(self, copies: Sequence[HostCopy], staging: Staging) -> None:
        """Copy blocks back, before anything that is launched later."""
        held = [self._on_host(kept) for _, kept in copies]
        if self._beside is not None:
            self._beside.restore([block for block, _ in copies], held, staging)
            return
        for (block, _), own in zip(copies, held, strict=True):
            for data, there in zip(self._tensors, own, strict=True):
                data[block].copy_(there)

    def _on_host(self, kept: int) -> list[Tensor]:
        if kept not in self._held:
            pinned = self._beside is not None
            self._held[kept] = [torch.empty(d.shape[1:], dtype=d.dtype, pin_memory=pinned) for d in self._tensors]
        return self._held[kept]


class _Beside:
    """The second stream, and its buffers: one for each direction, with an event that its last reader is done."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._stream = torch.cuda.Stream(device)
        self._room = max(1, BUFFER_BYTES // 2 // sum(data[0].nbytes for data in tensors))
        self._up, self._down = list[Tensor](), list[Tensor]()
        self._up_read, self._down_read = torch.cuda.Event(), torch.cuda.Event()

    def save(self, blocks: Sequence[int], held: Sequence[Sequence[Tensor]], staging: Staging) -> None:
        self._down = self._down or self._buffers()
        for index, own in self._slices(blocks, held, staging):
            self._down_read.wait()
            for data, buffer in zip(self._tensors, self._down, strict=True):
                torch.index_select(data, 0, index, out=buffer[: len(index)])
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for number, each in enumerate(own):
                    for buffer, there in zip(self._down, each, strict=True):
                        there.copy_(buffer[number], non_blocking=True)
                self._down_read.record()

    def restore(self, blocks: Sequence[int], held: Sequence[Sequence[Tensor]], staging: Staging) -> None:
        if not self._up:
            self._up = self._buffers()
            # Work under way may have had their memory before.
            self._up_read.record()
        for index, own in self._slices(blocks, held, staging):
            with torch.cuda.stream(self._stream):
                self._up_read.wait()
                for number, each in enumerate(own):
                    for buffer, there in zip(self._up, each, strict=True):
                        buffer[number].copy_(there, non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._stream)
            for data, buffer in zip(self._tensors, self._up, strict=True):
                data.index_copy_(0, index, buffer[: len(index)])
            self._up_read.record()

    def _buffers(self) -> list[Tensor]:
        return [torch.empty(self._room, *d.shape[1:], dtype=d.dtype, device=d.device) for d in self._tensors]

    def _slices(
        self, blocks: Sequence[int], held: Sequence[Sequence[Tensor]], staging: Staging
    ) -> Iterator[tuple[Tensor, Sequence[Sequence[Tensor]]]]:
        (index,) = staging.send(np.array(blocks, np.int64))
        for first in range(0, len(blocks), self._room):
            part = slice(first, first + self._room)
            yield index[part], held[part]
