"""Logits that are not finite, in graphs of decode windows: the sequence fails, and nobody else's tokens change."""

import random

import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

BROKEN = 7


def requests():
    """A fifth have the broken token; blocks are given back and reused while others run."""
    numbers = random.Random(0)
    made = []
    for index in range(150):
        prompt = [numbers.randrange(8, 211) for _ in range(numbers.randint(20, 120))]
        if index % 5 == 2:
            prompt[numbers.randrange(len(prompt))] = BROKEN
        sampling = SamplingParams(
            max_tokens=24 + index % 9,
            ignore_eos=True,
            temperature=index % 3 * 0.5,
            top_p=0.95,
            seed=index,
            # Nobody generates it.
            logit_bias=((BROKEN, -100.0),),
        )
        made.append(Request(index, tuple(prompt), sampling))
    return made


@pytest.mark.parametrize("switches", [{}, {"fused_sampler": False}], ids=str)
@pytest.mark.parametrize("family", ["Llama", "HP1"])
def test_only_the_sequence_itself_fails(family, switches, make_engine):
    def run():
        engine = make_engine(family, torch.float32, {"prefix_cache": False, **switches}, seqs=32)
        with torch.inference_mode():
            engine.runner.model.embedding[BROKEN] = value
        return {completion.request.id: completion for completion in engine.run(requests())}

    value = 0.1
    whole = run()
    value = float("nan")
    found = run()
    assert {i for i, completion in found.items() if completion.error is not None} == set(range(2, 150, 5))
    good = [i for i in range(150) if i % 5 != 2]
    assert [found[i].token_ids for i in good] == [whole[i].token_ids for i in good]
