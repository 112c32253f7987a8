"""Images that a caller of the library hands over."""

import base64
import json
import re

import numpy as np
import pytest
from PIL import Image

from rosebatch import LLM, PoolingParams, SamplingParams, run_file
from tests.helpers.forked_jobs import fork_children
from tests.helpers.seeing import seeing_model
from tests.io.images.picture_files import picture, saved

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
WIDE = picture("RGB", (60, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    seeing_model("Qwen3VLForConditionalGeneration", folder)
    return folder


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    root = tmp_path_factory.mktemp("media")
    (root / "a.png").write_bytes(saved("PNG"))
    return root


@pytest.fixture(scope="module")
def llm(folder, media):
    with LLM(folder, device="cpu", max_num_seqs=4, media_root=media, limit_images=3) as llm:
        yield llm


def tokens(outputs):
    return [(each.prompt_token_ids, each.outputs[0].token_ids) for each in outputs]


def chat(*images):
    return [{"role": "user", "content": [*images, {"type": "text", "text": "What?"}]}]


def test_all_forms_of_a_chat(llm):
    """Each was refused but the data URL."""
    url = "data:image/png;base64," + base64.b64encode(saved("PNG")).decode()
    given = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_pil", "image_pil": picture()},
        *({"type": "image", "image": each} for each in (picture(), np.array(picture()), saved("PNG"), "a.png")),
    ]
    found = tokens(llm.chat([chat(each) for each in given], GREEDY))
    assert all(each == found[0] for each in found)
    (other,) = tokens(llm.chat(chat({"type": "image", "image": WIDE}), GREEDY))
    assert len(other[0]) != len(found[0][0])


def test_images_of_prompts(llm):
    """vLLM's form of a prompt was refused. It is the same as a chat whose template writes the same text."""
    of_chat = llm.chat(chat(*({"type": "image", "image": each} for each in (picture(), WIDE))), GREEDY)
    text = f"[user:{PLACE}{PLACE}What?][assistant:"
    data = {"multi_modal_data": {"image": [picture(), np.array(WIDE)]}}
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    of_prompts = llm.generate([{"prompt": text, **data}, {"prompt_token_ids": ids, **data}], GREEDY)
    assert tokens(of_prompts) == tokens(of_chat) * 2
    (one,) = llm.generate({"prompt": f"{PLACE}?", "multi_modal_data": {"image": WIDE}}, GREEDY)
    (streamed,) = llm.stream([{"prompt": f"{PLACE}?", "multi_modal_data": {"image": [saved("PNG", WIDE)]}}], GREEDY)
    assert tokens([streamed]) == tokens([one])


def test_what_prompts_of_gemma_3_have_for_an_image(tmp_path):
    """transformers and vLLM put all of it in the place of its first token, which was an error here."""
    seeing_model("Gemma3ForConditionalGeneration", tmp_path)
    mark, whole = "<start_of_image>", "<start_of_image><image_soft_token><end_of_image>"
    texts = [f"[user:{mark}and{mark}What?]", f"[user:\n\n{whole}\n\nand\n\n{whole}\n\nWhat?]", f"{mark}and{whole}"]
    data = {"multi_modal_data": {"image": [picture(), WIDE]}}
    with LLM(tmp_path, device="cpu") as llm:
        one, other, mixed = llm.generate([{"prompt": text, **data} for text in texts], GREEDY, on_error="return")
    assert tokens([one]) == tokens([other])
    assert list(one.prompt_token_ids).count(257) == 2 * 4
    assert mixed.error_code == "invalid_prompt" and "<image_soft_token> 1 time for 2 images" in mixed.error


@pytest.mark.parametrize(
    ("text", "image", "code", "told"),
    [
        (PLACE * 2, [WIDE], "invalid_prompt", "the prompt has <|image_pad|> 2 times for 1 image"),
        ("none", [WIDE], "invalid_prompt", "the prompt has <|image_pad|> 0 times for 1 image"),
        (PLACE, [WIDE, WIDE], "invalid_prompt", "the prompt has <|image_pad|> 1 time for 2 images"),
        (PLACE * 4, [WIDE] * 4, "too_many_images", "the row has 4 images, more than 3"),
        (PLACE, "../a.png", "image_not_allowed", "multi_modal_data.image[0]: the path leads out of --media-root"),
        (PLACE, np.zeros((2, 2)), "invalid_image", "multi_modal_data.image[0]: an array must be uint8"),
        (PLACE, [WIDE, None], "invalid_prompt", "multi_modal_data.image[1] must be a text"),
        (PLACE, b"none", "invalid_image", "multi_modal_data.image[0]: it is no JPEG"),
    ],
)
def test_what_is_wrong_with_a_prompt(llm, text, image, code, told):
    """It costs that prompt alone, and says which image."""
    good = {"prompt": PLACE, "multi_modal_data": {"image": WIDE}}
    bad, served = llm.generate(
        [{"prompt": text, "multi_modal_data": {"image": image}}, good], GREEDY, on_error="return"
    )
    assert bad.error_code == code and told in bad.error
    assert served.outputs


def test_images_of_prompts_are_embedded(llm, tmp_path):
    """Only chats of files could be: the same prompts as of ``generate`` were refused."""
    data = {"multi_modal_data": {"image": [WIDE]}}
    text = f"[user:{PLACE}What?]"
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    found = [
        each.outputs.embedding for each in llm.embed([{"prompt": text, **data}, {"prompt_token_ids": ids, **data}])
    ]
    row = {"messages": chat({"type": "image", "image": base64.b64encode(saved("PNG", WIDE)).decode()})}
    # The template opens an answer always.
    row["messages"][0]["content"][-1]["text"] = "What?"
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    opened = f"{text}[assistant:"
    (expected,) = llm.embed({"prompt": opened, **data})
    run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model=llm, pooling=PoolingParams())
    np.testing.assert_allclose(
        json.loads((tmp_path / "out.jsonl").read_text())["embedding"], expected.outputs.embedding
    )
    assert found[0] == found[1]
    (other,) = llm.embed({"prompt": text, "multi_modal_data": {"image": WIDE.rotate(90)}})
    assert other.outputs.embedding != found[0]


