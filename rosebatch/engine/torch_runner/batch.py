"""StepPlan -> the tensors of one step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.engine.plan import Chunk, StepPlan
from rosebatch.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step, sequences packed one behind the other without padding.

    Attributes:
        input_ids, positions: ``[T]`` int64.
        slots: ``[T]`` int64, where each token's K and V go: ``block · block_size + offset``.
        block_table: ``[B, M]`` int64 block ids, rows padded with 0.
        chunks: the plan's, one for each of the B sequences.
        sample_rows: ``[S]`` int64, the rows of T that are sampled.
        sampling: parameters of the sampled rows.
        sample_positions: position that each sampled token will have.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    chunks: tuple[Chunk, ...]
    sample_rows: Tensor
    sampling: list[SamplingParams]
    sample_positions: list[int]


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> StepBatch:
    """Lay out a plan for the device: one small copy for each tensor."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_rows: list[int] = []
    sampling: list[SamplingParams] = []
    sample_positions: list[int] = []
    width = max(len(chunk.sequence.block_ids) for chunk in plan.chunks)
    table = []
    for chunk in plan.chunks:
        sequence, end = chunk.sequence, chunk.start + chunk.length
        blocks = sequence.block_ids
        input_ids += sequence.token_ids[chunk.start : end]
        positions += range(chunk.start, end)
        slots += [blocks[i // block_size] * block_size + i % block_size for i in range(chunk.start, end)]
        table.append(blocks + [0] * (width - len(blocks)))
        if chunk.samples:
            sample_rows.append(len(input_ids) - 1)
            sampling.append(sequence.request.sampling)
            sample_positions.append(end)

    def tensor(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    return StepBatch(
        input_ids=tensor(input_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        block_table=tensor(table),
        chunks=plan.chunks,
        sample_rows=tensor(sample_rows),
        sampling=sampling,
        sample_positions=sample_positions,
    )
