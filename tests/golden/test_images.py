"""Models that see answer as transformers' own do: whole, in chunks that cut images, and behind cached beginnings."""

import base64
import io
import json
import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import FlagError, InterruptionError, UserError
from rosebatch.core.images import PromptImage
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.cache.memory import DeviceMemory
from rosebatch.engine.images import image_bytes, kept_bytes
from rosebatch.engine.load import load_engine
from rosebatch.io.tasks.score import Score
from rosebatch.job.check import check_job
from rosebatch.job.config import JobConfig
from rosebatch.job.run import run_job
from rosebatch.launch.plan import plan_fitting
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.model.source import find_model
from rosebatch.model.vision.cohere2 import shape_of_tiles
from rosebatch.model.vision.grid import GRIDS
from rosebatch.model.vision.pixels import read_processor
from rosebatch.model.vision.vision import Processor, Vision
from tests.helpers.reference import MARGIN
from tests.helpers.running import run, run_choices
from tests.helpers.seeing import (
    FAMILIES,
    FIRST_MARK,
    IMAGE,
    SECOND_MARK,
    SIZES,
    Family,
    class_of,
    load_processor,
    picture,
    reference_logits,
    reference_states,
    request,
    seeing_model,
)
from tests.helpers.shared_folder import make_once
from tests.helpers.threads_group import make_tensor_parallel_engine
from tests.helpers.tiny_engines import engine_of

NAMES = (
    "AyaVisionForConditionalGeneration",
    pytest.param("DeepseekVLForConditionalGeneration", marks=pytest.mark.thorough),
    pytest.param("JanusForConditionalGeneration", marks=pytest.mark.thorough),
    "VipLlavaForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    pytest.param("LlavaNextVideoForConditionalGeneration", marks=pytest.mark.thorough),
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    pytest.param("Glm46VForConditionalGeneration", marks=pytest.mark.thorough),
    pytest.param("Glm46VForConditionalGeneration-Moe", marks=pytest.mark.thorough),
    pytest.param("GlmOcrForConditionalGeneration", marks=pytest.mark.thorough),
    "PaddleOCRVLForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    pytest.param("GotOcr2ForConditionalGeneration", marks=pytest.mark.thorough),
    pytest.param("PaliGemmaForConditionalGeneration-2", marks=pytest.mark.thorough),
    "HunYuanVLForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    pytest.param("VideoLlama3ForConditionalGeneration", marks=pytest.mark.thorough),
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    pytest.param("Gemma4ForConditionalGeneration-E2B", marks=pytest.mark.thorough),
    "LlavaOnevisionForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextForConditionalGeneration-Granite",
    pytest.param("LlavaForConditionalGeneration", marks=pytest.mark.thorough),
    pytest.param("Idefics3ForConditionalGeneration", marks=pytest.mark.thorough),
    pytest.param("LlavaForConditionalGeneration-Pixtral", marks=pytest.mark.thorough),
    "LightOnOcrForConditionalGeneration",
    pytest.param("Qwen2VLForConditionalGeneration", marks=pytest.mark.thorough),
    pytest.param("Qwen3VLMoeForConditionalGeneration", marks=pytest.mark.thorough),
    pytest.param("Qwen3_5MoeForConditionalGeneration", marks=pytest.mark.thorough),
)
_NEW_TOKENS = 9
CPU = torch.device("cpu")
TEXT = (11, 12, 13, 14, 15, 16, 17)
# Token ids, and numbers of images.
PROMPTS = {
    "text": [TEXT],
    "one": [TEXT, 0, TEXT],
    "first": [0, TEXT],
    "last": [TEXT, 1],
    "two": [TEXT, 0, (21,), 1, TEXT],
    "equal": [TEXT, 0, (22,), 0, TEXT],
    "other image": [TEXT, 1, TEXT],
    "portrait": [(31,), 2, TEXT],
    "landscape": [TEXT, 3, (32, 33)],
    # In Gemma 3, it is in two of the CPU's tiles of 64 tokens.
    "far": [(*TEXT * 8, 34, 35, 36), 0, TEXT],
    "tiny": [(41,), 4, (42,)],
    "all": [TEXT, 2, 0, (51,), 3, 4, TEXT, 1, TEXT],
}
SAMPLING = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True, logprobs=0)


class Seeing(NamedTuple):
    """A family's name, a model of transformers, its folder, its family, and what rosebatch has for its images.

    ``of_fallback``: whether transformers' code runs its text part.
    """

    name: str
    model: Any
    folder: Path
    family: Family
    vision: Vision
    processor: Processor
    of_fallback: bool = False

    def requests(self, names=tuple(PROMPTS), sampling=SAMPLING):
        return [self.request(number, PROMPTS[name], sampling=sampling) for number, name in enumerate(names)]

    def request(self, number, parts, **options):
        return request(self.family, self.processor, number, parts, **options)

    def logits(self, parts, token_ids, prompt):
        return reference_logits(self.family, self.model, self.folder, parts, token_ids, prompt)

    def require_same_logits(self, engine, sampling, tolerance, margin):
        """All prompts have transformers' log-probabilities, and a likeliest token each time."""
        requests = self.requests(sampling=replace(sampling, prompt_logprobs=0))
        done = run(engine, requests)
        for given, parts in zip(requests, PROMPTS.values(), strict=True):
            found = done[given.id]
            prompt = given.prompt_token_ids
            logits = self.logits(parts, [*prompt, *found.token_ids], len(prompt))
            expected = logits[:-1].float().log_softmax(-1)
            assert len(found.token_ids) == sampling.max_tokens
            for row, scored in zip(expected, [*found.prompt_logprobs, *found.logprobs], strict=True):
                assert abs(float(row[scored.token_id]) - scored.logprob) < tolerance
            for row, scored in zip(expected[-sampling.max_tokens :], found.logprobs, strict=True):
                assert row.max() - row[scored.token_id] <= margin


