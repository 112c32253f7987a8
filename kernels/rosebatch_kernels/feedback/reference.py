"""PyTorch reference of the token feedback."""

import torch
from torch import Tensor

from rosebatch_kernels.common.tokens import NO_TOKEN, NOT_FINITE
from rosebatch_kernels.feedback.layout import LIMIT, NEXT, POSITION, STOPS, TOKEN


def advance(
    tokens: Tensor, fields: Tensor, slots: Tensor | None, history: Tensor, step: Tensor | None, end_tokens: Tensor
) -> None:
    """Take over the sampled tokens, advance the positions, stop sequences at the model's end tokens.

    ``NOT_FINITE`` stops a sequence too; it goes to the history alone.

    Args:
        tokens: ``[S]`` integers, the sampled token of each row.
        fields: ``[NUM_FIELDS, N]`` int32, see ``layout``; written in place.
        slots: ``[S]`` integers, each row's column of ``fields``; None: row i is column i.
        history: ``[W, N]`` int32; row ``step % W`` gets each column's token, or ``NO_TOKEN`` if the sequence was not
            decoded. Without ``step``, row 0 gets the token of row i at i.
        step: one int32 on the device, incremented; or None.
        end_tokens: ``[E]`` int32.
    """
    columns = torch.arange(len(tokens), device=tokens.device) if slots is None else slots.long()
    tokens = tokens.int()
    live = fields[POSITION, columns] < fields[LIMIT, columns]
    row, places = (0, torch.arange(len(tokens))) if step is None else (int(step) % len(history), columns)
    history[row, places] = torch.where(live, tokens, NO_TOKEN)
    failed = tokens == NOT_FINITE
    ended = failed | (tokens[:, None] == end_tokens).any(1) & (fields[STOPS, columns] != 0)
    columns, tokens, ended = columns[live], tokens[live], ended[live]
    fields[TOKEN, columns] = tokens.clamp_min(0)
    fields[POSITION, columns] += 1
    fields[NEXT, columns] += 1
    fields[LIMIT, columns] = torch.where(ended, 0, fields[LIMIT, columns])
    if step is not None:
        step += 1
