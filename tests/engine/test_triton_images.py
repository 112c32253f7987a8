"""Images through the Triton runner on its interpreter: the same tokens as through PyTorch's operators."""

from functools import cache

import numpy as np
import pytest
import torch

from rosebatch.core.images import PromptImage
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.images import ImageEncoder
from tests.engine.small_models import VOCAB, device_engine, plain_engine
from tests.helpers.marks import ON_TRITON_RUNNER
from tests.helpers.running import run

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER]
_PLACEHOLDER = VOCAB - 1
# Numbers of images are their first digit; grids follow.
_GRIDS = {1: (2, 3), 2: (5, 1), 3: (1, 2), 4: (2, 2)}
_MARK = VOCAB - 2
# The last image has a mark after each row.
_GETS_VECTOR = {4: [True, True, False] * 2}
_PROMPTS = [(5, "1", 6, 7), ("2", 8), (9, 10, 11), (5, "3", 6, 7), (12, "1", 13, "2", 14), (15,)]


def tower(images):
    """Vectors of the embedding, and of the first layer."""
    seeds = [torch.Generator().manual_seed(each.digest[0]) for each in images]
    return [torch.randn(2, i.grid[0] * i.grid[1], 32, generator=g) for i, g in zip(images, seeds, strict=True)]


def request(id, parts):
    token_ids, images = [], []
    for part in parts:
        if isinstance(part, str):
            number, grid = int(part), _GRIDS[int(part)]
            gets_vector = np.array(_GETS_VECTOR.get(number, [True] * (grid[0] * grid[1])))
            images.append(PromptImage(len(token_ids), gets_vector, grid, bytes([number]) * 32, np.empty(0)))
            token_ids += np.where(gets_vector, _PLACEHOLDER, _MARK).tolist()
        else:
            token_ids.append(part)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=0)
    return Request(id, tuple(token_ids), sampling, images=tuple(images))


def completions(engine, sections=(0, 1, 2, 0, 1, 2, 0, 0), prompts=_PROMPTS):
    engine.runner.images = ImageEncoder(lambda: tower, sections * 2, torch.device("cpu"))
    done = run(engine, [request(number, parts) for number, parts in enumerate(prompts)])
    return [done[number] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def plain():
    """Through PyTorch's operators, with and without positions of images."""
    return cache(lambda sections, *more: completions(plain_engine("llama"), sections, (*_PROMPTS, *more)))


_OFF = [(), ("fused_rotary",), ("fused_kv_append",), ("fused_rotary", "fused_kv_append", "fused_norm"), ("split_keys",)]


@pytest.mark.parametrize("off", _OFF, ids=lambda off: ", ".join(off) or "all on")
def test_kernels_give_the_plain_tokens(off, plain):
    """A decode kernel turned by the place alone, and a packed step by rows of tables that are not those of images."""
    sections = (0, 1, 2, 0, 1, 2, 0, 0)
    assert_same(completions(device_engine("llama", off)), plain(sections))


def test_images_without_positions_of_their_own(plain):
    """Vectors alone, as most families have them; marks between rows took those of the next row."""
    more = ((5, "4", 6, "1", 7),)
    assert_same(completions(device_engine("llama"), (), (*_PROMPTS, *more)), plain((), *more))


@pytest.mark.parametrize("more", [{"budget": 3}, {"blocks": 9}, {"on": ("batch_invariant",)}], ids=str)
def test_chunks_and_preemptions(more, plain):
    """A sequence that comes back may get another slot, whose last sequence had other images."""
    engine = device_engine("llama", **more)
    assert_same(completions(engine), plain((0, 1, 2, 0, 1, 2, 0, 0)))
    assert (engine.stats.preemptions > 0) is ("blocks" in more)


def test_bits_of_texts_do_not_depend_on_images_beside_them():
    """The kernel that turns by the place attends to the new key first, the other one last."""

    def engine():
        return device_engine("llama", on=("batch_invariant",))

    together = completions(engine())
    for number, parts in enumerate(_PROMPTS):
        (alone,) = completions(engine(), prompts=[parts])
        assert together[number].token_ids == alone.token_ids
        assert together[number].logprobs == alone.logprobs


def assert_same(found, expected):
    for own, other in zip(found, expected, strict=True):
        assert own.token_ids == other.token_ids
        for one, two in zip(own.logprobs, other.logprobs, strict=True):
            assert abs(one.logprob - two.logprob) < 1e-4