@pytest.fixture(scope="module", params=NAMES)
def seeing(request, transformers, shared_folder):
    folder = make_once(shared_folder / f"seeing-{request.param}", lambda path: seeing_model(request.param, path))
    model = getattr(transformers, class_of(request.param)).from_pretrained(folder, attn_implementation="eager").eval()
    source = find_model(RunConfig(model=str(folder), dtype="float32"), torch.device("cpu"))
    processor, of_fallback = load_processor(folder, source.vision), source.model_impl == "transformers"
    return Seeing(request.param, model, folder, FAMILIES[request.param], source.vision, processor, of_fallback)


def test_logits_are_those_of_transformers(seeing):
    """Places of images, rotary positions before, in and after them, and vectors of deeper layers went wrong alone."""
    seeing.require_same_logits(engine_of(seeing.folder), SAMPLING, 1e-4, MARGIN)


@pytest.mark.thorough
@pytest.mark.parametrize("name", GRIDS)
def test_transformers_code_turns_sections(name, tmp_path, transformers):
    """It got a position of each token, and images' rows and columns had none."""
    model = seeing_model(name, tmp_path)
    source = find_model(RunConfig(model=str(tmp_path), dtype="float32", model_impl="transformers"), CPU)
    own = Seeing(name, model, tmp_path, FAMILIES[name], source.vision, load_processor(tmp_path, source.vision), True)
    for limits in ({}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}):
        own.require_same_logits(engine_of(tmp_path, model_impl="transformers", **limits), SAMPLING, 1e-4, MARGIN)


@pytest.fixture(scope="module")
def alone(seeing):
    """What each prompt of ``PROMPTS`` is answered where nothing else runs, and nothing is found."""
    budget = {"max_num_batched_tokens": seeing.family.budget} if seeing.family.budget else {}
    engine = engine_of(seeing.folder, max_num_seqs=1, switches={"prefix_cache": False}, **budget)
    return [run(engine, [given])[given.id] for given in seeing.requests()]


