"""Every family through the device path on Triton's interpreter: the same tokens as through PyTorch's operators."""

import os

import pytest

from rosebatch.request import Request
from rosebatch.sampling_params import SamplingParams
from tests.engine.family_models import FAMILIES
from tests.engine.small_models import VOCAB, device_engine, plain_engine

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU in this process"),
    # The interpreter computes with numpy, which warns of the NaN in rows that nobody reads.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
_PROMPTS = [
    tuple((7 * i * i + 3 * i + 1) % VOCAB for i in range(start, stop)) for start, stop in ((0, 14), (0, 9), (3, 5))
]


def tokens(engine):
    for i, prompt in enumerate(_PROMPTS):
        engine.add(Request(i, prompt, SamplingParams(max_tokens=6, ignore_eos=True)))
    done = {}
    while engine.has_unfinished:
        done |= {completion.request.id: completion.token_ids for completion in engine.step()}
    return done


@pytest.mark.parametrize("off", [(), ("fused_norm",), ("fused_mlp",), ("fused_norm", "fused_mlp", "fused_rotary")])
@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_give_the_plain_tokens(name, off):
    """A kernel, or PyTorch in its place, that leaves out what a family adds would change tokens."""
    assert tokens(device_engine(name, off)) == tokens(plain_engine(name))
