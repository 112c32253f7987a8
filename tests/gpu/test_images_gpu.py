"""On a GPU, models that see: packed steps with rotary tables of their own, and decode steps that turn by other rows."""

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.launch.launch import launch
from rosebatch.model.source import find_model
from tests.golden.test_images import Seeing
from tests.gpu.sync_mode import sync_mode
from tests.helpers.running import run
from tests.helpers.seeing import FAMILIES, SIZES, class_of, load_processor, seeing_model
from tests.helpers.shared_folder import make_once

pytestmark = pytest.mark.gpu

NAMES = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4ForConditionalGeneration-E2B",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)
WAITING = {
    "Gemma4ForConditionalGeneration": "a mask",
    "Gemma4ForConditionalGeneration-E2B": "a mask",
    "Mistral3ForConditionalGeneration": "the sizes of images",
    "LlavaOnevisionForConditionalGeneration": "the lengths of images",
    "SmolVLMForConditionalGeneration": "which tiles are padding",
}
# Long enough for windows of decode steps, which are graphs.
NEW_TOKENS = 24
SAMPLING = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@pytest.fixture(scope="module", params=NAMES)
def seeing(request, shared_folder):
    import transformers

    folder = make_once(shared_folder / f"seeing-{request.param}", lambda path: seeing_model(request.param, path))
    model = getattr(transformers, class_of(request.param)).from_pretrained(folder, attn_implementation="eager").eval()
    vision = find_model(RunConfig(model=str(folder), dtype="float32"), torch.device("cpu")).vision
    return Seeing(request.param, model, folder, FAMILIES[request.param], vision, load_processor(folder, vision))


def engine_on_gpu(folder, dtype, **settings):
    return launch(RunConfig.of(str(folder), dtype=dtype, device="cuda", kv_cache_memory=1 << 27, **settings)).engine


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7, "block_size": 16}], ids=["whole", "chunks"])
def test_logits_are_those_of_transformers(seeing, settings):
    """The Triton runner was tried in the interpreter alone."""
    if "max_num_batched_tokens" in settings:
        budget = max(settings["max_num_batched_tokens"], seeing.family.budget)
        settings = settings | {"max_num_batched_tokens": budget}
    seeing.require_same_logits(engine_on_gpu(seeing.folder, "float32", **settings), SAMPLING, 1e-3, 2e-3)


def test_bits_of_texts_do_not_depend_on_images_beside_them(seeing):
    """In bf16 with ``--batch-invariant``, rows alone and beside others."""
    requests = seeing.requests(sampling=SAMPLING)
    together, alone = (engine_on_gpu(seeing.folder, "bfloat16", batch_invariant=True) for _ in range(2))
    done = run(together, requests)
    for given in requests:
        (found,) = run(alone, [given]).values()
        assert found.token_ids == done[given.id].token_ids
        assert found.logprobs == done[given.id].logprobs


@pytest.mark.usefixtures("captures_may_wait")
def test_steps_with_images_do_not_wait_for_the_device(seeing):
    """Pixels and places of images went up from pageable memory, and layers read which patches see each other."""
    if seeing.name in WAITING:
        pytest.skip(f"transformers' code waits for {WAITING[seeing.name]}")
    engine = engine_on_gpu(seeing.folder, "bfloat16", prefix_cache=False)
    run(engine, seeing.requests(sampling=SAMPLING))
    images = engine.runner.images
    images._vectors.clear()
    images._bytes = 0
    engine.restart_stats()
    with sync_mode("error"):
        run(engine, seeing.requests(sampling=SAMPLING))
    assert engine.stats.images == len(SIZES)