@pytest.mark.parametrize(
    ("limits", "preempts"),
    [
        ({"max_num_seqs": 3, "max_num_batched_tokens": 7}, False),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 16, "switches": {"prefix_cache": False}}, False),
        ({"max_num_seqs": 12, "max_num_batched_tokens": 64}, True),
    ],
    ids=["chunks", "no prefix cache", "preempted"],
)
def test_no_bit_depends_on_the_steps(seeing, alone, limits, preempts):
    """A chunk may end inside of an image, whose other vectors are needed later; a preempted prompt needs all again."""
    limits = limits | {"max_num_batched_tokens": max(limits["max_num_batched_tokens"], seeing.family.budget)}
    longest = max(len(given.prompt_token_ids) for given in seeing.requests()) + _NEW_TOKENS
    engine = engine_of(seeing.folder, block_size=4, blocks=longest // 4 + 2 if preempts else 0, **limits)
    done = run(engine, seeing.requests([*PROMPTS] * 2))
    if engine.prefix_cache:
        assert (engine.stats.preemptions > 0) is preempts
    for number, found in done.items():
        expected = alone[number % len(PROMPTS)]
        assert found.token_ids == expected.token_ids
        if seeing.of_fallback:
            # Products of transformers' modules go by the number of rows.
            for own, other in zip(found.logprobs, expected.logprobs, strict=True):
                assert abs(own.logprob - other.logprob) < 1e-4
        else:
            assert found.logprobs == expected.logprobs


_ONE_SIZE = (
    "GotOcr2ForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
)


def test_max_pixels_make_images_smaller(seeing):
    """The model's least number of pixels was larger, and won."""
    if class_of(seeing.name) in _ONE_SIZE:
        pytest.skip("all images have one size")
    # A tile has 256. Of LLaVA's, there are at least two beside the whole.
    given = seeing.family.processor
    one, least = (256, 256) if "patch_size" not in given or "max_patches" in given else (256, 64)
    if "image_grid_pinpoints" in seeing.family.processor:
        one = least = 768
    whole = seeing.processor(picture(0))
    for limit, expected in ((300, one), (100, least)):
        smaller = load_processor(seeing.folder, seeing.vision, limit)(picture(0))
        assert smaller.values.nbytes // 3 == expected < whole.values.nbytes // 3
        assert len(smaller.token_ids) < len(whole.token_ids)


@pytest.mark.parametrize("limit", [None, 700])
def test_memory_is_planned_for_the_largest_image(seeing, limit):
    """Nobody planned the tower and what it needs: beside a KV cache that took all, the first image ended the job."""
    limits = RunConfig(model=str(seeing.folder), dtype="float32", max_pixels=limit)
    source = find_model(limits, torch.device("cpu"))
    most = seeing.vision.most_pixels(read_processor(seeing.folder), limit, source.config.max_model_len)
    processor = load_processor(seeing.folder, seeing.vision, limit)
    shapes = ((400, 400), (100, 900), (32, 32), (90, 70), (256, 512))
    found = [processor(np.zeros((*shape, 3), np.uint8)).values.size // 3 for shape in shapes]
    assert max(found) <= most
    # A square of whole tokens may be less than as many tokens.
    assert limit or max(found) > 0.9 * most
    named = seeing.model.model.state_dict().items()
    weights = sum(each.numel() for name, each in named if name.partition(".")[0] in seeing.vision.parts)
    (side,) = {*np.atleast_1d(seeing.family.tower.get("patch_size", 4)).tolist()}
    assert source.most_pixels(limits) == most
    assert source.tower_bytes(most) == 4 * (weights + seeing.vision.activations * 32 * most // side**2)
    # Small ones are encoded together.
    of_token = 4 * source.config.hidden_size * (3 if "Qwen3VL" in seeing.name else 1)
    assert image_bytes(source, limits, 10) == source.tower_bytes(1 << 20) + (1 << 28) + 10 * of_token
    assert image_bytes(source, limits, 1 << 20) == source.tower_bytes(1 << 20) + (1 << 28) + (1 << 20) * of_token
    assert image_bytes(source, replace(limits, limit_images=0), 10) == 0


def test_all_vectors_of_the_largest_image_are_kept(seeing, monkeypatch):
    """They may be more than the bound of those that are kept, and took memory that nobody had planned."""
    if "image_grid_pinpoints" in seeing.family.processor:
        pytest.skip("ends of lines are not counted: images of LLaVA have few vectors")
    limits = RunConfig(model=str(seeing.folder), dtype="float32")
    source = find_model(limits, torch.device("cpu"))
    shapes = ((400, 400), (100, 900), (256, 512))
    patches = [seeing.processor(np.zeros((*shape, 3), np.uint8)) for shape in shapes]
    largest = max(int((each.token_ids == IMAGE).sum()) for each in patches)
    assert largest <= source.most_vectors(limits)
    if "Qwen" in seeing.name:
        assert largest == source.most_vectors(limits)
    before = image_bytes(source, limits, 10)
    monkeypatch.setattr("rosebatch.engine.images._KEPT_BYTES", 1)
    of_token = 4 * source.config.hidden_size * (3 if "Qwen3VL" in seeing.name else 1)
    assert kept_bytes(source, limits) == source.most_vectors(limits) * of_token
    assert image_bytes(source, limits, 10) == before - (1 << 28) + kept_bytes(source, limits)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("Gemma3", {"size": None}, "it has no size"),
        ("LlavaNext", {"image_grid_pinpoints": None}, "it has no image_grid_pinpoints"),
        ("LlavaNext", {"crop_size": None, "size": {"width": 16}}, "its size has no pixels"),
        ("Gemma3", {"size": "large"}, ""),
    ],
)
def test_an_image_processor_that_does_not_say_all(name, values, told, tmp_path, transformers):
    """A KeyError told its key alone. Without a size, images had no place in memory, and no vectors."""
    seeing_model(f"{name}ForConditionalGeneration", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    given = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: each for key, each in given.items() if each is not None}))
    config = RunConfig(model=str(tmp_path), device="cpu")
    way = "with its image processor, --limit-images 0 serves texts alone"
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}: {way} ({told}")) as caught:
        plan_fitting(config)
    assert "\n" not in str(caught.value)
    assert plan_fitting(replace(config, limit_images=0)).fit is not None


def test_memory_of_a_tower_that_is_not_downloaded_yet(tmp_path, transformers):
    """`check` said nothing of it, and a run that followed had another KV cache than it was told."""
    seeing_model("SmolVLMForConditionalGeneration", tmp_path)
    limits = RunConfig(model=str(tmp_path), dtype="float32")
    found = find_model(limits, torch.device("cpu")).tower_bytes(0)
    (tmp_path / "model.safetensors").unlink()
    assert find_model(limits, torch.device("cpu")).tower_bytes(0) == found > 0


def test_the_kv_cache_leaves_room_for_images(seeing, monkeypatch):
    """It took the room of the tower, which is loaded later."""
    limits = RunConfig(model=str(seeing.folder), dtype="float32", device="cpu", max_num_seqs=64)
    images = image_bytes(find_model(limits, torch.device("cpu")), limits, 1024)
    free = images + (1 << 24)
    monkeypatch.setattr("rosebatch.engine.build.memory_of", lambda device: DeviceMemory("cpu", free, free))
    kept = []
    for each in (limits, replace(limits, limit_images=0)):
        source = find_model(each, torch.device("cpu"))
        loaded = load_engine(source, each, Switches.resolve({}, "cpu"), torch.device("cpu"))
        kept.append((loaded.kv_cache_bytes, loaded.engine.runner.images is None))
    (less, blind), (more, blind_too) = kept
    assert (blind, blind_too) == (False, True)
    # A quarter of what is free.
    assert less < more
    assert less <= 1 << 22


def prompt_image(patches):
    """An image of a prompt that has nothing else."""
    return PromptImage(0, patches.token_ids == IMAGE, patches.grid, bytes(32), patches.values)


def test_vectors_of_images_that_are_encoded_together(seeing):
    """They are those of each alone, up to the order of sums: images attend to themselves, and keep their order."""
    tower = seeing.vision.tower(find_model(RunConfig(model=str(seeing.folder)), torch.device("cpu")).weights(CPU))
    images = [prompt_image(seeing.processor(picture(number))) for number in (2, 0, 4, 3, 1)]
    with torch.inference_mode():
        together, alone = tower(images), [tower([each])[0] for each in images]
    for image, found, expected in zip(images, together, alone, strict=True):
        assert found.shape[1] == image.gets_vector.sum()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_vectors_in_16_bits(seeing):
    """Pixels stayed in fp32 before a tower whose weights were not."""
    image = prompt_image(seeing.processor(picture(2)))
    found = []
    for dtype in ("float32", "bfloat16"):
        source = find_model(RunConfig(model=str(seeing.folder), dtype=dtype), CPU)
        with torch.inference_mode():
            found += source.vision.tower(source.weights(CPU))([image])
    assert found[1].dtype == torch.bfloat16
    assert (found[1] - found[0]).norm() < 0.05 * found[0].norm()


def test_windows_of_one_size_are_attended_together(tmp_path, transformers):
    """Each was a call: hundreds in a layer. An image has four sizes of them, with those at its edges."""
    seeing_model("Qwen2_5_VLForConditionalGeneration", tmp_path)
    source = find_model(RunConfig(model=str(tmp_path)), CPU)
    numbers = source.vision.tower(source.weights(CPU))._of_grids([(9, 7), (4, 4)])
    # Of two vectors a side, with four patches each.
    assert numbers["cu_window_seqlens"] == [(1, 4), (3 + 4, 8), (12 + 4, 16)]
    assert numbers["cu_seqlens"] == [(1, 4 * 63), (1, 4 * 16)]
    order = numbers["window_index"]
    assert order[:3].tolist() == [62, 6, 13] and sorted(order.tolist()) == [*range(63 + 16)]
    assert order[63:67].tolist() == [63, 64, 67, 68]


# transformers' code of these does.
_READING = (
    "Gemma4ForConditionalGeneration",
    "Gemma4ForConditionalGeneration-E2B",
    *GRIDS,
    "Glm46VForConditionalGeneration-Moe",
    "Idefics3ForConditionalGeneration",
    "LlavaForConditionalGeneration-Pixtral",
    "Mistral3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)


def test_a_tower_reads_nothing_on_the_device(seeing):
    """Qwen's read grids and ends of images: a GPU had to finish all before. Tensors without numbers cannot be read."""
    if seeing.name in _READING:
        pytest.skip("transformers reads masks, sizes or grids")
    source = find_model(RunConfig(model=str(seeing.folder)), torch.device("cpu"))
    tower = seeing.vision.tower(source.weights(torch.device("meta")))
    images = [prompt_image(seeing.processor(picture(number))) for number in (2, 0, 4)]
    with torch.inference_mode():
        assert [len(each[0]) for each in tower(images)] == [each.gets_vector.sum() for each in images]


def test_max_pixels_of_gemma_4(tmp_path, transformers):
    """transformers takes some budgets of tokens alone; small images are made larger."""
    seeing_model("Gemma4ForConditionalGeneration", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_soft_tokens": 280}))
    vision = find_model(RunConfig(model=str(tmp_path), dtype="float32"), torch.device("cpu")).vision
    # A token is of 64 pixels, and a square of 16, 11 or 8 tokens a side fits the budgets of 280, 140 and 70.
    for limit, side in ((None, 16), (280 * 64, 16), (280 * 64 - 1, 11), (70 * 64, 8), (1, 8)):
        patches = load_processor(tmp_path, vision, limit)(picture(0))
        assert patches.grid == (side, side)
        assert patches.token_ids.tolist() == [FIRST_MARK, *[IMAGE] * side**2, SECOND_MARK]


# Of the portrait. Qwen's marks are of the chat template.
ROWS_OF_TWO = [*[IMAGE, IMAGE, FIRST_MARK] * 4, IMAGE, IMAGE, SECOND_MARK]
TILES = [FIRST_MARK, 260, *[IMAGE] * 4, *b"\n", FIRST_MARK, 262, *[IMAGE] * 4, *b"\n\n"]
TILES += [FIRST_MARK, SECOND_MARK, *[IMAGE] * 4, FIRST_MARK]
_OF_GEMMA_4 = [FIRST_MARK, *[IMAGE] * (14 * 4), SECOND_MARK]
_TILES_OF_LLAVA = [IMAGE] * (4 + 6 * (2 + 1))
_NUMBERED = [(260, *f"_{number}".encode(), *[IMAGE] * 4) for number in (1, 2, 3)]
TOKENS = {
    "AyaVisionForConditionalGeneration": [FIRST_MARK, *chain(*_NUMBERED), 261, *[IMAGE] * 4, SECOND_MARK],
    "DeepseekVLForConditionalGeneration": [IMAGE] * 16,
    "JanusForConditionalGeneration": [FIRST_MARK, *[IMAGE] * 16, SECOND_MARK],
    "VipLlavaForConditionalGeneration": [IMAGE] * 4,
    "LlavaNextVideoForConditionalGeneration": _TILES_OF_LLAVA,
    "Gemma3ForConditionalGeneration": [IMAGE] * 4,
    "Gemma4ForConditionalGeneration": _OF_GEMMA_4,
    "Gemma4ForConditionalGeneration-E2B": _OF_GEMMA_4,
    "Idefics3ForConditionalGeneration": TILES,
    "SmolVLMForConditionalGeneration": TILES,
    "HunYuanVLForConditionalGeneration": [IMAGE] * (9 * (3 + 1) + 2),
    "Cohere2VisionForConditionalGeneration": [FIRST_MARK, *[*[IMAGE] * 4, 260] * 4, SECOND_MARK],
    "GotOcr2ForConditionalGeneration": [IMAGE] * 16,
    "PaliGemmaForConditionalGeneration": [IMAGE] * 16,
    "PaliGemmaForConditionalGeneration-2": [IMAGE] * 16,
    "QianfanOCRForConditionalGeneration": [FIRST_MARK, *[IMAGE] * 4 * (3 + 1), SECOND_MARK],
    "InternVLForConditionalGeneration": [FIRST_MARK, *[IMAGE] * 4 * (3 + 1), SECOND_MARK],
    "LightOnOcrForConditionalGeneration": [IMAGE] * 10,
    "LlavaForConditionalGeneration": [IMAGE] * 4,
    "LlavaForConditionalGeneration-Pixtral": ROWS_OF_TWO,
    "LlavaNextForConditionalGeneration": _TILES_OF_LLAVA,
    "LlavaNextForConditionalGeneration-Granite": _TILES_OF_LLAVA,
    "LlavaOnevisionForConditionalGeneration": _TILES_OF_LLAVA,
    "Mistral3ForConditionalGeneration": ROWS_OF_TWO,
}


def test_a_tower_is_in_memory_once(seeing):
    """transformers loads all of a model, for its text: the tower was there from the start, and planned for nowhere."""
    if not seeing.of_fallback:
        pytest.skip("no other part is loaded with the text")
    network = engine_of(seeing.folder).runner.model.decoder.network
    assert not any(seeing.vision.reads(name) for name, _ in network.named_parameters())
    assert network.model.language_model is not None


def test_tokens_between_vectors(seeing):
    """transformers puts vectors wherever placeholders are: its logits are also equal with marks in wrong places."""
    assert seeing.processor(picture(2)).token_ids.tolist() == TOKENS.get(seeing.name, [IMAGE] * 27)


def test_equal_images_share_blocks_and_others_do_not(seeing):
    """Placeholders of all images are one token: equal texts with other images took each other's keys.

    The first that finds blocks without states leaves these for the next.
    """
    engine = engine_of(seeing.folder, max_num_seqs=1, block_size=4)
    has_states = engine.runner.states is not None

    def cached_of(name):
        for _ in range(1 + has_states):
            (done,) = run(engine, seeing.requests([name])).values()
        return done.cached_tokens

    (one, two) = seeing.requests(["one", "two"])
    length, image = len(one.prompt_token_ids), one.images[0]
    cached = [done.cached_tokens for _, done in sorted(run(engine, seeing.requests(["one"] * 2)).items())]
    assert cached == [0, length - 1 if length % 4 == 0 and not has_states else (length - 1) // 4 * 4]
    # The text before the image, and the mark of its begin if that is no token of the image.
    before = 0 if seeing.family.both_ways else image.offset // 4 * 4
    assert cached_of("other image") == before
    # A block that begins with an image and ends in it is not of the text alone.
    common = [
        *takewhile(lambda pair: pair[0] == pair[1], zip(one.prompt_token_ids, two.prompt_token_ids, strict=False))
    ]
    found = cached_of("two")
    if seeing.family.nested or seeing.family.both_ways:
        # The image is cut otherwise there, or sees what follows.
        assert found == before
    else:
        assert found == len(common) // 4 * 4 > image.offset


def test_completions_of_one_prompt_with_images(seeing):
    """Forks compute no prompt of their own: their positions follow that of the first."""
    sampling = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True, n=3, temperature=1.0, seed=1)
    (given,) = seeing.requests(["two"], sampling)
    together = run_choices(engine_of(seeing.folder, block_size=4), [given])
    apart = run_choices(
        engine_of(seeing.folder, block_size=4, max_num_seqs=1, switches={"prefix_cache": False}), [given]
    )
    assert len({done.token_ids for done in together.values()}) == 3
    assert {key: done.token_ids for key, done in together.items()} == {k: done.token_ids for k, done in apart.items()}


def test_two_ranks_give_the_tokens_of_one(seeing):
    """Each rank has the whole tower: its vectors take the place of embeddings after the sum over ranks."""
    if seeing.of_fallback:
        pytest.skip("ranks are threads here, and transformers loads one model at a time")
    requests = seeing.requests()
    one = run(engine_of(seeing.folder), requests)
    source = find_model(RunConfig(model=str(seeing.folder), dtype="float32"), torch.device("cpu"))
    tokens = max(24, seeing.family.budget)
    limits = RunConfig(max_num_seqs=4, max_num_batched_tokens=tokens, kv_cache_memory=1 << 26, tensor_parallel_size=2)
    two = run(make_tensor_parallel_engine(source, limits, Switches.resolve({}, "cpu"), 2), requests)
    assert {number: done.token_ids for number, done in two.items()} == {n: done.token_ids for n, done in one.items()}


def url(number):
    """A data URL of an image."""
    file = io.BytesIO()
    Image.fromarray(picture(number)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def content_of(parts):
    forms = (
        lambda part: {"type": "image_url", "image_url": {"url": url(part)}},
        lambda part: {"type": "image", "image": url(part)},
        lambda part: {"type": "input_image", "image_url": url(part)},
    )
    texts = ({"type": "text", "text": bytes(part).decode()} if not isinstance(part, int) else part for part in parts)
    return [part if isinstance(part, dict) else forms[number % len(forms)](part) for number, part in enumerate(texts)]


ROWS = {
    "one": [b"What is it?", 0],
    "again": [b"What is it?", 0],
    "other": [b"What is it?", 1],
    "two": [b"First ", 2, b" then ", 0, b"?"],
    "all": [4, b" ", 3, b"|", 2, 1, 0],
}


def test_a_folder_with_a_whole_processor_alone(tmp_path, transformers):
    """Newer versions of transformers write no preprocessor_config.json: the model was taken for one of text."""
    seeing_model("Qwen3VLForConditionalGeneration", tmp_path)
    limits = RunConfig(model=str(tmp_path), dtype="float32")
    before, own = find_model(limits, torch.device("cpu")), tmp_path / "preprocessor_config.json"
    expected = load_processor(tmp_path, before.vision)(picture(2))
    values = json.loads(own.read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": values}))
    # What both have is the newer file's.
    own.write_text(json.dumps(values | {"patch_size": 8}))
    for _ in range(2):
        after = find_model(limits, torch.device("cpu"))
        found = load_processor(tmp_path, after.vision)(picture(2))
        assert found.grid == expected.grid
        assert np.array_equal(found.values, expected.values)
        assert after.most_pixels(limits) == before.most_pixels(limits)
        own.unlink(missing_ok=True)
    tower = after.vision.tower(after.weights(torch.device("cpu")))
    (vectors,) = tower([prompt_image(found)])
    assert vectors.shape[1] == expected.grid[0] * expected.grid[1]


def test_an_image_that_has_no_shorter_side_left(tmp_path, transformers):
    """transformers rounds it down to none, and told of keys of a size."""
    seeing_model("Mistral3ForConditionalGeneration", tmp_path)
    vision = find_model(RunConfig(model=str(tmp_path), dtype="float32"), torch.device("cpu")).vision
    processor = load_processor(tmp_path, vision)
    assert processor(np.zeros((40 * 40, 40, 3), np.uint8)).grid == (5, 1)
    with pytest.raises(ValueError, match="of 1 by 41 pixels, no shorter side is left where the longer one is 40"):
        processor(np.zeros((41, 1, 3), np.uint8))


def test_patches_that_are_in_no_square(tmp_path, transformers):
    """LightOnOCR's images are whole patches, of which squares are merged: others are left out, perhaps all."""
    reference = seeing_model("LightOnOcrForConditionalGeneration", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"patch_size": 4}))
    device = torch.device("cpu")
    source = find_model(RunConfig(model=str(tmp_path), dtype="float32"), device)
    processor, tower = load_processor(tmp_path, source.vision), source.vision.tower(source.weights(device))
    rgb = np.random.default_rng(0).integers(0, 256, (20, 12, 3), dtype=np.uint8)
    patches = processor(rgb)
    assert patches.grid == (2, 1)
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.3, 0.25, 0.2])
    pixels = ((torch.tensor(rgb) / 255 - mean) / std).permute(2, 0, 1)[None]
    with torch.inference_mode():
        (expected,) = reference.model.get_image_features(pixels, image_sizes=[(20, 12)]).pooler_output
        torch.testing.assert_close(tower([prompt_image(patches)])[0][0], expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="of 3 by 60 pixels, there is no square of 8 pixels a side"):
        processor(np.zeros((60, 3, 3), np.uint8))


@pytest.mark.parametrize(
    ("height", "width", "most", "shape"),
    [
        (512, 512, 12, (1, 1)),
        (100, 60, 12, (1, 1)),
        (600, 400, 12, (2, 1)),
        (768, 1024, 12, (2, 2)),
        (2000, 500, 12, (4, 1)),
        (5000, 4000, 12, (4, 3)),
        (30, 4000, 6, (1, 6)),
        (1024, 1536, 4, (2, 2)),
    ],
)
def test_tiles_of_command_a_vision(height, width, most, shape):
    """Its own image processor needs torchvision, and gave these: the tests above know none but ours."""
    assert shape_of_tiles(height / 512, width / 512, most) == shape


@pytest.mark.thorough
def test_images_that_would_become_too_large(tmp_path, transformers):
    """A line of pixels became a square of gigabytes, or as wide as the model's height allows."""
    lines = (
        ("VipLlava", True, (600_000, 1, 3)),
        ("Llava", True, (600_000, 1, 3)),
        ("LlavaOnevision", False, (1, 12_000, 3)),
    )
    for name, alone, shape in lines:
        seeing_model(f"{name}ForConditionalGeneration", tmp_path)
        vision = find_model(RunConfig(model=str(tmp_path), dtype="float32"), torch.device("cpu")).vision
        processor = load_processor(tmp_path, vision)
        with pytest.raises(ValueError, match="would be made: shorten its longer side"):
            processor(np.zeros(shape, np.uint8), alone=alone)
    # Tiles of a line are few, and a square is made of it once it is small.
    for name in ("AyaVision", "Janus"):
        (tmp_path / name).mkdir()
        seeing_model(f"{name}ForConditionalGeneration", tmp_path / name)
        other = find_model(RunConfig(model=str(tmp_path / name), dtype="float32"), torch.device("cpu")).vision
        assert load_processor(tmp_path / name, other)(np.zeros((30, 12_000, 3), np.uint8)).grid[0] <= 5
    # It is so thin that the tiles are padding alone.
    assert len(processor(np.zeros(shape, np.uint8)).token_ids) == 4


def test_an_older_transformers_serves_texts(tmp_path, monkeypatch, transformers):
    """Processors of 5.10 write other texts for an image, or none."""
    seeing_model("AyaVisionForConditionalGeneration", tmp_path)
    settings = RunConfig(model=str(tmp_path), dtype="float32")
    for found, sees in (("5.10.4", False), ("5.24.0", True), ("6.0.0.dev0", True)):
        monkeypatch.setattr("rosebatch.model.vision.processed.version", lambda name, found=found: found)
        source = find_model(settings, CPU)
        assert (source.vision is not None) is sees
        if not sees:
            assert source.sight == "its images need transformers 5.24 or newer"


def test_towers_have_one_more_level_on_the_hub(tmp_path, transformers):
    """transformers 5 has no ``vision_model`` in CLIP's tower, and reads names with it."""
    seeing_model("LlavaNextForConditionalGeneration", tmp_path)
    settings, device = RunConfig(model=str(tmp_path), dtype="float32"), torch.device("cpu")
    vision = find_model(settings, device).vision
    patches = load_processor(tmp_path, vision)(picture(2))

    def vectors():
        (found,) = vision.tower(find_model(settings, device).weights(device))([prompt_image(patches)])
        return found

    expected, file = vectors(), tmp_path / "model.safetensors"
    tensors = load_file(file)
    level = "vision_tower.vision_model."
    save_file({name.replace("vision_tower.", level): each for name, each in tensors.items()}, file)
    assert any(level in name for name in load_file(file))
    assert torch.equal(vectors(), expected)


def test_paddleocr_vl_of_its_makers(tmp_path, transformers):
    """Its folder has no text_config, and tensors have names that transformers changes: its projector was missing."""
    seeing_model("PaddleOCRVLForConditionalGeneration", tmp_path)
    settings, file = RunConfig(model=str(tmp_path), dtype="float32"), tmp_path / "model.safetensors"
    patches = load_processor(tmp_path, find_model(settings, CPU).vision)(picture(2))

    def answer():
        source = find_model(settings, CPU)
        (vectors,) = source.vision.tower(source.weights(CPU))([prompt_image(patches)])
        return vectors, source.config, source.require_loadable()

    expected = answer()
    former = {"model.projector.": "mlp_AR.", "model.visual.": "visual.", "model.language_model.": "model."}
    tensors = load_file(file)
    for name, other in former.items():
        tensors = {key.replace(name, other): each for key, each in tensors.items()}
    save_file(tensors, file)
    assert any("mlp_AR" in name for name in load_file(file))
    values = json.loads((tmp_path / "config.json").read_text())
    text = {key: each for key, each in values.pop("text_config").items() if key not in ("model_type", "dtype")}
    (tmp_path / "config.json").write_text(json.dumps({**text, **values}))
    found = answer()
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]
    assert expected[2] == []


