"""Counting zero weights, beside an engine on the same model."""

import sys

import pytest
import torch

from benchmarks import hp1_sparsity
from benchmarks.hp1_sparsity import CountingAttention, CountingMlp, MlpZeros, count_zeros
from rosebatch.bench.scenario import configs_dir
from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.config.toml_file import load_toml
from rosebatch.core.errors import UserError
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.load import load_engine
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.registry import build_model
from rosebatch.model.source import find_model
from rosebatch.ops.select import select

PATH = str(configs_dir() / "models" / "tiny-hp1.toml")
CONFIG = load_toml(configs_dir() / "models" / "tiny-hp1.toml", ModelConfig)
CPU = torch.device("cpu")


@pytest.fixture
def model():
    return build_model(CONFIG, select(Switches.resolve({}, "cpu")), RandomWeights(torch.float32, CPU))


@pytest.fixture
def prompts():
    return torch.randint(CONFIG.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))


def test_it_is_the_models_attention(model, prompts):
    """Other attention would count another model's zeros: the next tokens must be the engine's."""
    attention = CountingAttention(40)
    with torch.inference_mode():
        hidden = model.forward(prompts.flatten(), torch.arange(40).repeat(3), attention)
        following = model.logits(hidden.view(3, 40, -1)[:, -1]).argmax(-1).tolist()
    source = find_model(RunConfig(model=PATH, load_format="dummy", dtype="float32"), CPU)
    engine = load_engine(source, RunConfig(), Switches.resolve({}, "cpu"), CPU).engine
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    requests = [Request(i, tuple(p), sampling) for i, p in enumerate(prompts.tolist())]
    done = {completion.request.id: completion.token_ids[0] for completion in engine.run(requests)}
    assert [done[i] for i in range(3)] == following


def test_shares(model, prompts):
    """Without a filter the negative half is zero, and a larger sigma gives more; fewer keys are zero for all heads."""
    shares = [count_zeros(model, prompts, sigma) for sigma in (0.0, 1.0, 2.0)]
    assert [len(layers) for layers in shares] == [CONFIG.num_layers] * 3
    for low, middle, high in zip(*shares, strict=True):
        assert 0.4 < low.weights < 0.6
        assert low.weights < middle.weights < high.weights < 1
        assert all(layer.values < layer.weights for layer in (low, middle, high))


def test_shares_of_the_mlp():
    """Zeros are elements of the product behind ReLU; a block counts only where all its channels are zero."""
    x = torch.tensor([[0.0, 1, 0, 0], [0, 0, -2, 0], [0, 0, 0, 0]])
    mlp = CountingMlp(lambda kind, gate_up, x, down: gate_up(x), 2)
    assert torch.equal(mlp("relu_mul", lambda x: 2 * x, x, None), 2 * x)
    assert mlp.zeros == [MlpZeros(pytest.approx(10 / 12), pytest.approx(4 / 6))]


def test_a_block_that_does_not_divide_the_mlp(monkeypatch):
    """A rest of another size would count as a block."""
    monkeypatch.setattr(sys, "argv", ["hp1_sparsity", "--model", PATH, "--block", "24"])
    with pytest.raises(UserError, match="--block 24 does not divide the 128 channels of the MLP"):
        hp1_sparsity.main()


def test_the_table(monkeypatch, capsys):
    """A line for each layer, and one for their mean."""
    monkeypatch.setattr(sys, "argv", ["hp1_sparsity", "--model", PATH, "--tokens", "20"])
    hp1_sparsity.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["layer", *map(str, range(CONFIG.num_layers)), "all"]
    assert lines[0][1:4] == ["own", "filters", "MLP"]
    # Random gates are negative half of the time, and sixteen of them at once hardly ever.
    assert 40 < float(lines[-1][4].rstrip("%")) < 60
    assert float(lines[-1][6].rstrip("%")) < 1


def test_other_models_are_refused(monkeypatch):
    """Softmax has no zeros."""
    monkeypatch.setattr(sys, "argv", ["hp1_sparsity", "--model", str(configs_dir() / "models" / "tiny-llama.toml")])
    with pytest.raises(UserError, match=r"--model tiny-llama\.toml is not an HP1 model"):
        hp1_sparsity.main()
