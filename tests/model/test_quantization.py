"""A format of weights is one file: here nibbles with a scale for each row, which only this test has."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.config.switches import Switches
from rosebatch.model.lazy_tensor import LazyTensor, join, stack
from rosebatch.model.quantization import formats
from rosebatch.model.quantization.formats import load_weight
from rosebatch.model.registry import build_model
from rosebatch.model.weights import RandomWeights, SafetensorsWeights, lazy_tensor
from rosebatch.ops.ops import Linear
from rosebatch.ops.select import select
from rosebatch.ops.shard import Shard
from rosebatch.ops.tensor_parallel import divide
from rosebatch.ops.weight import Weight
from tests.engine.family_models import FAMILIES
from tests.engine.toy_model import dense_attention
from tests.helpers.threads_group import Meeting, ThreadGroup

CPU = torch.device("cpu")
OPS = select(Switches.resolve({}, "cpu"))


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
    codes = lazy_tensor(weights, f"{name}.codes", (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    return Nibbles(codes, lazy_tensor(weights, f"{name}.scales", (*shape[:-1], 1), dtype=torch.float32))


def decoded(codes, scales):
    return (torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float() - 8) * scales


class Recorder(RandomWeights):
    """Keeps every tensor that a model asks for."""

    tensors: dict

    def get(self, name, shape, **options):
        return self.tensors.setdefault(name, super().get(name, shape, **options))


class Counted(SafetensorsWeights):
    """Counts the codes that are read."""

    codes = 0

    def get(self, name, *args, **options):
        tensor = super().get(name, *args, **options)
        self.codes += tensor.numel() * name.endswith(".codes")
        return tensor


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Makes a folder with nibbles and one with the values that they stand for, of one model."""
    monkeypatch.setattr(formats, "FORMATS", [*formats.FORMATS, find])

    def make(config):
        recorder = Recorder(torch.float32, CPU)
        recorder.tensors = {}
        build_model(config, OPS, recorder)
        packed, dense = {}, {}
        for name, tensor in recorder.tensors.items():
            if tensor.ndim < 2:
                packed[name] = dense[name] = tensor
                continue
            generator = torch.Generator().manual_seed(len(name))
            codes = torch.randint(256, (*tensor.shape[:-1], tensor.shape[-1] // 2), generator=generator)
            scales = torch.rand((*tensor.shape[:-1], 1), generator=generator) / 20
            packed |= {f"{name}.codes": codes.to(torch.uint8), f"{name}.scales": scales}
            dense[name] = decoded(codes.to(torch.uint8), scales)
        for form, tensors in {"packed": packed, "dense": dense}.items():
            (tmp_path / form).mkdir()
            save_file(tensors, tmp_path / form / "model.safetensors")
        return tmp_path / "packed", tmp_path / "dense"

    return make


def attend_whole(spec, qkv, wanted=None):
    """Attention over one sequence without a cache."""
    return dense_attention(replace(spec, rotary=None), qkv)


def all_logits(config, weights, size):
    """Of each rank, computed by as many threads."""
    meeting = Meeting(size)

    def run(rank):
        ops = OPS if size == 1 else divide(OPS, ThreadGroup(Shard(rank, size), meeting))
        with torch.inference_mode():
            model = build_model(config, ops, weights)
            return model.logits(model.forward(torch.arange(9), torch.arange(9), attend_whole))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["smollm3", "glm4", "qwen3_moe", "mixtral"])
def test_a_format_is_cut_joined_and_reordered(name, size, folders):
    """q, k and v and gate and up are joined, or rows are reordered, in a format that no file of the package names."""
    config = FAMILIES[name]
    packed, dense = folders(config)
    expected = all_logits(config, SafetensorsWeights(dense, torch.float32, CPU), size)
    out = all_logits(config, SafetensorsWeights(packed, torch.float32, CPU), size)
    assert all(torch.equal(each, same) for each, same in zip(out, expected, strict=True))
    assert expected[0].std() > 0.01


def test_a_shard_reads_its_part_alone(folders):
    """A rank that read all of a large model would need the memory of the whole machine."""
    config = FAMILIES["smollm3"]
    weights = Counted(folders(config)[0], torch.float32, CPU)
    name, shape = "model.layers.0.mlp.down_proj.weight", (config.hidden_size, config.intermediate_size)
    part = load_weight(weights, name, shape).columns(range(6, 12)).columns(range(2, 6))
    assert weights.codes == 0
    assert part.shape == (config.hidden_size, 4)
    assert torch.equal(part.dense(), load_weight(weights, name, shape).dense()[:, 8:12])
    assert weights.codes == config.hidden_size * (4 + config.intermediate_size) // 2


def test_a_format_with_a_product_of_its_own(folders):
    """A kernel that reads the codes must not get the values."""

    class Own(Linear):
        bias = None

        def __call__(self, x):
            return x

        product = __call__

    class WithProduct(Nibbles):
        def linear(self, bias, device):
            return Own() if device == "cpu" else None

    weights = SafetensorsWeights(folders(FAMILIES["smollm3"])[0], torch.float32, CPU)
    weight = find(weights, "model.layers.0.mlp.down_proj.weight", (32, 24))
    assert isinstance(OPS.linear(WithProduct(weight.codes, weight.scales), None), Own)
    assert isinstance(OPS.head(WithProduct(weight.codes, weight.scales)), Own)
    assert not isinstance(OPS.linear(weight, None), Own)
