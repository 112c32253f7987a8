"""On a GPU with ``--batch-invariant``: drafts, and tokens that a grammar forces, change no bit of an answer."""

import random
from functools import partial

import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.ops.device import keep_products_whole
from tests.engine.test_triton_drafts import Varying, draft_answers
from tests.engine.test_triton_forced import Fields

pytestmark = pytest.mark.gpu

FAMILIES = ["GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "gemma2"]
DTYPES = [torch.float16, torch.bfloat16]
VOCAB = 199


@pytest.fixture(scope="module", autouse=True)
def whole_products():
    """In this process: ``load_engine`` does so before the first product of a run."""
    keep_products_whole()


def requests():
    """Prompts of 8 to 190 tokens that repeat themselves; greedy, sampled, several of one prompt."""
    numbers, kinds = random.Random(3), [{}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.8, "n": 2}]
    made = []
    for index in range(48):
        own = [numbers.randrange(VOCAB) for _ in range(2 + 2 * index)]
        limits = {"max_tokens": 60 - index % 7, "seed": index, "ignore_eos": index % 5 > 0}
        made.append(Request(index, tuple(own * 2)[:190], SamplingParams(**limits, **kinds[index % 3])))
    return made


def run(engine, constraint=None):
    """Request id and sample -> tokens and finish reason."""
    for request in requests():
        engine.add(request, constraint=constraint if request.id % 4 else None)
    done = {}
    while engine.has_unfinished:
        for each in engine.step():
            done[each.request.id, each.sample] = each.token_ids, each.finish_reason
        engine.scheduler.check_integrity()
    return done


def engine_for(make_engine, family, dtype, seqs=256, **switches):
    engine = make_engine(family, dtype, {"batch_invariant": True, **switches}, seqs=seqs)
    engine.drafter, engine.scheduler.planner.forces = None, 0
    return engine


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_and_wrong_drafts(family, dtype, make_engine):
    """Each draft's row attends with the others of its sequence: its bits decide the tokens after it."""
    expected = run(engine_for(make_engine, family, dtype, seqs=8))
    engine = engine_for(make_engine, family, dtype, cuda_graph=False)
    engine.drafter = Varying(2, 4)
    draft_answers(engine, expected)
    assert run(engine) == expected
    assert 0.3 < engine.stats.accepted / engine.stats.drafted < 0.9


@pytest.mark.parametrize("family", ["Llama calm", "Qwen3 calm"])
def test_drafts_in_graphs(family, make_engine):
    """What a replayed step finds is in the tokens as they are then. Models with small weights repeat themselves."""
    expected = run(engine_for(make_engine, family, torch.bfloat16, seqs=8))
    engine = engine_for(make_engine, family, torch.bfloat16)
    engine.drafter = Varying(4)
    assert run(engine) == expected
    assert engine.stats.graph_replays > 0 and engine.stats.drafted > 100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_forced_tokens(family, dtype, make_engine):
    """Several known tokens of a row are computed in one step, beside rows without a grammar."""
    constraint = partial(Fields, VOCAB)
    expected = run(engine_for(make_engine, family, dtype, seqs=8), constraint)
    engine = engine_for(make_engine, family, dtype)
    engine.scheduler.planner.forces, engine.scheduler.planner.forces_up_to = VOCAB, 64
    assert run(engine, constraint) == expected
    assert engine.stats.forced > 300