def test_a_placeholder_without_an_image(llm):
    """The text was answered, embedded and scored as if it had an image."""
    for call in (llm.generate, llm.embed, llm.score):
        for prompt in ({"prompt": PLACE}, PLACE, llm.get_tokenizer().encode(PLACE)):
            (bad,) = call([prompt], on_error="return")
            assert bad.error_code == "invalid_prompt" and "and the row has none" in bad.error


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs is not served: use max_pixels= of LLM"),
        ({"multi_modal_uuids": {"image": "a"}}, "multi_modal_uuids is not served: leave it out, equal images"),
        ({"cache_salt": "a"}, "cache_salt is not served: a prompt's mapping has prompt or prompt_token_ids, multi"),
        ({"image": WIDE}, "image: a prompt's images are in multi_modal_data, as image"),
        ({"video": WIDE}, "video: only texts and images are served"),
    ],
)
def test_other_fields_of_a_prompt(llm, given, told):
    """A prompt's mapping was said to have a text or token ids alone."""
    with pytest.raises(ValueError, match=told):
        llm.generate({"prompt": PLACE, "multi_modal_data": {"image": WIDE}, **given})


def test_a_prompt_that_its_images_make_too_long(llm):
    """What could be made smaller was not told."""
    long = {"prompt": "a" * 240 + PLACE, "multi_modal_data": {"image": WIDE}}
    (bad,) = llm.generate(long, GREEDY, on_error="return")
    (embedded,) = llm.embed(long, on_error="return")
    told = r"the prompt has \d+ tokens, \d+ of images, which --max-pixels lowers unless all images become one size; "
    for each, rest in ((bad, "with at least one to generate, 256 are allowed"), (embedded, "256 are allowed")):
        assert each.error_code == "prompt_too_long" and re.search(f"{told}{rest}$", each.error)


