"""Vectors of encoders in fp32 equal transformers' hidden states, pooled, whatever the schedule was."""

import functools
import json
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.model.source import find_model
from tests.helpers.encoders import prompts_of, save_encoder
from tests.helpers.families import ENCODERS
from tests.helpers.running import run
from tests.helpers.threads_group import make_tensor_parallel_engine

POOLINGS = ("mean", "max", "cls", "last")
CPU = torch.device("cpu")
TOLERANCE = 1e-5
# One with a table of positions, with a bias, with windows, and a decoder's layers.
FAST = ("bert", "mpnet", "modernbert", "embeddinggemma")


@pytest.fixture(scope="session")
def encoders(transformers, tmp_path_factory):
    """Name -> folder, prompts, and transformers' hidden states of each, ``[T, H]`` fp64."""

    @functools.cache
    def made(name):
        folder, prompts = tmp_path_factory.mktemp(name), prompts_of(ENCODERS[name][1]["vocab_size"])
        model = save_encoder(name, folder)
        with torch.inference_mode():
            states = [model(torch.tensor([prompt])).last_hidden_state[0].double() for prompt in prompts]
        return folder, prompts, states

    return made


def pooled(states, pooling):
    vectors = [
        {"mean": each.mean(0), "max": each.amax(0), "cls": each[0], "last": each[-1]}[pooling] for each in states
    ]
    return torch.nn.functional.normalize(torch.stack(vectors)).numpy()


def embed(engine, prompts, pooling):
    params = PoolingParams(pooling=pooling)
    done = run(engine, [Request(number, tuple(prompt), pooling=params) for number, prompt in enumerate(prompts)])
    return np.array([done[number].pooled for number in range(len(prompts))], np.float32)


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "mpnet"])
def test_padding_tokens_inside_of_prompts(name, transformers, tmp_path, make_engine):
    """A text may have ``<pad>``: transformers counts positions without it, and vectors of such texts differed."""
    model = save_encoder(name, tmp_path)
    pad = model.config.pad_token_id
    prompts = [[7, pad, 9, 10], [pad, pad, 8, 9, pad], [11, 12, 13], [pad], [6, 7, pad, 8]]
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0].double() for prompt in prompts]
    for engine in (make_engine(tmp_path, seqs=1), make_engine(tmp_path, seqs=5)):
        np.testing.assert_allclose(embed(engine, prompts, "mean"), pooled(states, "mean"), rtol=0, atol=TOLERANCE)


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in ENCODERS]
)
def test_alone_batched_and_over_the_budget(name, encoders, make_engine):
    """A token that does not see those after it, or sees those of another prompt, would make another vector."""
    folder, prompts, states = encoders(name)
    # Most prompts do not fit the last budget: each of those has a step of its own.
    for limits in ({"seqs": 1}, {}, {"seqs": 3, "chunk": 20}):
        engine = make_engine(folder, **limits)
        for pooling in POOLINGS:
            found = embed(engine, prompts, pooling)
            np.testing.assert_allclose(found, pooled(states, pooling), rtol=0, atol=TOLERANCE)


