"""``LLM.beam_search``, beside a plain search over the logits of transformers."""

import random
from itertools import pairwise

import pytest
import torch

from rosebatch import LLM, BeamSearchParams, SamplingParams
from rosebatch.job.report.progress import Progress
from rosebatch.llm.beam_search import beam_search
from tests.helpers.byte_tokenizer import EOS
from tests.helpers.small_llama import save_llama, save_tokenizer
from tests.model.adapters.written import pair, write_adapter

LONGEST = 64
# Scores that are nearer to each other, as a share of them, may be in another order by rounding alone.
MARGIN = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beams")
    save_llama(folder, max_position_embeddings=LONGEST)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder, transformers):
    """Of transformers, saved again with an end token that is often likely."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 2
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def llm(folder, model):
    with LLM(folder, dtype="float32", max_num_seqs=16, block_size=4) as llm:
        yield llm


def prompts_of(count):
    numbers = random.Random(0)
    return [[numbers.randrange(256) for _ in range(1 + number % 9)] for number in range(count)]


def plain_search(model, prompt, params):
    """The best sequences with their log-probabilities, and the smallest relative difference that decided anything."""

    def ranked(beams):
        scored = []
        for total, tokens in beams:
            length = len(tokens) - (tokens[-1] == EOS)
            scored.append((total / length**params.length_penalty, total, tokens))
        scored.sort(key=lambda each: -each[0])
        scores = [score for score, _, _ in scored[: params.beam_width + 1]]
        gaps.extend((a - b) / abs(b) for a, b in pairwise(scores))
        return [(total, tokens) for _, total, tokens in scored[: params.beam_width]]

    gaps = []
    beams, finished = [(0.0, prompt)], []
    for _ in range(params.max_tokens):
        with torch.inference_mode():
            rows = model(torch.tensor([tokens for _, tokens in beams])).logits[:, -1].log_softmax(-1)
        grown = []
        for (total, tokens), row in zip(beams, rows, strict=True):
            values, ids = row.topk(2 * params.beam_width + 1)
            if EOS in ids[-2:]:
                gaps.append(float((values[-2] - values[-1]) / -values[-1]))
            for value, token in zip(values[:-1].tolist(), ids[:-1].tolist(), strict=True):
                ends = token == EOS and not params.ignore_eos
                (finished if ends else grown).append((total + value, [*tokens, token]))
        beams = ranked(grown)
    return ranked([*finished, *beams]), min(gaps)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(1, 7),
        BeamSearchParams(2, 1, length_penalty=0.0),
        BeamSearchParams(3, 9, length_penalty=2.5),
        BeamSearchParams(4, 6, length_penalty=-1.0),
        BeamSearchParams(10, 5),
        BeamSearchParams(4, 6, ignore_eos=True),
        BeamSearchParams(2, 20, length_penalty=0.5),
    ],
    ids=lambda params: f"{params.beam_width}-{params.max_tokens}-{params.length_penalty}",
)
def test_the_same_as_a_plain_search(llm, model, params):
    """A beam that takes another's place, or a score of another length, shows in one of the sequences."""
    prompts = prompts_of(16)
    outputs = llm.beam_search(prompts, params)
    compared = ended = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected, margin = plain_search(model, prompt, params)
        if margin < MARGIN:
            continue
        compared += 1
        assert [each.tokens for each in output.sequences] == [tokens for _, tokens in expected]
        for found, (total, tokens) in zip(output.sequences, expected, strict=True):
            assert found.cum_logprob == pytest.approx(total, abs=1e-4)
            ends = tokens[-1] == EOS and not params.ignore_eos
            assert (found.finish_reason, found.stop_reason) == (("stop", EOS) if ends else ("length", None))
            written = tokens[len(prompt) :]
            chosen = [row[token].logprob for row, token in zip(found.logprobs, written, strict=True)]
            assert sum(chosen) == pytest.approx(found.cum_logprob, abs=1e-5)
            ended += ends
    assert compared >= 12
    assert (ended > 0) is not params.ignore_eos


def test_texts_and_numbers_of_sequences(llm):
    """Texts have the prompt and the end token, as vLLM's have; one prompt is a list of one."""
    (output,) = llm.beam_search("The rose is", BeamSearchParams(3, 4), lora_request=None)
    (same,) = llm.beam_search([list(b"The rose is")], BeamSearchParams(3, 4, include_stop_str_in_output=True))
    assert output == same
    tokenizer = llm.get_tokenizer()
    assert len(output.sequences) == 3
    assert [each.text for each in output.sequences] == [tokenizer.decode(each.tokens) for each in output.sequences]
    assert all(each.text.startswith("The rose is") for each in output.sequences)
    assert llm.beam_search([], BeamSearchParams(3, 4)) == []