def test_an_image_processor_among_other_parts(tmp_path, transformers):
    """transformers 5 saves it in processor_config.json: the texts of such folders alone were served."""
    seeing_model("InternVLForConditionalGeneration", tmp_path)
    settings, device = RunConfig(model=str(tmp_path), dtype="float32"), torch.device("cpu")
    expected = load_processor(tmp_path, find_model(settings, device).vision)(picture(0))
    own = tmp_path / "preprocessor_config.json"
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(own.read_text())}))
    own.unlink()
    found = load_processor(tmp_path, find_model(settings, device).vision)(picture(0))
    assert (found.values == expected.values).all() and found.grid == expected.grid
    for text in ("{}", "no JSON"):
        (tmp_path / "processor_config.json").write_text(text)
        assert find_model(settings, device).vision is None


_NO_FILES = "its folder has neither processor_config.json nor preprocessor_config.json with its image processor"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("no processor", _NO_FILES),
        ("no values", _NO_FILES),
        ("no tower", "its weights are those of its text part alone"),
    ],
)
def test_a_folder_that_cannot_see_serves_texts(change, told, tmp_path, transformers):
    """A checkpoint that was tuned on texts, and saved without its tower, ended at the first row with an image."""
    seeing_model("Qwen3VLForConditionalGeneration", tmp_path)
    if change == "no processor":
        (tmp_path / "preprocessor_config.json").unlink()
    elif change == "no values":
        (tmp_path / "preprocessor_config.json").unlink()
        (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    else:
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(
            {name: each for name, each in tensors.items() if "visual" not in name}, tmp_path / "model.safetensors"
        )
    content = content_of(ROWS["one"])
    lines = [{"messages": [{"role": "user", "content": given}]} for given in ("a", content)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_file(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=str(tmp_path), device="cpu", sampling={"max_tokens": 2}
    )
    text, image = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert "text" in text
    where = "line 2: messages[0].content[1]: the model takes no images: "
    assert image["error"]["message"].startswith(where + told)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_chats_with_images_are_embedded(seeing, tmp_path, pooling):
    """Models of images embed pages and photographs: such rows were refused. Rows of other tasks are texts."""
    lines = [{"id": name, "messages": [{"role": "user", "content": content_of(ROWS[name])}]} for name in ROWS]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"model": str(seeing.folder), "device": "cpu", "dtype": "float32"}
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": max(16, seeing.family.budget)}
    embedded = PoolingParams(pooling=pooling)
    report = run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", pooling=embedded, **options, **limits).report
    assert report["images"] == 10
    for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()):
        parts = ROWS[row["id"]]
        # Without the opening of an answer, which the template has always.
        given = seeing.request(0, [b"[user:", *parts, b"]", b"[assistant:"])
        states = reference_states(seeing.family, seeing.model, seeing.folder, parts, given.prompt_token_ids)
        expected = torch.nn.functional.normalize(states[-1] if pooling == "last" else states.mean(0), dim=0)
        assert row["usage"]["prompt_tokens"] == len(given.prompt_token_ids)
        torch.testing.assert_close(torch.tensor(row["embedding"]), expected, rtol=0, atol=1e-5)


