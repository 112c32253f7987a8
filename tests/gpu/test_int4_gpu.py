"""On a GPU, a whole model whose weights stay 4-bit: in graphs, prompts of many rows, decode steps of few."""

import random

import pytest

from rosebatch_kernels.int4.int4_linear import Int4Linear
from tests.helpers.running import greedy
from tests.helpers.tiny_engines import engine_of
from tests.model.quantization import test_awq, test_compressed_tensors, test_gptq
from tests.model.quantization.test_folders import write

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
SIZES = {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 256}
ROWS = test_compressed_tensors.words(4)
FORMS = {
    "awq": (lambda name, shape: test_awq.matrix(name, shape, 64), {**test_awq.CONFIG, "group_size": 64}),
    "gptq": (test_gptq.matrices(4, 32, symmetric=True), test_gptq.config_of(4, 32, sym=True)),
    "desc_act": (test_gptq.matrices(4, 128, shuffled=True), test_gptq.config_of(4, 128, desc_act=True)),
    "rows": (
        test_compressed_tensors.words(4)[0],
        test_compressed_tensors.config_of(**test_compressed_tensors.words(4)[1]),
    ),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_the_values(form, dtype, tmp_path, monkeypatch):
    """Weights in bf16 are rounded, codes with their scales are not: a few tokens may differ."""
    matrix, config = FORMS[form]
    write(tmp_path, matrix, config, **SIZES)
    made = []
    init = Int4Linear.__init__
    monkeypatch.setattr(Int4Linear, "__init__", lambda self, *a, **k: made.append(self) or init(self, *a, **k))
    numbers = random.Random(0)
    prompts = [[numbers.randrange(256) for _ in range(numbers.choice([1, 9, 40, 100]))] for _ in range(64)]
    tokens = []
    for folder, on in (("dense", False), ("packed", True)):
        engine = engine_of(
            tmp_path / folder,
            dtype,
            "cuda",
            switches={"quantized_linear": on},
            max_num_seqs=64,
            kv_cache_memory=1 << 28,
        )
        tokens.append(greedy(engine, prompts, NEW_TOKENS))
        assert bool(made) == on
        assert engine.stats.graph_replays > 0
    first = sum(a[0] == b[0] for a, b in zip(*tokens, strict=True))
    assert first >= 56
