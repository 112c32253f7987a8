"""Every family through the Triton runner on its interpreter: the same tokens as through PyTorch's operators."""

from functools import cache

import pytest

from tests.engine.family_models import FAMILIES
from tests.engine.small_models import VOCAB, device_engine, plain_engine
from tests.helpers.marks import ON_TRITON_RUNNER
from tests.helpers.running import greedy

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER]
_PROMPTS = [range(14), range(9), range(3, 5)]


def tokens(engine, prompts=_PROMPTS):
    return greedy(engine, [[(7 * j * j + 3 * j + 1) % VOCAB for j in places] for places in prompts], 6)


@pytest.fixture(scope="module")
def plain():
    """Tokens through PyTorch's operators, by family."""
    return cache(lambda name: tokens(plain_engine(name)))


_ALL = ("fused_norm", "fused_mlp", "fused_rotary")


# Either kernel is off alone for each second family: what it is given by the other does not depend on families.
@pytest.mark.parametrize(
    ("name", "off"),
    [(name, off) for i, name in enumerate(FAMILIES) for off in ((), _ALL[i % 2 : i % 2 + 1], _ALL)],
    ids=lambda value: value if isinstance(value, str) else "no " + ", ".join(value) if value else "all on",
)
def test_kernels_give_the_plain_tokens(name, off, plain):
    """A kernel, or PyTorch in its place, that leaves out what a family adds would change tokens."""
    assert tokens(device_engine(name, off)) == plain(name)


@pytest.mark.parametrize(("prompts", "blocks", "preempts"), [(_PROMPTS, 8, False), ([range(8), range(3, 12)], 7, True)])
def test_longrope_with_few_blocks(prompts, blocks, preempts):
    """A row that went on behind the trained length would write into blocks that it does not hold.

    A sequence that starts over, and one that is preempted, come back to other slots between windows under way.
    """
    engine = device_engine("phi3-longrope", blocks=blocks)
    assert tokens(engine, prompts) == tokens(plain_engine("phi3-longrope"), prompts)
    assert (engine.stats.preemptions > 0) == preempts


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fallback qwen3", "fallback gpt_oss", "fallback deepseek_v3", "fallback gemma2"])
def test_kernels_inside_transformers_networks(name):
    """Fused or not, kernels must get what they expect from code that is not ours."""
    assert tokens(device_engine(name)) == tokens(plain_engine(name))