DTYPES = ["float32", *(["bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]


@pytest.mark.parametrize(("name", "dtype"), list(product(("bert", "mpnet", "modernbert", "embeddinggemma"), DTYPES)))
def test_no_bit_depends_on_the_batch(name, dtype, encoders, make_engine):
    """A resumed run computes rows in other batches: its bytes must be those of a run without a break."""
    folder, prompts, _ = encoders(name)
    for pooling in POOLINGS:
        expected = embed(make_engine(folder, dtype, seqs=1), prompts, pooling)
        for limits in ({}, {"chunk": 50}, {"seqs": 3}):
            found = embed(make_engine(folder, dtype, **limits), prompts[::-1], pooling)[::-1]
            assert found.tobytes() == expected.tobytes(), limits


@pytest.mark.parametrize("name", ["bert", "mpnet", "gte", "nomic_bert", "embeddinggemma"])
def test_two_ranks(name, encoders):
    """The heads of a rank, and its bias on their scores, are its own."""
    folder, prompts, states = encoders(name)
    source = find_model(RunConfig(model=str(folder), dtype="float32"), CPU)
    limits = RunConfig(max_num_seqs=6, max_num_batched_tokens=140, tensor_parallel_size=2)
    engine = make_tensor_parallel_engine(source, limits, Switches.resolve({}, "cpu"), 2)
    np.testing.assert_allclose(embed(engine, prompts, "mean"), pooled(states, "mean"), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_the_second_type_of_tokens(name, encoders, make_engine, transformers):
    """Ids from the vocabulary's size on are of the second text of a pair; RoBERTa has one type."""
    folder, prompts, _ = encoders(name)
    engine, vocab, prompt = make_engine(folder), ENCODERS[name][1]["vocab_size"], prompts[3]
    moved = [*prompt[:5], *(token + vocab for token in prompt[5:])]
    if name == "roberta":
        with pytest.raises(RowError, match=r"must be in \[0, 199\)"):
            embed(engine, [moved], "mean")
        return
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    types = torch.tensor([[0] * 5 + [1] * (len(prompt) - 5)])
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), token_type_ids=types).last_hidden_state.double()
    found = embed(engine, [moved], "mean")
    np.testing.assert_allclose(found, pooled(states, "mean"), rtol=0, atol=TOLERANCE)


def test_an_encoder_keeps_nothing(encoders, make_engine):
    """Its memory is for steps: a cache would take what they need, and a prefix's states depend on what follows."""
    folder, prompts, _ = encoders("modernbert")
    engine = make_engine(folder)
    assert (engine.runner.cache.nbytes, engine.scheduler.blocks.pools, engine.prefix_cache) == (0, (), False)
    assert engine.max_model_len == 130
    for _ in range(2):
        params = PoolingParams(pooling="mean")
        done = run(engine, [Request(n, tuple(prompt), pooling=params) for n, prompt in enumerate(prompts)])
        assert {each.cached_tokens for each in done.values()} == {0}
    engine.scheduler.check_integrity()
    with pytest.raises(RowError, match="130 are allowed"):
        embed(engine, [[7] * 131], "mean")
    with pytest.raises(RowError, match="no output projection"):
        engine.add(Request(0, (1, 2), SamplingParams()))


def test_a_shorter_limit_takes_the_first_positions(encoders, make_engine):
    """Sentence-transformers' own limit is often half of the table: reading all of it, or the end, would be wrong."""
    folder, prompts, states = encoders("roberta")
    short = [(prompt, each) for prompt, each in zip(prompts, states, strict=True) if len(prompt) <= 50]
    found = embed(make_engine(folder, max_model_len=50), [prompt for prompt, _ in short], "mean")
    np.testing.assert_allclose(found, pooled([each for _, each in short], "mean"), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "mpnet", "modernbert", "nomic_bert", "gte"])
def test_with_the_head_of_their_training(name, transformers, encoders, make_engine, tmp_path):
    """Names have a prefix then. The head's tensors are not read, which ``check`` lists."""
    folder, prompts, states = encoders(name)
    base = transformers.AutoModel.from_pretrained(folder)
    whole = transformers.AutoModelForMaskedLM.from_config(base.config)
    whole.base_model.load_state_dict(base.state_dict(), strict=False)
    whole.save_pretrained(tmp_path)
    found = embed(make_engine(tmp_path), prompts, "mean")
    np.testing.assert_allclose(found, pooled(states, "mean"), rtol=0, atol=TOLERANCE)
    unread = find_model(RunConfig(model=str(tmp_path)), CPU).require_loadable()
    assert unread
    assert not any(".layer" in each and "layer_norm" not in each for each in unread)


def test_former_names_of_norms(encoders, make_engine, tmp_path):
    """BERT's first checkpoints, such as bert-base-uncased, have gamma and beta."""
    folder, prompts, states = encoders("bert")
    tensors = load_file(folder / "model.safetensors")
    former = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in former.items():
        tensors = {f"bert.{name.replace(new, old)}".replace("bert.bert.", "bert."): t for name, t in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    found = embed(make_engine(tmp_path), prompts, "mean")
    np.testing.assert_allclose(found, pooled(states, "mean"), rtol=0, atol=TOLERANCE)


def test_gte_in_the_form_of_its_authors(encoders, transformers, make_engine, tmp_path):
    """Their folders have another type, prefix and scaling of positions than transformers' class."""
    folder, prompts, _ = encoders("gte")
    factor, size = 4.0, 12
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    powers = torch.arange(0, size, 2) / size
    model.rotary_emb.inv_freq = (20_000.0 * factor) ** -powers / factor ** (2 / size)
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0].double() for prompt in prompts]
    save_file(
        {f"new.{n}": t for n, t in load_file(folder / "model.safetensors").items()}, tmp_path / "model.safetensors"
    )
    said = json.loads((folder / "config.json").read_text())
    del said["rope_parameters"]
    said |= {"rope_theta": 20_000, "rope_scaling": {"type": "ntk", "factor": factor}, "position_embedding_type": "rope"}
    said |= {"architectures": ["NewForMaskedLM"], "model_type": "new", "layer_norm_type": "layer_norm"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = embed(make_engine(tmp_path), prompts, "mean")
    np.testing.assert_allclose(found, pooled(states, "mean"), rtol=0, atol=TOLERANCE)


def test_nomic_in_the_form_of_its_authors(encoders, make_engine, tmp_path):
    """Their folders have GPT-2's names of sizes."""
    folder, prompts, states = encoders("nomic_bert")
    tensors = load_file(folder / "model.safetensors")
    save_file({f"bert.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    said = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "type_vocab_size": 2, "prenorm": False}
    said |= {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 80, "n_positions": 260, "vocab_size": 199}
    said |= {"activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "max_trained_positions": 130}
    said |= {"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_scaling_factor": 2}
    (tmp_path / "config.json").write_text(json.dumps(said))
    engine = make_engine(tmp_path)
    assert engine.max_model_len == 130
    np.testing.assert_allclose(embed(engine, prompts, "mean"), pooled(states, "mean"), rtol=0, atol=TOLERANCE)
