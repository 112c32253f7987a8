"""Products of many rows that cuBLAS adds to the residual: the same hidden states."""

import pytest
import torch

pytest.importorskip("triton")
from rosebatch.config.switches import Switches
from rosebatch.model.registry import build_model
from rosebatch.ops.select import select
from rosebatch_kernels.linear.streamed import StreamedLinear
from tests.engine.family_models import FAMILIES
from tests.engine.small_models import MODELS, Weights

ROWS = 70


class HalfWeights(Weights):
    """The interpreter multiplies no bf16 matrices, so these are fp16, and small enough for it."""

    def __init__(self, name):
        super().__init__(name)
        self.dtype = torch.float16

    def get(self, name, shape, **options):
        return super().get(name, shape, **options).to(options.get("dtype") or torch.float16)


def first_heads(spec, qkv, wanted=None):
    """In place of attention: the result is q."""
    return qkv[:, : spec.num_heads * spec.head_dim].contiguous()


# Granite scales what it adds, and has biases; Gemma norms it first.
@pytest.mark.parametrize(("name", "additions"), [("llama", 4), ("granite-biases", 0), ("gemma2", 0)])
def test_the_same_hidden_states(name, additions, monkeypatch):
    """It adds in place: what a layer still reads, or the table of embeddings, must not change."""
    config = MODELS.get(name) or FAMILIES[name]
    model = build_model(config, select(Switches.resolve({}, "cuda"), "cuda"), HalfWeights(name))
    ids = torch.arange(ROWS, dtype=torch.int32) % config.vocab_size

    def hidden_states():
        return model.forward(ids, torch.zeros(ROWS, dtype=torch.int32), first_heads)

    expected = hidden_states()
    assert torch.isfinite(expected).all()
    real, calls = StreamedLinear.add_, []
    monkeypatch.setattr(StreamedLinear, "adds_in_place", lambda self, x: len(x) >= ROWS and self.bias is None)
    monkeypatch.setattr(StreamedLinear, "add_", lambda *args: calls.append(args) or real(*args))
    found = hidden_states()
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-5, atol=2**-6)
    assert len(calls) == additions
    torch.testing.assert_close(hidden_states(), found, rtol=0, atol=0)
