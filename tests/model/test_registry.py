"""The registry: families are a file each, and it counts what their layers weigh."""

import math
from pathlib import Path

import msgspec
import pytest
import torch

import rosebatch
from rosebatch.config.switches import Switches
from rosebatch.core.errors import UserError
from rosebatch.engine.metrics.roofline import weight_bytes
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.registry import ARCHITECTURES, build_model
from rosebatch.ops.select import select
from tests.engine.family_models import FAMILIES as FAMILY_MODELS
from tests.engine.small_models import CPU, MODELS


class CountedWeights(RandomWeights):
    """Counts the elements of all matrices but norms, and tables of positions: a step reads one row of these."""

    def __init__(self):
        super().__init__(torch.float32, CPU)
        self.elements = 0

    def get(self, name, shape, **options):
        few = len(shape) < 2 or any(part in name for part in ("wpe", "norm", "bias", "conv1d", "conv.conv", "A_log"))
        self.elements += 0 if few else math.prod(shape)
        return super().get(name, shape, **options)


@pytest.mark.parametrize("name", ["starcoder2", "falcon_h1", "phi3", "granite", "gpt_neox"])
def test_a_family_is_one_file(name):
    """Its config, its class and its registration: a second place would be forgotten for the next family."""
    root = Path(rosebatch.__file__).parent
    # A kind of tokenizer has a family's name, and so do GGUF files of Bamba.
    others = root / "model" / "gguf" / "tokenizer.py", root / "model" / "families" / "bamba.py"
    files = [path for path in root.rglob("*.py") if path not in others]
    naming = [path.relative_to(root).as_posix() for path in files if name in path.read_text().lower()]
    assert naming == [f"model/families/{name}.py"]
    assert name in {each.model_type for each in ARCHITECTURES.values()}


@pytest.mark.parametrize("name", {**MODELS, **FAMILY_MODELS})
def test_the_floor_counts_the_matrices_that_are_loaded(name):
    """A gate too many in the count would lower the floor that a report divides by."""
    weights = CountedWeights()
    config = {**MODELS, **FAMILY_MODELS}[name]
    build_model(config, select(Switches.resolve({}, "cpu")), weights)
    assert weight_bytes(config, itemsize=1) == weights.elements


@pytest.mark.parametrize(
    ("family", "activation"), [("phi3", "gelu_fast"), ("gpt_neox", "silu"), ("nemotron_h", "relu")]
)
def test_an_activation_that_the_mlp_cannot_have(family, activation):
    """A shape in TOML may name any: it was a KeyError in the middle of a run."""
    config = msgspec.structs.replace(FAMILY_MODELS[family], activation=activation)
    with pytest.raises(UserError, match=f"activation '{activation}' is not supported; supported are"):
        build_model(config, select(Switches.resolve({}, "cpu")), RandomWeights(torch.float32, CPU))


def test_weights_that_are_applied_in_fp32():
    """Rounded to 16 bits, 1 + weight would lose most of the weight; transformers rounds the embedding's factor."""
    ops = select(Switches.resolve({}, "cpu"))
    gemma, olmo2 = (
        build_model(FAMILY_MODELS[name], ops, RandomWeights(torch.bfloat16, CPU)) for name in ("gemma3", "olmo2")
    )
    assert gemma.norm.dtype == gemma.layers[0].mlp_norm.dtype == torch.float32
    assert gemma.mixers[0].qk_norm.q_weight.dtype == torch.float32
    assert olmo2.norm.dtype == olmo2.layers[0].post_mlp_norm.dtype == torch.float32
    assert gemma.embedding_multiplier == torch.tensor(32**0.5, dtype=torch.bfloat16).item()
