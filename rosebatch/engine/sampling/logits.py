"""Penalties, biases and grammars: how the tokens of a sequence change its next logits.

See ``rosebatch_kernels.logits``: token counts are an int32 for each token of the vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosebatch.engine.plan import SequenceSpec
from rosebatch.ops.ops import Ops
from rosebatch_kernels.logits.layout import ENDS, IN_PROMPT


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
        for table, (ids, values) in ((counts, count_cells(row.spec, row.output, vocab)), (bias, bias_cells(row.spec))):
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


def count_cells(spec: SequenceSpec, output: Sequence[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and what to add to their counts, both int32; an id may occur several times.

    Args:
        spec: the sequence's.
        output: the tokens generated so far.
        vocab_size: number of counts.
    """
    counts = Counter(output)
    prompt = set(spec.prompt_token_ids)
    ends = [token_id for token_id in spec.stop_ids if 0 <= token_id < vocab_size]
    ids = [*counts, *prompt, *ends]
    values = [*counts.values(), *[IN_PROMPT] * len(prompt), *[ENDS] * len(ends)]
    return np.array(ids, np.int32), np.array(values, np.int32)


def bias_cells(spec: SequenceSpec) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32, and what to add to their logits, fp32."""
    ids = [token_id for token_id, _ in spec.sampling.logit_bias]
    values = [value for _, value in spec.sampling.logit_bias]
    return np.array(ids, np.int32), np.array(values, np.float32)
