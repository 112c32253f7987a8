"""A folder's answers beside those of a model of transformers: greedy tokens, and their log-probabilities."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from tests.helpers.reference import MARGIN
from tests.helpers.running import run
from tests.helpers.tiny_engines import engine_of

# Prompts: one token, within a block, and past blocks and windows.
_LENGTHS = (1, 5, 20, 41)
_NEW_TOKENS = 6


def assert_same(
    model: Any, folder: Path, *, scale: float = 1.0, lengths: Sequence[int] = _LENGTHS, **options: Any
) -> None:
    """Check that a folder answers as a model does: each token is the likeliest, with its log-probability to 1e-4.

    Args:
        model: of transformers, in fp32.
        folder: whose answers are tried, in chunks with few seats.
        scale: on the model's logits.
        lengths: of prompts.
        options: of ``engine_of``.
    """
    numbers = random.Random(0)
    prompts = [tuple(numbers.randrange(3, 200) for _ in range(length)) for length in (*lengths, *lengths)]
    engine = engine_of(folder, max_num_seqs=3, max_num_batched_tokens=16, block_size=4, **options)
    sampling = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True, logprobs=0)
    done = run(engine, [Request(i, prompt, sampling) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        tokens = [*prompt, *done[i].token_ids]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens))).logits[0]
        expected = (scale * logits[len(prompt) - 1 : -1].float()).log_softmax(-1)
        assert len(expected) == _NEW_TOKENS
        for row, found in zip(expected, done[i].logprobs, strict=True):
            assert row.max() - row[found.token_id] <= MARGIN
            assert abs(float(row[found.token_id]) - found.logprob) < 1e-4
