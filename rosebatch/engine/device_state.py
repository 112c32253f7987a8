"""The state of all running sequences on the device: a decode step reads it and advances it, the host changes little."""

import numpy as np
import torch
from torch import Tensor

from rosebatch.engine.slots import StateWrite
from rosebatch.engine.staging import Staging
from rosebatch_kernels.feedback import layout


class DeviceState:
    """``fields [NUM_FIELDS, num_slots]`` int32 (see ``rosebatch_kernels.feedback.layout``) and the block table.

    Args:
        num_slots: most sequences at a time.
        width: most blocks of a sequence.
        window: steps whose tokens are kept until they are fetched.
    """

    def __init__(self, num_slots: int, width: int, window: int, device: torch.device) -> None:
        cells = (layout.NUM_FIELDS + width) * num_slots
        self._cells = torch.zeros(cells, dtype=torch.int32, device=device)
        self.fields = self._cells[: layout.NUM_FIELDS * num_slots].view(layout.NUM_FIELDS, num_slots)
        self.block_table = self._cells[layout.NUM_FIELDS * num_slots :].view(num_slots, width)
        self.history = torch.full((window, num_slots), -1, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)

    def apply(self, write: StateWrite, staging: Staging, *, batched: bool = True) -> None:
        """Carry out the host's changes, behind the work that was launched before.

        ``batched=False`` writes row by row: what one write for all is measured against.
        """
        if write.moves:
            sources, targets = staging.send(*np.array(write.moves, np.int32).T)
            self.fields.index_copy_(1, targets.long(), self.fields.index_select(1, sources))
            self.block_table.index_copy_(0, targets.long(), self.block_table.index_select(0, sources))
        if not write.cells:
            return
        indices = np.fromiter(write.cells.keys(), np.int32, len(write.cells))
        values = np.fromiter(write.cells.values(), np.int32, len(write.cells))
        for part in [slice(None)] if batched else [slice(i, i + 1) for i in range(len(indices))]:
            where, what = staging.send(indices[part], values[part])
            self._cells.index_copy_(0, where.long(), what)

    def sampling(self, columns: Tensor | slice) -> dict[str, Tensor]:
        """The parameters of ``rosebatch_kernels.sampling`` for these columns."""
        fields = self.fields[:, columns]
        real = fields.view(torch.float32)
        return {
            "temperature": real[layout.TEMPERATURE],
            "top_k": fields[layout.TOP_K],
            "top_p": real[layout.TOP_P],
            "min_p": real[layout.MIN_P],
            "seeds": fields[layout.SEED_LOW : layout.SEED_HIGH + 1].t(),
            "positions": fields[layout.NEXT],
        }
