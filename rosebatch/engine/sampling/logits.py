"""Penalties, biases and grammars on logits, where all tokens so far are on the host."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosebatch.engine.plan import SequenceSpec
from rosebatch.engine.sampling.token_counts import bias_cells, count_cells
from rosebatch.ops.ops import Ops


class SampledRow(NamedTuple):
    """A sequence that gets a token: its spec, the token's position, and the tokens generated before.

    ``output`` is empty unless the sequence's sampling ``adjusts`` logits.
    """

    spec: SequenceSpec
    position: int
    output: tuple[int, ...] = ()


def adjust(logits: Tensor, rows: Sequence[SampledRow], ops: Ops) -> Tensor:
    """Apply biases, penalties and minimum lengths to logits ``[S, V]``; the same tensor if no row has any."""
    numbers = [number for number, row in enumerate(rows) if row.spec.sampling.adjusts]
    if not numbers:
        return logits
    vocab, device = logits.shape[1], logits.device
    counts = torch.zeros(len(numbers), vocab, dtype=torch.int32)
    bias = torch.zeros(len(numbers), vocab, dtype=torch.float32)
    chosen = [rows[number] for number in numbers]
    for place, row in enumerate(chosen):
        for table, (ids, values) in (
            (counts, count_cells(row.spec, row.output, vocab)),
            (bias, bias_cells(row.spec)),
        ):
            table[place].index_add_(0, torch.from_numpy(ids), torch.from_numpy(values))

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    params = [row.spec.sampling for row in chosen]
    changed = ops.adjust(
        logits[numbers],
        counts.to(device),
        bias.to(device),
        None,
        presence=column([p.presence_penalty for p in params], torch.float32),
        frequency=column([p.frequency_penalty for p in params], torch.float32),
        repetition=column([p.repetition_penalty for p in params], torch.float32),
        positions=column([row.position for row in chosen], torch.int32),
        min_positions=column(
            [len(row.spec.prompt_token_ids) + row.spec.sampling.min_tokens for row in chosen], torch.int32
        ),
    )
    out = logits.float() if logits.dtype != torch.float32 else logits.clone()
    out[numbers] = changed
    return out


def constrain(logits: Tensor, guided: Sequence[int], masks: np.ndarray, ops: Ops) -> Tensor:
    """Set the logits that a grammar does not allow to -inf; a new tensor ``[S, V]``.

    Args:
        logits: ``[S, V]``.
        guided: the R rows that have a grammar.
        masks: ``[R, ceil(V / 32)]`` int32, see ``rosebatch_kernels.logits.reference.mask_``.
        ops: the operators of this run.
    """
    out = logits.clone()
    rows = torch.tensor(guided, device=logits.device)
    ops.mask_(out, torch.from_numpy(masks).to(logits.device), rows)
    return out
