"""Norms divided between the products around them: the same hidden states, with fewer kernels."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from rosebatch.model.registry import build_model
from rosebatch.select_ops import select
from rosebatch.toggles import Toggles
from rosebatch_kernels.linear import residual, streamed
from rosebatch_kernels.linear.streamed import StreamedLinear
from rosebatch_kernels.norm import kernel as norm
from tests.engine.family_models import FAMILIES
from tests.engine.small_models import MODELS, Weights


class HalfWeights(Weights):
    """The interpreter multiplies no bf16 matrices, so these are fp16, and small enough for it."""

    def __init__(self, name):
        super().__init__(name)
        self.dtype = torch.float16

    def get(self, name, shape, **options):
        return super().get(name, shape, **options).to(options.get("dtype") or torch.float16)


class FirstHeads:
    """Stands for attention: the result is q."""

    def __call__(self, spec, qkv):
        return qkv[:, : spec.num_heads * spec.head_dim].contiguous()


@pytest.fixture
def launches(monkeypatch):
    """The launches of the norm's kernel and of the one in its place, and products that add in fp16 too."""
    found = []

    def watch(module, name):
        real = getattr(module, name)

        def noted(*args, **options):
            found.append(name)
            return real(*args, **options)

        monkeypatch.setattr(module, name, noted)

    monkeypatch.setattr(StreamedLinear, "adds", StreamedLinear.streams)
    watch(norm, "_launch")
    watch(residual, "add_product")
    return found


def hidden_states(name, toggles, rows):
    config = MODELS.get(name) or FAMILIES[name]
    return forward(build_model(config, select(toggles, "cuda"), HalfWeights(name)), config, rows)


def forward(model, config, rows):
    ids = torch.arange(rows, dtype=torch.int32) % config.vocab_size
    return model.forward(ids, torch.zeros(rows, dtype=torch.int32), FirstHeads())


# Granite scales what it adds, and has biases. Layers of OLMo 2 begin with no norm, those of Gemma end with one. Experts
# take the same rows as their router.
@pytest.mark.parametrize(
    ("name", "norms", "products"),
    [("llama", 2, 3), ("granite", 2, 3), ("olmo2", 4, 0), ("gemma", 5, 0), ("qwen3_moe", 4, 1)],
)
def test_the_same_hidden_states(name, norms, products, launches):
    """A norm that is left out, or applied twice, changes what a model says."""
    on = replace(Toggles.resolve({}, "cuda"), norm_in_linear=True)
    found = hidden_states(name, on, rows=5)
    with_switch = launches.copy()
    launches.clear()
    expected = hidden_states(name, replace(on, norm_in_linear=False), rows=5)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-5, atol=2**-6)
    assert "add_product" not in launches
    assert (with_switch.count("_launch"), with_switch.count("add_product")) == (norms, products)


def test_many_rows_have_their_norms(launches):
    """cuBLAS multiplies them, which knows no factors."""
    on = replace(Toggles.resolve({}, "cuda"), norm_in_linear=True)
    expected = hidden_states("llama", replace(on, norm_in_linear=False), rows=70)
    torch.testing.assert_close(hidden_states("llama", on, rows=70), expected, rtol=0, atol=0)
    assert "add_product" not in launches


@pytest.mark.parametrize(("name", "additions"), [("llama", 4), ("granite", 0), ("gemma", 0)])
def test_cublas_adds_many_rows_to_the_residual(name, additions, monkeypatch):
    """It adds in place: what a layer still reads, or the table of embeddings, must not change."""
    config = MODELS.get(name) or FAMILIES[name]
    model = build_model(config, select(Toggles.resolve({}, "cuda"), "cuda"), HalfWeights(name))
    expected = forward(model, config, rows=70)
    real, calls = StreamedLinear.add_, []
    monkeypatch.setattr(streamed, "TUNED", replace(streamed.TUNED, least_rows_onto=70))
    monkeypatch.setattr(StreamedLinear, "add_", lambda *args: calls.append(args) or real(*args))
    found = forward(model, config, rows=70)
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-5, atol=2**-6)
    assert len(calls) == additions
    torch.testing.assert_close(forward(model, config, rows=70), found, rtol=0, atol=0)
