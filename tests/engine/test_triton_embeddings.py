"""Embeddings through the Triton runner on its interpreter: the vectors of the PyTorch runner's hidden states."""

from itertools import cycle

import numpy as np
import pytest

from rosebatch.core.pooling_params import ModelPooling, PoolingParams
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.model.contract import PoolingHeads
from tests.engine.family_models import FAMILIES
from tests.engine.small_models import MODELS, SLOTS, VOCAB, device_engine, plain_engine
from tests.helpers import running
from tests.helpers.marks import ON_TRITON_RUNNER

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER]
ENGINES = pytest.mark.parametrize("make", [plain_engine, device_engine], ids=["plain", "device"])
LAST, MEAN = PoolingParams(pooling="last"), PoolingParams(pooling="mean")
# Longer than a step, with a common prefix, cached to the very end, and more of them than slots.
PLACES = [range(14), range(9), range(8), range(8), range(3, 5), range(13)]


def run(engine, requests):
    done = running.run(engine, requests)
    assert not engine.runner.pooling._folded, "no sum is left of a prompt that has finished"
    return done


def prompt_of(places):
    return tuple((7 * j * j + 3 * j + 1) % VOCAB for j in places)


def embeddings(engine, pooling, places=PLACES):
    params = PoolingParams(pooling=pooling)
    done = run(engine, [Request(i, prompt_of(each), pooling=params) for i, each in enumerate(places)])
    return np.array([done[i].pooled for i in range(len(places))])


@pytest.mark.parametrize(("name", "pooling"), list(zip([*MODELS, *FAMILIES], cycle(["last", "mean", "max"]))))
def test_kernels_give_the_plain_vectors(name, pooling):
    """A row of padding, or of another chunk, in place of a prompt's own would be another vector."""
    found, expected = embeddings(device_engine(name), pooling), embeddings(plain_engine(name), pooling)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.whole
@ENGINES
def test_steps_that_sample_and_pool(make):
    """Rows that are sampled and rows that are pooled come from one forward pass: either could take the other's."""
    kinds = {"sampling": SamplingParams(max_tokens=5, ignore_eos=True)}, {"pooling": LAST}, {"pooling": MEAN}
    requests = [Request(i, prompt_of(range(i, i + 4)), **kinds[i % 3]) for i in range(6)]
    engine = make("llama")
    mixed = run(engine, requests)
    alone = {request.id: run(make("llama"), [request])[request.id] for request in requests}
    assert engine.stats.max_running == SLOTS
    for i, one in alone.items():
        assert mixed[i].token_ids == one.token_ids
        assert (mixed[i].pooled is None) == (one.pooled is None) == (i % 3 == 0)
        if one.pooled is not None:
            np.testing.assert_allclose(mixed[i].pooled, one.pooled, rtol=0, atol=2e-5)


@pytest.mark.parametrize("make", [plain_engine, pytest.param(device_engine, marks=pytest.mark.thorough)])
def test_a_preempted_mean_starts_over(make):
    """A sum that outlived the blocks of its prompt would count tokens twice."""
    places = [range(4), range(2, 22), range(5, 22)]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    pooled = [Request(i, prompt_of(places[i]), pooling=MEAN) for i in (1, 2)]
    requests = [Request(0, prompt_of(places[0]), sampling), *pooled]
    done = run(make("gpt2", blocks=9), requests)
    roomy = run(make("gpt2"), requests)
    for i in (1, 2):
        np.testing.assert_allclose(done[i].pooled, roomy[i].pooled, rtol=0, atol=2e-5)
    assert done[0].token_ids == roomy[0].token_ids


@pytest.mark.parametrize("step", [None, prompt_of([3])[0]])
def test_numbers_of_tokens(step):
    """Rows of padding or of other chunks, also where a part of a prompt comes from the prefix cache."""
    classifier = PoolingParams(task="classify", pooling="all", labels=("a", "b"), activation="none", step_token=step)
    found = []
    for engine in (plain_engine("llama"), device_engine("llama")):
        engine.runner.pooling.heads = PoolingHeads(classify=lambda states: states[:, :2])
        engine.pooling = ModelPooling(classifier=classifier)
        requests = [Request(i, prompt_of(each), pooling=classifier) for i, each in enumerate(PLACES)]
        for _ in range(2):
            done = run(engine, requests)
            found.append(np.concatenate([done[i].pooled for i in range(len(PLACES))]))
        assert not engine.runner.pooling._numbers
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=2e-5)
    counted = [prompt_of(each).count(step) if step is not None else len(each) for each in PLACES]
    assert len(found[0]) == 2 * sum(counted)
