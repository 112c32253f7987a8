"""Two GPUs that hold a quantized model together choose the tokens of one."""

import random

import pytest
import torch

from benchmarks.quantize_folder import quantize
from rosebatch.config.run import RunConfig
from rosebatch.launch.launch import launch
from rosebatch_kernels.experts import kernel as experts
from rosebatch_kernels.experts.packed import Packed
from rosebatch_kernels.fp8.fp8_linear import Fp8Linear
from rosebatch_kernels.int4.int4_linear import Int4Linear
from tests.gpu import test_fp8_gpu, test_int4_gpu
from tests.gpu.test_ranks_gpu import end
from tests.helpers.running import greedy
from tests.helpers.tiny_engines import random_model
from tests.model.quantization.test_folders import write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

SIZES = {**test_fp8_gpu.SIZES, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
MIXTURE = {**SIZES, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
PROMPTS = 64


@pytest.fixture(scope="module")
def dense(transformers, tmp_path_factory):
    """Folders of a Llama and of a mixture of experts in 16 bits."""
    folders = {}
    for name, values in (("Llama", SIZES), ("Qwen3Moe", MIXTURE)):
        folders[name] = tmp_path_factory.mktemp(name)
        config = getattr(transformers, f"{name}Config")(**values)
        random_model(config, plain=True).save_pretrained(folders[name])
    return folders


@pytest.fixture
def kept(monkeypatch):
    """The kinds of quantized layers that are made or run."""
    found = set()

    def record(kind):
        init = kind.__init__
        monkeypatch.setattr(kind, "__init__", lambda self, *a, **k: found.add(kind) or init(self, *a, **k))

    for kind in (Fp8Linear, Int4Linear):
        record(kind)

    def parts(*args, of=experts.parts, **options):
        found.update(type(each) for each in args[3:5])
        return of(*args, **options)

    monkeypatch.setattr(experts, "parts", parts)
    return found


def tokens(folder, ranks, **settings):
    numbers = random.Random(0)
    prompts = [[numbers.randrange(200) for _ in range(numbers.choice([1, 9, 40, 100]))] for _ in range(PROMPTS)]
    config = RunConfig(
        model=str(folder),
        dtype="bfloat16",
        device="cuda",
        max_num_seqs=PROMPTS,
        kv_cache_memory=1 << 28,
        tensor_parallel_size=ranks,
        **settings,
    )
    engine = launch(config).engine
    found = greedy(engine, prompts, 4)
    assert engine.stats.graph_replays > 0
    end(engine)
    return found


def require_same(folder, least, **settings):
    one, two = (tokens(folder, ranks, **settings) for ranks in (1, 2))
    assert sum(a[0] == b[0] for a, b in zip(one, two, strict=True)) >= least
    assert len({each[0] for each in one}) > PROMPTS / 8


def require_same_of(dense, form, packed, least, **settings):
    """Of a folder that is quantized into ``packed``, or at load."""
    if form == "at load":
        require_same(dense, least, quantization="fp8", **settings)
    else:
        quantize(dense, form, packed)
        require_same(packed, least, **settings)


@pytest.mark.parametrize("form", test_int4_gpu.FORMS)
def test_weights_of_4_bits(form, tmp_path, kept):
    """Groups that a rank's columns cut, zeros of packed columns, and ``desc_act``, whose columns are of all groups."""
    matrix, config = test_int4_gpu.FORMS[form]
    write(tmp_path, matrix, config, **test_int4_gpu.SIZES)
    require_same(tmp_path / "packed", 56)
    assert Int4Linear in kept


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("form", ["fp8", "fp8-block", "at load"])
def test_weights_of_fp8(form, kv_cache_dtype, dense, tmp_path, kept):
    """Rows of inputs have the scale of a rank's columns: as with decoded weights, some tokens differ."""
    require_same_of(dense["Llama"], form, tmp_path / "packed", 48, kv_cache_dtype=kv_cache_dtype)
    assert Fp8Linear in kept


@pytest.mark.parametrize("form", ["fp8", "fp8-block", "int4", "mxfp4", "at load"])
def test_experts(form, dense, tmp_path, kept):
    """A rank has some channels of all experts: with those of another expert, nearly all tokens would differ."""
    require_same_of(dense["Qwen3Moe"], form, tmp_path / "packed", 40)
    assert Packed in kept
