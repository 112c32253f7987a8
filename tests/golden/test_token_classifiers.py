"""Classes of tokens and rewards of steps in fp32 equal transformers', whatever the schedule was."""

import functools
import json

import numpy as np
import pytest
import torch
from torch import nn

from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.model.families.qwen import ARCHITECTURES as QWEN
from tests.helpers.encoders import prompts_of
from tests.helpers.families import ENCODERS, FAMILIES, MODELS
from tests.helpers.running import run
from tests.helpers.tiny_engines import random_model

TOLERANCE = 1e-5
CLASSIFY, RAW = PoolingParams(task="classify"), PoolingParams(task="classify", activation="none")
# A head of each kind.
FAST = ("bert", "modernbert-biases", "llama", "gpt2")
DECODERS = (
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma2", "phi3", "gpt2", "gpt_neox", "stablelm",
    "starcoder2", "glm4", "smollm3", "gpt_oss", "qwen3_moe", "qwen2_moe",
)  # fmt: skip
_SHAPES = {**MODELS, **FAMILIES, **{name: ENCODERS[name] for name in ENCODERS if name != "embeddinggemma"}}
SHAPES = {name: shape for name, shape in _SHAPES.items() if name in ENCODERS or name in DECODERS}
LABELS = {0: "O", 1: "B-PER", 2: "I-PER"}
# What each name of a shape is made with, so that every kind of output occurs.
OPTIONS = {
    "roberta": {"problem_type": "multi_label_classification"},
    "distilbert": {"id2label": {0: "rare"}, "label2id": {"rare": 0}},
    "modernbert-biases": {"classifier_bias": True},
    "qwen3": {"token_classification_bias": False},
}
STEP = QWEN["Qwen2ForCausalLM"].rewards["ForProcessRewardModel"].step_token


def outputs_of(model, prompts):
    """Of each prompt ``[T, labels]`` fp64, before the activation."""
    with torch.inference_mode():
        ids = [torch.tensor([prompt]) for prompt in prompts]
        return [model(each, attention_mask=torch.ones_like(each)).logits[0].double() for each in ids]


@pytest.fixture(scope="session")
def classifiers(transformers, tmp_path_factory):
    """Name -> folder, prompts, and transformers' outputs."""

    @functools.cache
    def made(name):
        kind, values = SHAPES[name]
        own = {"id2label": LABELS, "label2id": {label: i for i, label in LABELS.items()}, "pad_token_id": 0}
        given = {**values, **own, **OPTIONS.get(name, {})}
        config = getattr(transformers, kind)(**given, initializer_range=0.2)
        stem = kind.removesuffix("TextConfig").removesuffix("Config")
        model = random_model(config, getattr(transformers, f"{stem}ForTokenClassification"))
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        prompts = prompts_of(values["vocab_size"])
        return folder, prompts, outputs_of(model, prompts)

    return made


def classify(engine, prompts, params, labels):
    """Of each prompt ``[N, labels]``."""
    done = run(engine, [Request(number, tuple(prompt), pooling=params) for number, prompt in enumerate(prompts)])
    return [np.array(done[number].pooled, np.float64).reshape(-1, labels) for number in range(len(prompts))]


def require_equal(found, expected):
    assert len(found) == len(expected)
    scale = max(1.0, max(each.abs().max().item() for each in expected))
    for own, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, right, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in SHAPES]
)
def test_tokens_alone_batched_and_with_the_prefix_cache(name, classifiers, make_engine):
    """A token of another chunk or row, another head, or tokens left out that the prefix cache has."""
    folder, prompts, outputs = classifiers(name)
    labels = outputs[0].shape[1]
    sigmoid = labels == 1 or "problem_type" in OPTIONS.get(name, {})
    expected = [each.sigmoid() if sigmoid else each.softmax(1) for each in outputs]
    chunked = make_engine(folder, seqs=3, chunk=128, block_size=4, blocks=60)
    for engine in (make_engine(folder, seqs=1), chunked, chunked):
        require_equal(classify(engine, prompts, CLASSIFY, labels), expected)
    require_equal(classify(chunked, prompts, RAW, labels), outputs)


@pytest.mark.whole
def test_chunks_change_no_bit(classifiers, make_engine):
    """Numbers of earlier chunks got lost."""
    folder, prompts, _ = classifiers("llama")
    alone = classify(make_engine(folder, seqs=1), prompts, RAW, 3)
    engine = make_engine(folder, seqs=4, chunk=7)
    found = classify(engine, prompts, RAW, 3)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in alone]
    assert not engine.runner.pooling._numbers


class Rewards(nn.Module):
    """Qwen2.5-Math-PRM's own code: two products over all states. ``labels`` is 1 for Qwen2.5-Math-RM's."""

    def __init__(self, model, size, labels):
        super().__init__()
        self.model = model
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, labels))

    @torch.inference_mode()
    def forward(self, prompt):
        return self.score(self.model(torch.tensor([prompt])).last_hidden_state[0]).double()


@pytest.fixture(scope="session")
def rewards(transformers, tmp_path_factory):
    """Name of the class, outputs of its head -> its folder and model."""

    def made(name, labels):
        values = {**MODELS, **FAMILIES}["qwen2"][1] | {"vocab_size": STEP + 9, "hidden_size": 32, "head_dim": 8}
        values |= {"num_hidden_layers": 2, "intermediate_size": 48}
        model = random_model(transformers.Qwen2Config(**values, initializer_range=0.2), transformers.Qwen2Model)
        whole = Rewards(model, 32, labels)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder, state_dict=whole.state_dict())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
        return folder, whole

    return made


def test_rewards_of_steps(rewards, make_engine):
    """The probability of another step, or of a token that ends none; a prefix that is not taken from the cache."""
    folder, model = rewards("Qwen2ForProcessRewardModel", 2)
    question = list(range(5, 45))
    prompts = [[*question, *then] for then in ([STEP], [7, STEP, 8, 9, STEP], [STEP, STEP, 3])] + [[STEP], [4, STEP]]
    expected = [model(prompt)[torch.tensor(prompt) == STEP].softmax(1) for prompt in prompts]
    for engine in (make_engine(folder, seqs=1), make_engine(folder, seqs=3, chunk=16, block_size=4, blocks=60)):
        for params in (CLASSIFY, RAW):
            require_equal(classify(engine, prompts, params, 2), expected)
    done = run(engine, [Request(0, tuple(prompts[1]), pooling=CLASSIFY)])[0]
    assert done.cached_tokens == 40
    with pytest.raises(RowError, match=f"steps that end with token {STEP}: the prompt has none"):
        engine.add(Request(1, (5, 6), pooling=CLASSIFY))


def test_the_reward_of_a_whole_answer(rewards, make_engine):
    """A reward model of the same family has one number, of the last token."""
    folder, model = rewards("Qwen2ForRewardModel", 1)
    prompts = [[5, 6, 7], list(range(9, 30))]
    require_equal(classify(make_engine(folder), prompts, CLASSIFY, 1), [model(prompt)[-1:] for prompt in prompts])


def test_what_a_head_for_tokens_cannot_do(classifiers, make_engine):
    """It scored a pair by the first of its numbers."""
    folder, prompts, _ = classifiers("bert")
    with pytest.raises(RowError, match="a score needs a head for whole prompts"):
        make_engine(folder).add(Request(0, tuple(prompts[0]), pooling=PoolingParams(task="score")))