def test_beams_have_the_adapter_of_their_prompt(folder, model, tmp_path):
    """The first token was the adapter's, and the model alone went on."""
    lora = {
        name: write_adapter(tmp_path / name, pair(f"model.layers.{i}.mlp.down_proj", 32, 64)[0])
        for i, name in enumerate("ab")
    }
    params, found = BeamSearchParams(3, 6), {}
    with LLM(folder, dtype="float32", lora=lora) as llm:
        given = [{"prompt": "The rose is", "lora": name} for name in (*lora, None)]
        outputs = llm.beam_search(given, params)
    for name, output in zip((*lora, None), outputs, strict=True):
        with LLM(folder, dtype="float32", lora={name: lora[name]} if name else None) as merged:
            (expected,) = merged.beam_search("The rose is", params)
        found[name] = [each.tokens for each in output.sequences]
        assert found[name] == [each.tokens for each in expected.sequences]
    assert len({*map(str, found.values())}) == 3


def test_some_prompts_at_a_time(llm):
    """Each part of the prompts has its own beams."""
    prompts, params = prompts_of(5), BeamSearchParams(2, 5)
    assert llm.beam_search(prompts, params, concurrency_limit=2) == llm.beam_search(iter(prompts), params)


def counted_search(llm, prompts, params):
    """The outputs, and those of each step."""
    steps = []

    def generate(*given, **options):
        steps.append(llm.generate(*given, **options))
        return steps[-1]

    searched = beam_search(generate, prompts, params, llm.get_tokenizer(), len(prompts), Progress(None, enabled=False))
    return searched, steps


def test_beginnings_come_from_the_prefix_cache(llm):
    """Each step would compute all tokens of each beam again."""
    prompt = list(range(100, 133))
    _, steps = counted_search(llm, [prompt], BeamSearchParams(4, 12, ignore_eos=True))
    for step in steps[1:]:
        for output in step:
            assert len(output.prompt_token_ids) - output.num_cached_tokens <= 4
    assert len(steps) == 12


def test_a_search_ends_when_nothing_better_can_come(llm, model):
    """It went on to ``max_tokens`` with beams that were worse than all finished ones."""
    params = BeamSearchParams(2, 24, length_penalty=0.0)
    stopped = 0
    for prompt in prompts_of(8):
        (output,), steps = counted_search(llm, [prompt], params)
        expected, margin = plain_search(model, prompt, params)
        if margin >= MARGIN:
            assert [each.tokens for each in output.sequences] == [tokens for _, tokens in expected]
        stopped += len(steps) < 24
    assert stopped >= 4


def test_beams_as_long_as_the_model_allows(llm):
    """They failed as prompts that are too long."""
    prompt = list(range(LONGEST - 3))
    (output,) = llm.beam_search([prompt], BeamSearchParams(2, 9, ignore_eos=True))
    assert [(len(each.tokens), each.finish_reason) for each in output.sequences] == [(LONGEST, "length")] * 2


def test_a_beam_with_the_token_that_stands_for_an_image(llm):
    """It is no prompt of a model that sees, and failed the search."""
    (plain,) = llm.beam_search([[5, 6]], BeamSearchParams(2, 1, length_penalty=0.0))
    image = plain.sequences[0].tokens[-1]

    def generate(prompts, *given, **options):
        found = llm.generate(prompts, *given, **options)
        for output in found:
            if image in output.prompt_token_ids:
                output.error, output.error_code = "the prompt has an image's token", "invalid_prompt"
        return found

    params = BeamSearchParams(2, 4, length_penalty=0.0)
    (found,) = beam_search(generate, [[5, 6]], params, llm.get_tokenizer(), 1, Progress(None, enabled=False))
    assert [5, 6, image] in [each.tokens for each in found.sequences]
    assert sum(image in each.tokens[:-1] for each in found.sequences) == 0


def test_a_sampled_token_is_a_candidate(llm):
    """With a temperature, as in vLLM: beside the likeliest tokens stands the sampled one."""
    (output,) = llm.beam_search([[5, 6]], BeamSearchParams(1, 30, temperature=5.0, ignore_eos=True))
    assert 3 in {len(each) for each in output.sequences[0].logprobs}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"beam_width": 0}, r"beam_width must be in \[1, 10\], got 0"),
        ({"beam_width": 11}, r"beam_width must be in \[1, 10\], got 11"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"temperature": -1.0}, "temperature must be >= 0, got -1.0"),
        ({"length_penalty": 400}, r"length_penalty must be in \[-50, 50\], got 400"),
    ],
)
def test_impossible_parameters(given, told):
    with pytest.raises(ValueError, match=f"^{told}$"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **given})


def test_prompts_that_cannot_be_served(llm):
    """The place of a prompt was that in its part."""
    with pytest.raises(ValueError, match=r"^prompt 2: the prompt has 64 tokens"):
        llm.beam_search([[1], [2], list(range(LONGEST))], BeamSearchParams(2, 3), concurrency_limit=1)
    with pytest.raises(ValueError, match="lora_request=3 is not served"):
        llm.beam_search([[1]], BeamSearchParams(2, 3), lora_request=3)
    with pytest.raises(TypeError, match=r"^beam_search takes BeamSearchParams, got SamplingParams$"):
        llm.beam_search([[1]], SamplingParams())
