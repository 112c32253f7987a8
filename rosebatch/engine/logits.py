"""Logits of some sequences as the tokens so far and the grammars leave them, where the host knows all tokens."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from rosebatch.engine.marks import bias_cells, mark_cells
from rosebatch.ops import Ops
from rosebatch.request import Constraint, Sequence


def adjust(logits: Tensor, sequences: Seq[Sequence], ops: Ops) -> Tensor:
    """Biases, penalties and least lengths applied to logits ``[S, V]``; the same tensor if no sequence has any."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.adjusts]
    if not rows:
        return logits
    vocab, device = logits.shape[1], logits.device
    marks = torch.zeros(len(rows), vocab, dtype=torch.int32)
    bias = torch.zeros(len(rows), vocab, dtype=torch.float32)
    chosen = [sequences[row] for row in rows]
    for place, sequence in enumerate(chosen):
        for table, (ids, values) in ((marks, mark_cells(sequence, vocab)), (bias, bias_cells(sequence))):
            table[place].index_add_(0, torch.from_numpy(ids), torch.from_numpy(values))

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    changed = ops.adjust(
        logits[rows],
        marks.to(device),
        bias.to(device),
        None,
        presence=column([s.sampling.presence_penalty for s in chosen], torch.float32),
        frequency=column([s.sampling.frequency_penalty for s in chosen], torch.float32),
        repetition=column([s.sampling.repetition_penalty for s in chosen], torch.float32),
        positions=column([len(s.token_ids) for s in chosen], torch.int32),
        min_positions=column([s.num_prompt_tokens + s.sampling.min_tokens for s in chosen], torch.int32),
    )
    out = logits.float() if logits.dtype != torch.float32 else logits.clone()
    out[rows] = changed
    return out


def constraint_masks(constraints: Seq[Constraint], vocab_size: int) -> np.ndarray:
    """``[R, ceil(V / 32)]`` int32 for R constraints, see ``rosebatch_kernels.logits.reference.mask_``."""
    masks = np.zeros((len(constraints), -(-vocab_size // 32)), np.int32)
    type(constraints[0]).fill_all(constraints, masks)
    return masks


def constrain(logits: Tensor, sequences: Seq[Sequence], ops: Ops) -> Tensor:
    """Tokens that a sequence's grammar bars taken out of its logits ``[S, V]``; the same tensor if none has one."""
    guided = [(row, s.constraint) for row, s in enumerate(sequences) if s.constraint is not None]
    if not guided:
        return logits
    masks = constraint_masks([constraint for _, constraint in guided], logits.shape[1])
    out = logits.clone()
    rows = torch.tensor([row for row, _ in guided], device=logits.device)
    ops.mask_(out, torch.from_numpy(masks).to(logits.device), rows)
    return out
