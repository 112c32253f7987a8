"""What a sum over the GPUs that hold a model needs, see ``rosebatch_kernels.common.rank_sum``.

Apart from the kernel, because runs on a CPU import no Triton.
"""

from typing import NamedTuple

from torch import Tensor

# Numbers of a program that sums several short rows.
TILE = 1024


class AllReduce(NamedTuple):
    """What a sum over ranks needs.

    Attributes:
        buffers: memory of each rank, in the dtype of the parts: ``[rows · size]`` to sum in one shot, ``[places]`` in
            two.
        signals: of each rank, ``[programs · ranks]`` int32; all are 0 before a launch and after it.
        rank: of this process.
        sums: memory of each rank for the sums, ``[rows · size]``; None to sum in one shot.
    """

    buffers: tuple[Tensor, ...]
    signals: tuple[Tensor, ...]
    rank: int
    sums: tuple[Tensor, ...] | None = None

    @staticmethod
    def places(rows: int, size: int, ranks: int) -> int:
        """Numbers of a rank's buffer for a sum of so many rows in two shots.

        An owner keeps each rank's part in the place of another program. So the last programs need room after the rows.
        """
        return rows * size + ranks * max(size, TILE)
