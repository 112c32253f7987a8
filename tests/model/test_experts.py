"""Loading of experts: each apart or all in one tensor, and random ones."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.config.model import ExpertsConfig, RopeConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import UserError
from rosebatch.model.experts import load_experts
from rosebatch.model.families.mixtral import Mixtral
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.select import select
from rosebatch.ops.shard import Shard
from tests.helpers.model_configs import small_config

CPU = torch.device("cpu")
EXPERTS = {"layers": (True,), "num_experts": 5, "experts_per_token": 2, "expert_size": 12}
CONFIG = small_config(rope=RopeConfig(), experts=ExpertsConfig(**EXPERTS))
OPS = select(Switches.resolve({}, "cpu"))


def stored(names):
    """The same experts by these names: (of the block, of gate, up and down), or in single tensors."""
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 5, 12, 32, generator=generator)
    down, router = torch.randn(5, 32, 12, generator=generator), torch.randn(5, 32, generator=generator)
    if names is None:
        gate_up = torch.cat((gate, up), 1)
        return {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down, "mlp.gate.weight": router}
    block, *matrices = names
    tensors = {f"{block}.gate.weight": router}
    for name, tensor in zip(matrices, (gate, up, down), strict=True):
        tensors |= {f"{block}.experts.{i}.{name}.weight": tensor[i].clone() for i in range(5)}
    return tensors


QWEN, MIXTRAL = ("mlp", "gate_proj", "up_proj", "down_proj"), ("block_sparse_moe", "w1", "w3", "w2")


def test_every_form_gives_the_same_experts(tmp_path):
    """gate, up and down mixed up, or an expert in another's place, would still have the right shape."""
    outs = []
    for i, names in enumerate((QWEN, None, MIXTRAL, None)):
        folder = tmp_path / str(i)
        folder.mkdir()
        save_file({f"model.layers.0.{name}": t for name, t in stored(names).items()}, folder / "model.safetensors")
        weights = SafetensorsWeights(folder, torch.float32, CPU)
        given = {"names": Mixtral.expert_names} if i >= 2 else {}
        x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
        outs.append(load_experts(CONFIG, OPS, weights, "model.layers.0.", **given)(x).value)
        # Three processes have a part of each expert; together they give the same.
        shares = [replace(OPS, shard=Shard(rank, 3)) for rank in range(3)]
        parts = [load_experts(CONFIG, ops, weights, "model.layers.0.", **given)(x).value for ops in shares]
        torch.testing.assert_close(sum(parts), outs[0])
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_missing_expert_is_named(tmp_path):
    """A shard that is missing must not leave a matrix of random memory."""
    tensors = stored(QWEN)
    del tensors["mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path, torch.float32, CPU)
    with pytest.raises(UserError, match=r"no tensor 'mlp\.experts\.3\.up_proj\.weight'"):
        load_experts(CONFIG, OPS, weights, "")


def test_random_experts_are_single_tensors():
    """Thousands of small random tensors would take minutes."""
    names = []

    class Weights(RandomWeights):
        def get(self, name, shape, **options):
            names.append(name)
            return super().get(name, shape, **options)

    load_experts(CONFIG, OPS, Weights(torch.float32, CPU), "")
    assert len(names) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": 0}, "num_experts must be in"),
        ({"experts_per_token": 6}, r"experts_per_token must be in \[1, 5\], got 6"),
        ({"expert_size": 0}, "expert_size must be in"),
        ({"shared_size": -1}, "shared_size must be in"),
    ],
)
def test_impossible_shapes(values, message):
    """A router cannot choose more experts than there are; the kernel would read past them."""
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**{**EXPERTS, **values})
