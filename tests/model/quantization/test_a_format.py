"""A format of weights is one file: here nibbles with a scale for each row, which only this test has."""

from dataclasses import dataclass, replace

import pytest
import torch

from rosebatch.model.lazy_tensor import LazyTensor, join, stack
from rosebatch.model.quantization.forms import FORMS, load_weight
from rosebatch.model.weights import SafetensorsWeights, lazy_stored, lazy_tensor
from rosebatch.ops.ops import Linear
from rosebatch.ops.weight import Weight
from tests.engine.family_models import FAMILIES
from tests.model.quantization.numbers import RANKS
from tests.model.quantization.same_logits import CPU, OPS, require_same_logits, write_both
from tests.model.quantization.test_folders import require_same_answers, write


@dataclass(frozen=True)
class Nibbles(Weight):
    """``codes [..., out, in / 2]`` uint8, the first of two in the low half; ``scales [..., out, 1]`` fp32."""

    codes: LazyTensor
    scales: LazyTensor

    @property
    def shape(self):
        return *self.codes.shape[:-1], 2 * self.codes.shape[-1]

    def rows(self, indices):
        return replace(self, codes=self.codes.take(-2, indices), scales=self.scales.take(-2, indices))

    def columns(self, indices):
        return replace(self, codes=self.codes.take(-1, range(indices.start // 2, indices.stop // 2)))

    def join(self, others):
        weights = [self, *others]
        return replace(self, codes=join([w.codes for w in weights], -2), scales=join([w.scales for w in weights], -2))

    def stack(self, others):
        weights = [self, *others]
        return replace(self, codes=stack([w.codes for w in weights]), scales=stack([w.scales for w in weights]))

    def dense(self):
        return decoded(self.codes.read(), self.scales.read())


def find(weights, name, shape):
    if weights.shape(f"{name}.codes") is None:
        return None
    codes = lazy_stored(weights, f"{name}.codes", (*shape[:-1], shape[-1] // 2))
    return Nibbles(codes, lazy_tensor(weights, f"{name}.scales", (*shape[:-1], 1), dtype=torch.float32))


def decoded(codes, scales):
    return (torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float() - 8) * scales


class Counted(SafetensorsWeights):
    """Counts the codes that are read."""

    codes = 0

    def stored(self, name, *args):
        tensor = super().stored(name, *args)
        self.codes += tensor.numel() * name.endswith(".codes")
        return tensor


class Form:
    layouts = ()
    find = staticmethod(find)


def encoded(name, values):
    generator = torch.Generator().manual_seed(len(name))
    codes = torch.randint(256, (*values.shape[:-1], values.shape[-1] // 2), generator=generator).to(torch.uint8)
    scales = torch.rand((*values.shape[:-1], 1), generator=generator) / 20
    return {f"{name}.codes": codes, f"{name}.scales": scales}, decoded(codes, scales)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", ["smollm3", "glm4", "qwen3_moe", "mixtral"])
def test_a_format_is_cut_joined_and_reordered(name, size, tmp_path):
    """q, k and v and gate and up are joined, or rows are reordered, in a format that no file of the package names."""
    require_same_logits(tmp_path, FAMILIES[name], encoded, Form, size)


def test_a_format_is_a_line_of_the_list(tmp_path, monkeypatch):
    """From config.json to tokens: a second list of methods, on the way of any run, would refuse the folder."""
    monkeypatch.setitem(FORMS, "nibbles", lambda config: Form())
    write(tmp_path, lambda name, shape: encoded(f"{name}.weight", torch.empty(shape)), {"quant_method": "nibbles"})
    require_same_answers(tmp_path)


def test_a_shard_reads_its_part_alone(tmp_path):
    """A rank that read all of a large model would need the memory of the whole machine."""
    config = FAMILIES["smollm3"]
    weights = Counted(write_both(tmp_path, config, encoded)[0], torch.float32, CPU, Form)
    name, shape = "model.layers.0.mlp.down_proj.weight", (config.hidden_size, config.intermediate_size)
    part = load_weight(weights, name, shape).columns(range(6, 12)).columns(range(2, 6))
    assert weights.codes == 0
    assert part.shape == (config.hidden_size, 4)
    assert torch.equal(part.dense(), load_weight(weights, name, shape).dense()[:, 8:12])
    assert weights.codes == config.hidden_size * (4 + config.intermediate_size) // 2


def test_a_format_with_a_product_of_its_own(tmp_path):
    """A kernel that reads the codes must not get the values."""

    class Own(Linear):
        bias = None

        def __call__(self, x):
            return x

        product = __call__

    class WithProduct(Nibbles):
        def linear(self, bias, device):
            return Own() if device is None else None

    weights = SafetensorsWeights(write_both(tmp_path, FAMILIES["smollm3"], encoded)[0], torch.float32, CPU)
    weight = find(weights, "model.layers.0.mlp.down_proj.weight", (32, 24))
    assert isinstance(OPS.linear(WithProduct(weight.codes, weight.scales), None), Own)
    assert isinstance(OPS.head(WithProduct(weight.codes, weight.scales)), Own)
    assert not isinstance(OPS.linear(weight, None), Own)
