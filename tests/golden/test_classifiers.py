"""Classes of prompts in fp32 equal transformers', whatever the schedule was: encoders and decoders."""

import functools

import numpy as np
import pytest
import torch

from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.scoring import Scoring
from tests.helpers.encoders import prompts_of
from tests.helpers.families import ENCODERS, FAMILIES, MODELS
from tests.helpers.running import run
from tests.helpers.wholes import tiny_whole

TOLERANCE = 1e-5
CLASSIFY, RAW = PoolingParams(task="classify"), PoolingParams(task="classify", activation="none")
# A head of each kind.
FAST = ("bert", "roberta", "distilbert", "modernbert", "llama")
_DECODERS = ("llama", "gpt2", "qwen3", "mixtral", "gemma2", "gemma3", "qwen3_5")
# By names of configs; those with a class that classifies.
SHAPES = {**{name: ENCODERS[name] for name in ENCODERS if name != "embeddinggemma"}}
SHAPES |= {name: {**MODELS, **FAMILIES}[name] for name in _DECODERS}
LABELS = {0: "bad", 1: "so so", 2: "good"}
# What each name of a shape is made with, so that every kind of head and of output occurs.
OPTIONS = {
    "bert": {"problem_type": "multi_label_classification"},
    "roberta": {"id2label": {0: "relevant"}, "label2id": {"relevant": 0}},
    "distilbert": {"problem_type": "regression"},
    "modernbert": {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    "llama": {"id2label": {0: "reward"}, "label2id": {"reward": 0}},
}


def class_of(transformers, kind):
    """The class of a kind's config that classifies whole prompts."""
    return getattr(transformers, f"{kind.removesuffix('Config')}ForSequenceClassification")


@pytest.fixture(scope="session")
def classifiers(transformers, tmp_path_factory):
    """Name -> folder, prompts, and transformers' outputs before the activation, ``[N, labels]`` fp64."""

    @functools.cache
    def made(name):
        kind, values = SHAPES[name]
        torch.manual_seed(0)
        own = {"id2label": LABELS, "label2id": {label: i for i, label in LABELS.items()}, "pad_token_id": 0}
        config = getattr(transformers, kind)(**{**values, **own, **OPTIONS.get(name, {})}, initializer_range=0.2)
        model = class_of(transformers, kind)(config).float().eval()
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0 if key.endswith("weight") else 0.0, 0.2)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        prompts = prompts_of(values["vocab_size"])
        with torch.inference_mode():
            ids = [torch.tensor([prompt]) for prompt in prompts]
            outputs = [model(each, attention_mask=torch.ones_like(each)).logits[0].double() for each in ids]
        return folder, prompts, torch.stack(outputs)

    return made


def classify(engine, prompts, params):
    done = run(engine, [Request(number, tuple(prompt), pooling=params) for number, prompt in enumerate(prompts)])
    return np.array([done[number].pooled for number in range(len(prompts))], np.float64)


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in SHAPES]
)
def test_classes_alone_batched_and_from_the_prefix_cache(name, classifiers, make_engine):
    """Another token's state, a head without its activation, bias or norm, or another activation of its outputs."""
    folder, prompts, outputs = classifiers(name)
    problem = OPTIONS.get(name, {}).get("problem_type")
    expected = outputs.softmax(1) if outputs.shape[1] > 1 else outputs.sigmoid()
    if problem is not None:
        expected = outputs if problem == "regression" else outputs.sigmoid()
    chunked = make_engine(folder, seqs=3, chunk=128, block_size=4, blocks=60)
    for engine in (make_engine(folder, seqs=1), chunked, chunked):
        np.testing.assert_allclose(classify(engine, prompts, CLASSIFY), expected, rtol=0, atol=TOLERANCE)
        scale = outputs.abs().max().item()
        np.testing.assert_allclose(classify(engine, prompts, RAW), outputs, rtol=0, atol=TOLERANCE * max(scale, 1))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_at_the_end_of_a_prompt(name, transformers, classifiers, make_engine):
    """Many reward models pad with their end token, and chats end with it: transformers takes the token before it."""
    folder, _, _ = classifiers(name)
    model = class_of(transformers, SHAPES[name][0]).from_pretrained(folder).float().eval()
    prompts = [[5, 6, 7], [5, 6, 7, 0], [5, 6, 7, 0, 0], [5, 0, 6], [0, 0, 5], [0], [0, 0]]
    with torch.inference_mode():
        ids = [torch.tensor([prompt]) for prompt in prompts]
        expected = torch.stack([model(each, attention_mask=torch.ones_like(each)).logits[0] for each in ids])
    found = classify(make_engine(folder, chunk=4), prompts, RAW)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(expected.abs().max().item(), 1))
    assert (found[0] == found[1]).all() == (name == "llama")


def test_a_whole_model_that_classifies(transformers, tmp_path, make_engine):
    """Gemma 3 with a head: labels are the whole's, and layers those of its text part. It was refused."""
    config = tiny_whole("Gemma3ForConditionalGeneration").config
    own = {"id2label": LABELS, "label2id": {label: i for i, label in LABELS.items()}}
    model = transformers.Gemma3ForSequenceClassification(type(config)(**{**config.to_dict(), **own})).float().eval()
    model.save_pretrained(tmp_path)
    prompts = [[5, 6, 7], [8] * 30, [9]]
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([prompt])).logits[0] for prompt in prompts])
    assert expected.shape == (3, len(LABELS))
    found = classify(make_engine(tmp_path, chunk=4), prompts, RAW)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(expected.abs().max().item(), 1))


def test_the_model_knows_its_labels(classifiers, make_engine):
    """They are in the order of their numbers, as text in JSON."""
    folder, prompts, _ = classifiers("bert")
    engine = make_engine(folder)
    done = run(engine, [Request(0, tuple(prompts[0]), pooling=CLASSIFY)])[0]
    assert done.finish_reason == "classified"
    assert done.request.pooling.labels == tuple(LABELS.values())
    assert done.request.pooling.activation == "sigmoid"


def test_vectors_and_classes_of_one_step(classifiers, make_engine):
    """Both kinds come from one forward pass: either could go through the other's head."""
    folder, prompts, _ = classifiers("bert")
    engine = make_engine(folder, chunk=2000)
    kinds = [CLASSIFY, *(PoolingParams(pooling=each) for each in ("cls", "mean", "max"))]
    requests = [Request(i, tuple(prompt), pooling=kinds[i % 4]) for i, prompt in enumerate(prompts)]
    mixed = run(engine, requests)
    for request in requests:
        alone = run(make_engine(folder), [request])[request.id]
        assert mixed[request.id].pooled.tobytes() == alone.pooled.tobytes()
        assert len(alone.pooled) == (3 if request.pooling is CLASSIFY else ENCODERS["bert"][1]["hidden_size"])


def test_what_a_model_cannot_do(classifiers, goldens, make_engine):
    """A classifier wrote tokens of random logits; a model without a head ended the job."""
    folder, prompts, _ = classifiers("llama")
    prompt = tuple(prompts[2])
    for request in (Request(0, prompt, SamplingParams()), Request(0, prompt, scoring=Scoring(1, (1,)))):
        with pytest.raises(RowError, match="no output projection"):
            make_engine(folder).add(request)
    with pytest.raises(RowError, match="no classification head"):
        make_engine(goldens("llama").folder).add(Request(0, prompt, pooling=CLASSIFY))
