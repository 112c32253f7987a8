"""Images through the Triton runner on its interpreter: the same tokens as through PyTorch's operators."""

from dataclasses import replace
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


def tower_of(size, layers=2):
    """Vectors of the embedding, and of the first layer."""

    def tower(images):
        seeds = [torch.Generator().manual_seed(each.digest[0]) for each in images]
        counts = [each.grid[0] * each.grid[1] for each in images]
        return [torch.randn(layers, n, size, generator=seed) for n, seed in zip(counts, seeds, strict=True)]

    return tower


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
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    return Request(id, tuple(token_ids), sampling, images=tuple(images))


def completions(engine, sections=(0, 1, 2, 0, 1, 2, 0, 0), prompts=_PROMPTS):
    engine.runner.images = ImageEncoder(lambda: tower_of(32), sections * 2, torch.device("cpu"))
    return completions_of(engine, prompts)


def both_ways(engine, layers="all"):
    """Of a model as Gemma 3 or 4, whose images' tokens see each other."""
    tower, planner = tower_of(engine.runner.model.config.hidden_size, layers=1), engine.scheduler.planner
    engine.runner.images = ImageEncoder(lambda: tower, (), torch.device("cpu"), both_ways=layers)
    planner.ends = replace(planner.ends, whole_images=True)
    # A cached block ends inside of the image of a prompt, and all of one is cached.
    return completions_of(engine, [*_PROMPTS, (5, "1", 9), (5, "1", 6, 7, "3", 8, 9, "1"), (5, "2", 6, 7)])


def completions_of(engine, prompts):
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


@pytest.mark.thorough
def test_bits_of_texts_do_not_depend_on_images_beside_them():
    """The kernel that turns by the place attends to the new key first, the other one last."""

    def engine():
        return device_engine("llama", on=("batch_invariant",))

    together = completions(engine())
    for number, parts in enumerate(_PROMPTS):
        (alone,) = completions(engine(), prompts=[parts])
        assert together[number].token_ids == alone.token_ids
        assert together[number].logprobs == alone.logprobs


@pytest.fixture(scope="module")
def plain_both_ways():
    return cache(lambda layers="all": both_ways(plain_engine("gemma3"), layers))


@pytest.mark.parametrize(
    "more", [{}, {"budget": 6}, {"blocks": 9}, {"on": ("batch_invariant",)}, {"off": ("prefix_cache",)}], ids=str
)
def test_images_whose_tokens_see_each_other(more, plain_both_ways):
    """In full layers and behind windows: keys after a tile of queries, chunks that end before an image, cached ones."""
    engine = device_engine("gemma3", **more)
    assert_same(both_ways(engine), plain_both_ways())
    assert (engine.stats.preemptions > 0) is ("blocks" in more)


def test_images_whose_tokens_see_each_other_within_windows_alone(plain_both_ways):
    """In Gemma 4, full layers have no mask of images."""
    found = both_ways(device_engine("gemma3"), "windows")
    assert_same(found, plain_both_ways("windows"))
    with pytest.raises(AssertionError):
        assert_same(found, plain_both_ways())


def assert_same(found, expected):
    for own, other in zip(found, expected, strict=True):
        assert own.token_ids == other.token_ids
        for one, two in zip(own.logprobs, other.logprobs, strict=True):
            assert abs(one.logprob - two.logprob) < 1e-4