def test_other_inputs_are_refused(llm):
    """The text alone would have been answered."""
    for data, told in (({"video": 1}, "video"), ({"image": WIDE, "audio": 1}, "image, audio"), ("a.png", "str")):
        with pytest.raises(ValueError, match=f"multi_modal_data has image alone, (got )?.*{told}"):
            llm.generate({"prompt": PLACE, "multi_modal_data": data})
    given = {"prompt": PLACE, "multi_modal_data": {"image": WIDE}}
    told = r"multi_modal_data.image\[0\]: what is scored or classified has no images"
    for call in (llm.score, llm.classify, llm.reward):
        with pytest.raises(ValueError, match=told):
            call([given])
    from rosebatch import BeamSearchParams

    with pytest.raises(ValueError, match="beam_search takes no images"):
        llm.beam_search([given], BeamSearchParams(beam_width=2, max_tokens=2))


def test_an_opened_file_in_many_prompts(llm, tmp_path):
    """Pillow reads it at its first use: two threads that did so at once got half of it, or an error."""
    WIDE.resize((600, 400)).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as opened:
        prompts = [{"prompt": PLACE, "multi_modal_data": {"image": opened}}] * 12
        found = tokens(llm.generate(prompts, GREEDY))
    assert all(each == found[0] for each in found)


def test_names_of_vllm(folder, media):
    """Scripts for models with images have them."""
    names = {"allowed_local_media_path": str(media), "limit_mm_per_prompt": {"image": 1, "video": 0}}
    with LLM(folder, device="cpu", mm_processor_kwargs={"max_pixels": 256}, **names) as llm:
        few, two = llm.chat(
            [chat({"type": "image", "image": "a.png"}), chat(*[{"type": "image", "image": WIDE}] * 2)],
            GREEDY,
            on_error="return",
        )
        assert few.outputs and two.error_code == "too_many_images"
        (small,) = llm.chat(chat({"type": "image", "image": WIDE}), GREEDY)
        assert small.prompt_token_ids.count(257) <= 256 // 64
    with pytest.raises(ValueError, match=r"limit_mm_per_prompt=3 is not served: give \{'image': 4\}"):
        LLM(folder, limit_mm_per_prompt=3)


def test_names_of_vllm_for_a_file(llm, folder, media, tmp_path):
    """``limit_images`` was unknown; did you mean ``limit_images``?"""
    pictures = [[{"type": "image", "image": "a.png"}] * count for count in (1, 2)]
    rows = [{"messages": chat(*each), "max_tokens": 4} for each in pictures]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"allowed_local_media_path": str(media), "limit_mm_per_prompt": {"image": 1}}
    out = tmp_path / "out.jsonl"
    assert run_file(tmp_path / "in.jsonl", out, model=folder, device="cpu", **names).num_failed == 1
    assert "too_many_images" in out.read_text().splitlines()[1]
    # The root is of the job. The limit decides what memory is kept, and is of the model.
    with pytest.raises(ValueError, match="limit_images: the model is loaded already"):
        run_file(tmp_path / "in.jsonl", out, model=llm, **names)
    del names["limit_mm_per_prompt"]
    assert run_file(tmp_path / "in.jsonl", out, model=llm, **names).num_failed == 0


@pytest.mark.thorough
def test_pictures_travel_to_workers(folder, monkeypatch):
    """Rows are pickled there."""
    fork_children(monkeypatch)
    prompts = [{"prompt": PLACE, "multi_modal_data": {"image": each}} for each in (WIDE, picture())]
    with LLM(folder, device="cpu") as llm:
        expected = tokens(llm.generate(prompts, GREEDY))
    with LLM(folder, device="cpu", data_parallel_size=2) as llm:
        assert tokens(llm.generate(prompts, GREEDY)) == expected
