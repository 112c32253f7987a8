"""Drafts and forced tokens change no answer: tokens, log-probabilities and reasons are those of one step a token."""

from functools import partial

import pytest
import torch
from msgspec.structs import replace

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from tests.engine.constraint import EveryThird

DTYPES = ["float32", *(["bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]
# One group of layers, windows, experts, and states, which take no drafts.
CASES = [("llama", DTYPES[0]), ("qwen3", DTYPES[-1]), ("gpt2", DTYPES[0]), ("gemma3", DTYPES[0])]
NEW_TOKENS = 40
KINDS = [
    {},
    {"temperature": 0.3, "seed": 1},
    {"logprobs": 3, "temperature": 0.2, "top_p": 0.9, "seed": 2},
    {"n": 2, "temperature": 0.1, "seed": 3},
    {"presence_penalty": 0.2, "logprobs": 0},
    {"min_tokens": 12, "ignore_eos": False, "stop_token_ids": (3, 5, 8, 13, 21, 34)},
    {"repetition_penalty": 0.7, "temperature": 0.2, "seed": 4},
]


class AheadOnce(EveryThird):
    """Tells what is ahead of a place once: near its limit of states, a grammar may not know it again."""

    told = -1

    def ahead(self, token_ids):
        known, self.told = self.told == len(self.tokens), len(self.tokens)
        return [] if known else super().ahead(token_ids)


def requests_of(prompts):
    """All kinds in turns. Prompts repeat themselves, as do the answers of small models."""
    return [
        Request(
            number,
            (*prompt[:9], *prompt[:9]),
            SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True} | KINDS[number % len(KINDS)]),
        )
        for number, prompt in enumerate(prompts)
    ]


def results(engine, requests):
    """Request and sample -> all of its completion. Every fourth request has a grammar."""
    done = {}
    for request in requests:
        guided = request.id % 4 == 0 and request.sampling.logprobs is None
        engine.add(request, constraint=partial(AheadOnce, engine.vocab_size) if guided else None)
    while engine.has_unfinished:
        for each in engine.step():
            done[each.request.id, each.sample] = each.token_ids, each.finish_reason, list(each.logprobs), each.error
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0
    return done


@pytest.mark.thorough
@pytest.mark.parametrize("limits", [{}, {"chunk": 24, "block_size": 4, "blocks": 60}], ids=["plenty", "cramped"])
@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_answers_with_drafts_are_those_without(model, dtype, limits, goldens, make_engine):
    """Right drafts, wrong ones, those behind an end, in blocks that are given back, and beside other rows' prompts."""
    requests = requests_of(goldens(model).prompts[:28])
    plain = make_engine(goldens(model).folder, dtype, seqs=1)
    plain.drafter = None
    expected = results(plain, requests)
    engine = make_engine(goldens(model).folder, dtype, **limits)
    engine.drafter.free_tokens = 10**6
    assert results(engine, requests) == expected
    stats = engine.stats
    assert 0 < stats.accepted < stats.drafted and (stats.preemptions > 0) is bool(limits)
    assert plain.stats.drafted == 0 and stats.output_tokens >= plain.stats.output_tokens


def test_predictions_change_no_answer(goldens, make_engine):
    """Right ones, wrong ones, and tokens that the model does not have: as many steps are left out as are right."""
    golden = goldens("llama")
    requests = requests_of(golden.prompts[:14])
    plain = make_engine(golden.folder, "float32")
    plain.drafter = None
    expected = results(plain, requests)
    predicted = [
        replace(each, predicted=TokenIds.of(expected[each.id, 0][0][: 40 if each.id % 3 else 5])) for each in requests
    ]
    predicted[0] = replace(predicted[0], predicted=[1 << 31])
    engine = make_engine(golden.folder, "float32")
    engine.drafter.free_tokens = 10**6
    assert results(engine, predicted) == expected
    assert engine.stats.accepted > 100
