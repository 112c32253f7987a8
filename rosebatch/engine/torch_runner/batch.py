"""A packed step as the tensors that the forward pass reads."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.images import PromptImage
from rosebatch.engine.images import section_positions
from rosebatch.engine.plan import Chunk, PackedStep, RestartPolicy, SequenceSpec
from rosebatch.engine.sampling.logits import SampledRow


class BlockTables:
    """The specs and block tables of all sequences in the runner, kept up to date by plans.

    Attributes:
        specs: by sequence id.
        blocks: block ids in sequence order, for each group of layers, by sequence id.
    """

    def __init__(self, num_groups: int = 1) -> None:
        self.num_groups = num_groups
        self.specs: dict[int, SequenceSpec] = {}
        self.blocks: dict[int, list[list[int]]] = {}

    def update(self, plan: PackedStep) -> None:
        """Apply the changes of a plan."""
        if plan.reset:
            self.specs.clear()
            self.blocks.clear()
        for sequence_id in plan.released:
            del self.specs[sequence_id], self.blocks[sequence_id]
        for spec in plan.started:
            self.specs[spec.id], self.blocks[spec.id] = spec, [[] for _ in range(self.num_groups)]
        for chunk in plan.chunks:
            tables = self.blocks[chunk.id]
            for group, first, blocks in chunk.blocks:
                tables[group][first : first + len(blocks)] = blocks


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step, sequences packed one after the other without padding.

    Attributes:
        input_ids, positions: ``[T]`` int64.
        rotary_rows: ``[T]`` int64, each token's row of the rotary tables; ``[T, 3]`` of a step with images, where
            these have positions of their own.
        slots: for each group of layers, ``[T]`` int64, where each token's K and V go: ``block · block_size + offset``.
        block_tables: for each group of layers, ``[B, M]`` int64 block ids, rows padded with their own last block:
            masked keys are read, and another sequence's may be NaN.
        chunks: the plan's, one for each of the B sequences.
        num_prompt_tokens: prompt lengths of the B sequences.
        both_ways: the images of the B sequences whose tokens see each other.
        last_rows: ``[S]`` int64, the rows of T that are sampled, then the first or last rows of the chunks that pool;
            one row if there is none of either.
        sampled: the sequences of the rows that are sampled, several rows of one that verifies drafts.
    """

    input_ids: Tensor
    positions: Tensor
    rotary_rows: Tensor
    slots: list[Tensor]
    block_tables: list[Tensor]
    chunks: tuple[Chunk, ...]
    num_prompt_tokens: list[int]
    both_ways: list[tuple[PromptImage, ...]]
    last_rows: Tensor
    sampled: list[SampledRow]


def build_batch(
    chunks: tuple[Chunk, ...],
    specs: Mapping[int, SequenceSpec],
    blocks: Mapping[int, list[list[int]]],
    block_size: int,
    device: torch.device,
    restarts: RestartPolicy | None = None,
    *,
    axes: int = 0,
    both_ways: bool = False,
) -> StepBatch:
    """Lay out a step for the device: one small copy for each tensor.

    Args:
        chunks: of the step.
        specs, blocks: of all sequences, see ``BlockTables``.
        block_size: tokens of a block.
        device: of the run.
        restarts: finds the rotary rows of tokens; None if they are the positions.
        axes: rotary positions of a token of images; 0 if they have none of their own.
        both_ways: whether an image's tokens see each other.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    num_groups = len(blocks[chunks[0].id])
    slots: list[list[int]] = [[] for _ in range(num_groups)]
    sample_rows: list[int] = []
    sampled: list[SampledRow] = []
    pool_rows: list[int] = []
    width = max(len(own[0]) if own else 0 for own in (blocks[chunk.id] for chunk in chunks))
    tables: list[list[list[int]]] = [[] for _ in range(num_groups)]
    for chunk in chunks:
        input_ids += chunk.token_ids
        positions += range(chunk.start, chunk.end)
        for group, own in enumerate(blocks[chunk.id]):
            slots[group] += [own[i // block_size] * block_size + i % block_size for i in range(chunk.start, chunk.end)]
            tables[group].append(own + own[-1:] * (width - len(own)))
        for count in range(chunk.sampled):
            # The last known token, and then each draft.
            later = chunk.sampled - 1 - count
            sample_rows.append(len(input_ids) - 1 - later)
            output = (*chunk.output_token_ids, *chunk.drafts[:count]) if specs[chunk.id].sampling.adjusts else ()
            sampled.append(SampledRow(specs[chunk.id], chunk.end - later, output))
        if chunk.pools:
            at_first = specs[chunk.id].pooling == "cls"
            pool_rows.append(len(input_ids) - (len(chunk.token_ids) if at_first else 1))

    def tensor(values: list[int] | list[list[int]] | np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    of_tokens = rotary_rows = tensor(positions)
    if restarts is not None:
        rotary_rows = tensor(np.concatenate([restarts.rotary_rows(chunk, specs[chunk.id]) for chunk in chunks]))
    if axes and any(specs[chunk.id].images for chunk in chunks):
        rotary_rows = tensor(
            np.concatenate(
                [section_positions(specs[chunk.id].images, chunk.start, chunk.end, axes) for chunk in chunks]
            )
        )
    return StepBatch(
        input_ids=tensor(input_ids),
        positions=of_tokens,
        rotary_rows=rotary_rows,
        slots=[tensor(each) for each in slots],
        block_tables=[tensor(table) for table in tables],
        chunks=chunks,
        num_prompt_tokens=[len(specs[chunk.id].prompt_token_ids) for chunk in chunks],
        both_ways=[specs[chunk.id].images if both_ways else () for chunk in chunks],
        last_rows=tensor(sample_rows + pool_rows or [0]),
        sampled=sampled,
    )
