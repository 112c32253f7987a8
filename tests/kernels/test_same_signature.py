"""A kernel can stand wherever its reference stands: every public function takes and returns the same."""

import inspect
from importlib import import_module

import pytest

# A sum over GPUs inside of the kernel, the fp8 form that it leaves, and what its programs follow from.
KERNELS_ONLY = {"all_reduce", "group", "sizes", "device"}


def signature(kernel):
    found = inspect.signature(kernel)
    return found.replace(parameters=[each for name, each in found.parameters.items() if name not in KERNELS_ONLY])


def functions(module):
    public = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in public if f.__module__ == module.__name__ and not name.startswith("_")}


@pytest.mark.parametrize(
    "operator",
    [
        "norm",
        "mlp",
        "linear",
        "kv_cache",
        "qkv",
        "feedback",
        "drafts",
        "logits",
        "logprobs",
        "uclip",
        "sampling",
        "fp8",
        "bidirectional_attention",
        "short_conv",
        "adapters",
        "latent_attention",
    ],
)
def test_same_signature(operator):
    kernels = functions(import_module(f"rosebatch_kernels.{operator}.kernel"))
    references = functions(import_module(f"rosebatch_kernels.{operator}.reference"))
    assert kernels
    for name, kernel in kernels.items():
        assert signature(kernel) == inspect.signature(references[name]), name


@pytest.mark.parametrize(
    ("attention", "others", "formulas"),
    [
        ("paged_attention", set(), {"softmax"}),
        ("hp1", set(), {"probabilities"}),
        ("gated_delta", {"gated_norm"}, {"advance"}),
        ("mamba2", {"gate_norm"}, {"advance"}),
    ],
)
def test_same_signature_of_attention(attention, others, formulas):
    """Its kernels stand in modules of their names, beside what their callers need to know of them."""
    references = functions(import_module(f"rosebatch_kernels.{attention}.reference"))
    names = {"decode", "prefill"} | others
    assert references.keys() == names | formulas
    for name in names:
        kernel = getattr(import_module(f"rosebatch_kernels.{attention}.{name}"), name)
        assert signature(kernel) == inspect.signature(references[name]), name
