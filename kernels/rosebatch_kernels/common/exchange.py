"""What a sum over the GPUs that hold a model needs, see ``rosebatch_kernels.common.rank_sum``.

Apart from the kernel, because runs on a CPU import no Triton.
"""

from typing import NamedTuple

from torch import Tensor


class Exchange(NamedTuple):
    """What a sum over ranks needs.

    Attributes:
        buffers: memory of each rank, ``[elements]`` in the dtype of the parts.
        signals: of each rank, ``[programs · ranks]`` int32; all are 0 before a launch and after it.
        rank: of this process.
    """

    buffers: tuple[Tensor, ...]
    signals: tuple[Tensor, ...]
    rank: int

    def fits(self, rows: int, size: int) -> bool:
        """Whether so many rows of this size have room, one program for each."""
        return rows * size <= self.buffers[0].numel() and rows * len(self.buffers) <= self.signals[0].numel()
