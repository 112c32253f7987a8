"""On a GPU in 16 bits greedy tokens differ from transformers' only in close calls, see ``tests.gpu.divergence``.

Two sets of logits decide: those of transformers' own run, and those that the engine computes for the common prefix
from the K and V in its cache. How many sequences may differ is measured with transformers in fp32.
"""

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from rosebatch.config.switches import Switches, hidden_by, is_on
from tests.gpu.divergence import assert_close_calls, first_divergences, logits_after, max_divergences
from tests.helpers.running import greedy

pytestmark = pytest.mark.gpu

FAMILIES = ["GPT2", "Llama", "Qwen3"]
DEFAULTS = {f.name: is_on(f, "cuda") for f in fields(Switches) if "cuda" in f.metadata["devices"]}
DTYPES = [torch.float16, torch.bfloat16]
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def prompts():
    """256 prompts around blocks and tiles of 64, and short ones; of few lengths, so transformers needs few batches."""
    numbers = random.Random(0)
    lengths = (1, 3, 17, 32, 47, 64, 65, 90)
    shared = [numbers.randrange(199) for _ in range(64)]
    made = []
    for index in range(256):
        length = lengths[index % len(lengths)]
        common = numbers.choice([0, length // 2, length - 1]) if length < 66 else 64
        made.append(shared[:common] + [numbers.randrange(199) for _ in range(length - common)])
    return made


@pytest.fixture(scope="module")
def theirs(reference, prompts):
    """(family, dtype) -> transformers' tokens and logits for all prompts, made once."""
    made: dict[tuple[str, torch.dtype], tuple[list, Tensor]] = {}

    def get(family, dtype):
        if (family, dtype) not in made:
            made[family, dtype] = reference(family, dtype, prompts, NEW_TOKENS)
        return made[family, dtype]

    return get


@pytest.fixture
def assert_agrees(prompts, theirs, make_engine):
    """Compares the first ``count`` prompts with transformers; returns the engine, for its counters."""

    def check(family, dtype, count, seqs, switches=None):
        engine = make_engine(family, dtype, switches, seqs=seqs)
        ours = greedy(engine, prompts[:count], NEW_TOKENS)
        tokens, logits = theirs(family, dtype)

        def our_logits(divergence):
            generated = ours[divergence.sequence][: divergence.position]
            return logits_after(engine, [*prompts[divergence.sequence], *generated])

        assert_close_calls(
            first_divergences(ours, tokens[:count]),
            our_logits,
            lambda divergence: logits[divergence.sequence, divergence.position],
            dtype,
            limit=max_divergences(theirs(family, torch.float32)[0][:count], tokens[:count]),
            total=count,
        )
        return engine

    return check


@pytest.mark.parametrize("batch", [1, 7, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_divergences_from_transformers_are_close_calls(family, dtype, batch, assert_agrees):
    """fp32 tests cannot see errors of 16-bit layouts, tiles, overflow or lost precision."""
    engine = assert_agrees(family, dtype, count=max(batch, 16), seqs=batch)
    assert engine.stats.max_running == batch


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_switch_turned(family, dtype, name, assert_agrees):
    """Every path beside the default one, in 16 bits too. Switches that would hide it are off as well."""
    off = dict.fromkeys(hidden_by(name, "cuda"), False)
    assert_agrees(family, dtype, count=64, seqs=64, switches=off | {name: not DEFAULTS[name]})
