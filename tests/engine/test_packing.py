"""Packed inputs: every token once, with its row and position; padding that no kernel acts on."""

import torch

from rosebatch.engine.packing import MOST_PADDED_TOKENS, PackedInputs, last_rows, pack, padded_size
from rosebatch.engine.plan import Chunk, StepPlan
from rosebatch.engine.slots import Slots
from rosebatch.request import Request, SamplingParams, Sequence


def sequence(index, length):
    tokens = tuple(100 * (index + 1) + i for i in range(length))
    request = Request(index=index, prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=4))
    return Sequence.start(request, max_model_len=64, eos_token_ids=frozenset())


def test_padded_sizes_are_few_and_near():
    sizes = [padded_size(n) for n in range(1, MOST_PADDED_TOKENS + 1)]
    assert all(n <= size <= max(n + 15, n * 1.125) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 64
    assert padded_size(MOST_PADDED_TOKENS + 1) == MOST_PADDED_TOKENS + 1


def test_tokens_tiles_and_padding():
    a, b = sequence(0, 9), sequence(1, 7)
    chunks = (Chunk(a, 4, 5, samples=True), Chunk(b, 0, 3, samples=False))
    plan, slots = StepPlan(chunks), Slots(3, 8)
    slots.slot_of = {a: 2, b: 0}
    cells = torch.from_numpy(pack(plan, slots, 12, 6, tile_rows=2))
    inputs = PackedInputs.of(cells, 12)
    assert inputs.input_ids.tolist() == [104, 105, 106, 107, 108, 200, 201, 202, 0, 0, 0, 0]
    assert inputs.rows.tolist() == [2] * 5 + [0] * 3 + [-1] * 4
    assert inputs.positions.tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 0, 0, 0, 0]
    # Of the longest context first; slot, first row, its position, rows.
    assert inputs.tiles.tolist() == [[2, 4, 8, 1], [2, 2, 6, 2], [2, 0, 4, 2], [0, 7, 2, 1], [0, 5, 0, 2], [0] * 4]
    rows, columns = last_rows(plan, slots)
    assert rows.tolist() == [4]
    assert columns.tolist() == [2]


def test_no_chunk_samples():
    a = sequence(0, 9)
    slots = Slots(1, 8)
    slots.slot_of = {a: 0}
    rows, columns = last_rows(StepPlan((Chunk(a, 0, 5, samples=False),)), slots)
    assert len(rows) == len(columns) == 0
