"""HP1 against ``PlainHP1``: what the tests of all architectures leave out."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import UserError
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.load import load_engine
from rosebatch.model.source import find_model
from rosebatch_kernels.hp1 import torch_attention
from tests.golden.conftest import NEW_TOKENS
from tests.helpers.plain_hp1 import PlainHP1
from tests.helpers.running import run

MODELS = ["hp1", "hp1-options"]
CPU = torch.device("cpu")
TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny-hp1.toml"


@pytest.mark.matrix
@pytest.mark.parametrize("limits", [{}, {"chunk": 16, "block_size": 4, "blocks": 28}], ids=["plenty", "cramped"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_batch_of_seven(model, prefix_cache, limits, goldens, make_engine, greedy_tokens):
    """A batch that fills no tile, with and without preemptions, must not change a token."""
    golden = goldens(model)
    engine = make_engine(golden.folder, seqs=7, prefix_cache=prefix_cache, **limits)
    assert greedy_tokens(engine, golden.prompts[:16]) == golden.expected[:16]
    assert engine.stats.max_running == 7 or limits
    assert (engine.stats.preemptions > 0) is bool(limits)


@pytest.mark.parametrize("limits", [{}, {"chunk": 16, "block_size": 4, "blocks": 28}], ids=["plenty", "cramped"])
@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities(model, limits, goldens, make_engine):
    """Those of prompts and completions equal one plain pass over all tokens."""
    golden = goldens(model)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    requests = [Request(i, tuple(p), sampling) for i, p in enumerate(golden.prompts[:16])]
    plain = PlainHP1.from_pretrained(golden.folder)
    for completion in run(make_engine(golden.folder, **limits), requests).values():
        tokens = [*completion.request.prompt_token_ids, *completion.token_ids]
        expected = plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        actual = [each.logprob for each in (*completion.prompt_logprobs, *completion.logprobs)]
        torch.testing.assert_close(torch.tensor(actual), expected[range(len(actual)), tokens[1:]], rtol=1e-5, atol=1e-4)


def test_sigma_and_gamma_are_felt(goldens, make_engine, greedy_tokens, tmp_path):
    """If the model ignored one of them, the tests above would not notice."""
    golden = goldens("hp1")
    for name, value in (("sigma", 0.0), ("gamma", 0.7)):
        weights = load_file(golden.folder / "model.safetensors")
        changed = {n: torch.full_like(w, value) if n.endswith(f"self_attn.{name}") else w for n, w in weights.items()}
        folder = tmp_path / name
        folder.mkdir()
        save_file(changed, folder / "model.safetensors")
        (folder / "config.json").write_text((golden.folder / "config.json").read_text())
        assert greedy_tokens(make_engine(folder), golden.prompts[:8]) != golden.expected[:8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gates_keep_the_checkpoints_precision(dtype, goldens, make_engine):
    """Rounding gates to the run's dtype would change every weight of attention."""
    weights = load_file(goldens("hp1").folder / "model.safetensors")
    layer = make_engine(goldens("hp1").folder, dtype).runner.model.layers[1]
    prefix = "model.layers.1."
    assert torch.equal(layer.attention.gate.gamma, weights[f"{prefix}self_attn.gamma"])
    assert torch.equal(layer.attention.gate.taps, (weights[f"{prefix}self_attn.sigma"] / 3)[:, None].expand(-1, 3))
    assert layer.post_mlp.gamma == weights[f"{prefix}post_mlp_layernorm.gamma"].item()
    assert layer.attention.qk_norm.k_gamma == weights[f"{prefix}self_attn.k_norm.gamma"].item()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.sigma",
        "model.layers.0.self_attn.gamma",
        "model.layers.1.self_attn.q_norm.alpha",
        "model.layers.1.pre_mlp_layernorm.gamma",
        "model.layers.1.post_mlp_layernorm.alpha",
        "model.norm.gamma",
        "lm_head.weight",
    ],
)
def test_weights_that_are_missing_or_misshapen(name, goldens, make_engine, tmp_path):
    """Each kind of tensor is checked, with its name in the message."""
    folder = goldens("hp1").folder
    weights = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({**weights, name: torch.ones(5, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"'{name}' has shape \(5, 3\)"):
        make_engine(tmp_path)
    weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors")
    if name == "lm_head.weight":
        # Such a model can embed.
        assert not make_engine(tmp_path).generates
        return
    with pytest.raises(UserError, match=rf"weights have no tensor '.*{name.partition('.')[2]}'"):
        make_engine(tmp_path)


def test_random_weights_are_alive(monkeypatch, greedy_tokens):
    """About 70 % of attention's weights are zero, as in the trained model, and outputs depend on the prompt.

    A clip that does nothing or cuts off everything, or a sum that grows without bounds, would still run and make a
    benchmark meaningless.
    """
    zeros, original = [], torch_attention.probabilities

    def probabilities(scores, gate):
        weights = original(scores, gate)
        rows, keys = scores.shape[-2:]
        if rows == keys:
            zeros.append((weights[..., *torch.tril_indices(rows, keys)] == 0).float().mean())
        return weights

    monkeypatch.setattr(torch_attention, "probabilities", probabilities)
    source = find_model(RunConfig(model=str(TINY), load_format="dummy", dtype="float32"), CPU)
    engine = load_engine(source, RunConfig(kv_cache_memory=1 << 24), Switches.resolve({}, "cpu"), CPU).engine
    prompts = [[(7 * i * i + 3 * k * i + k) % 1000 for i in range(64)] for k in range(10)]
    tokens = greedy_tokens(engine, prompts)
    assert len(zeros) == 2
    assert 0.65 < sum(zeros) / 2 < 0.75
    assert len({each[-1] for each in tokens}) > 5
    assert all(len(set(each)) > 5 for each in tokens)
