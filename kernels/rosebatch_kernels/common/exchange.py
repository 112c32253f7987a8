"""What a sum over the GPUs that hold a model needs, see ``rosebatch_kernels.common.rank_sum``.

Apart from the kernel, because runs on a CPU import no Triton.
"""

from typing import NamedTuple

from torch import Tensor


class Exchange(NamedTuple):
    """What a sum over ranks needs.

    Attributes:
        buffers: memory of each rank, ``[elements]`` in the dtype of the parts. Those of the rows, to sum in one shot;
            in two shots, of as many programs as are a multiple of the ranks.
        signals: of each rank, ``[programs · ranks]`` int32; all are 0 before a launch and after it.
        rank: of this process.
        sums: memory of each rank for the rows, like ``buffers``, to sum in two shots.
    """

    buffers: tuple[Tensor, ...]
    signals: tuple[Tensor, ...]
    rank: int
    sums: tuple[Tensor, ...] | None = None