def test_score_keeps_no_room_for_images(seeing, tmp_path):
    """Its rows are texts: the tower is never loaded."""
    lines = [{"prompt": "abc"}, {"messages": [{"role": "user", "content": content_of(ROWS["one"])}]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stream = io.StringIO()
    job = JobConfig(input=str(tmp_path / "in.jsonl"), task=Score())
    assert check_job(job, RunConfig(model=str(seeing.folder), device="cpu", dtype="float32"), stream) == 1
    assert "what is scored or classified has no images" in stream.getvalue()
    assert " for images and " not in stream.getvalue()


def test_check_tells_what_images_take(seeing, tmp_path):
    """Tokens of an image follow from its size, the model and --max-pixels, and only prompts' lengths were told."""
    lines = [{"messages": [{"role": "user", "content": content_of([0, b"a", 2])}]}] * 2
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RunConfig(model=str(seeing.folder), device="cpu", dtype="float32")
    stream = io.StringIO()
    assert check_job(JobConfig(input=str(tmp_path / "in.jsonl")), config, stream) == 0
    cut = [seeing.processor(picture(number), alone=False) for number in (0, 2)]
    few, many = sorted(len(each.token_ids) for each in cut)
    told = f"image tokens: {2 * (few + many)} ({few} to {many} an image, median {few}, p90 {many})\n"
    assert told in stream.getvalue()
    assert " for images and " in stream.getvalue()


def test_images_that_make_a_prompt_too_long(tmp_path, transformers):
    """Nobody knew whether the text or its images are too long, nor that images can be smaller."""
    seeing_model("Qwen3VLForConditionalGeneration", tmp_path)
    messages = [{"role": "user", "content": content_of([0, b"a"])}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": messages}))
    job = JobConfig(input=str(tmp_path / "in.jsonl"))
    config = RunConfig(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=34)
    stream = io.StringIO()
    assert check_job(job, config, stream) == 1
    way = "16 of images, which --max-pixels lowers unless all images become one size"
    told = f"tokens, {way}; with at least one to generate, 34 are allowed"
    assert told in stream.getvalue()
    with LLM(config.model, device="cpu", max_model_len=34) as llm:
        (row,) = llm.chat(messages, on_error="return")
    assert told in row.error
    assert check_job(job, replace(config, max_pixels=256), io.StringIO()) == 0


def test_check_tells_of_an_image_that_fits_no_step(tmp_path, transformers):
    """Only the run did, in its rows."""
    seeing_model("Gemma3ForConditionalGeneration", tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": content_of([0, b"a"])}]}))
    job = JobConfig(input=str(tmp_path / "in.jsonl"))
    for most, bad in ((4, 0), (3, 1)):
        stream = io.StringIO()
        config = RunConfig(model=str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=most)
        assert check_job(job, config, stream) == bad
        told = "image_too_large: an image has 4 tokens, and is computed in one step; --max-num-batched-tokens leaves 3"
        assert (told in stream.getvalue()) is bool(bad)


def test_a_prompt_of_paligemma_beyond_its_window(tmp_path, transformers):
    """transformers' layers with a window see all of it, and ours the window: answers would be others'."""
    seeing_model("PaliGemmaForConditionalGeneration-2", tmp_path)
    lines = [
        {"messages": [{"role": "user", "content": content_of([*[0] * count, b"a"])}], "max_tokens": 2}
        for count in (8, 9)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=str(tmp_path), device="cpu")
    served, refused = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert served["usage"]["prompt_tokens"] == 8 * 16 + 19
    assert refused["error"]["code"] == "image_too_large"
    told = "all 163 tokens of the prompt see each other, and the model's window has 160"
    assert refused["error"]["message"].endswith(told)


def test_a_killed_run_goes_on_with_the_same_answers(seeing, tmp_path):
    """Rows with images are loaded again, and another --max-pixels would give other answers to the rest."""
    lines = [{"messages": [{"role": "user", "content": content_of(parts)}]} for parts in ROWS.values()]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RunConfig(model=str(seeing.folder), device="cpu", dtype="float32", max_num_seqs=1)
    smaller = replace(config, max_pixels=512)

    def job(name, **more):
        output = str(tmp_path / name)
        return JobConfig(
            input=str(tmp_path / "in.jsonl"), output=output, sampling={"max_tokens": 6}, quiet=True, **more
        )

    @contextmanager
    def killed(kept):
        checks = iter(range(25))

        def check():
            if next(checks, None) is None:
                raise InterruptionError(2, "")

        yield check

    run_job(job("whole.jsonl"), config)
    with pytest.raises(InterruptionError):
        run_job(job("out.jsonl"), config, listen=killed)
    assert 0 < len((tmp_path / "out.jsonl.part").read_text().splitlines()) - 1 < len(ROWS)
    with pytest.raises(UserError, match="--max-pixels was not given, is 512"):
        run_job(job("out.jsonl", resume=True), smaller)
    run_job(job("out.jsonl", resume=True), config)
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_rows_with_images_are_answered_as_by_transformers(seeing, tmp_path):
    """From lines to answers: placeholders, their number, and the template's text around them."""
    lines = [{"id": name, "messages": [{"role": "user", "content": content_of(ROWS[name])}]} for name in ROWS]
    lines.append({"id": "text", "messages": [{"role": "user", "content": "What is it?"}]})
    lines.append(
        {"id": "broken", "messages": [{"role": "user", "content": [{"type": "image", "image": "iVBORw0KGgo"}]}]}
    )
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sampling = {"max_tokens": 6, "ignore_eos": True}
    options = {
        "model": str(seeing.folder),
        "device": "cpu",
        "dtype": "float32",
        "sampling": sampling,
        "return_token_ids": True,
    }
    report = run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **options).report
    # LLaVA-OneVision sees the two that stand alone in tiles, too.
    finer = 2 if seeing.name == "LlavaOnevisionForConditionalGeneration" else 0
    assert (report["images"], report["encoded_images"]) == (10, len(SIZES) + finer)
    assert 0 < report["image_s"] <= report["prefill_s"] + report["decode_s"]
    # Answers may have other ends of lines.
    found = {row["id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().split("\n")[:-1])}
    with pytest.raises(FlagError, match="1 row cannot be served"):
        run_file(tmp_path / "in.jsonl", tmp_path / "strict.jsonl", strict=True, **options)
    assert found["broken"]["error"]["code"] == "invalid_image"
    for name, parts in [*ROWS.items(), ("text", [b"What is it?"])]:
        given = seeing.request(0, [b"[user:", *parts, b"]", b"[assistant:"])
        assert found[name]["usage"]["prompt_tokens"] == len(given.prompt_token_ids)
        token_ids = found[name]["token_ids"]
        prompt = given.prompt_token_ids
        logits = seeing.logits(parts, [*prompt, *token_ids], len(prompt))
        for row, token in zip(logits[-7:-1], token_ids, strict=True):
            assert row.max() - row[token] <= MARGIN
    assert found["one"]["text"] == found["again"]["text"]
    llm = LLM(model=str(seeing.folder), device="cpu", dtype="float32")
    (answer,) = llm.chat(lines[0]["messages"], SamplingParams(**sampling))
    assert list(answer.outputs[0].token_ids) == found["one"]["token_ids"]
