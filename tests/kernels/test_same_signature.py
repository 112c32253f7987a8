"""A kernel can stand wherever its reference stands: every public function takes and returns the same."""

import inspect
from importlib import import_module

import pytest


def functions(module):
    public = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in public if f.__module__ == module.__name__ and not name.startswith("_")}


@pytest.mark.parametrize("operator", ["norm", "mlp", "kv_cache"])
def test_same_signature(operator):
    kernels = functions(import_module(f"rosebatch_kernels.{operator}.kernel"))
    references = functions(import_module(f"rosebatch_kernels.{operator}.reference"))
    assert kernels
    for name, kernel in kernels.items():
        assert inspect.signature(kernel) == inspect.signature(references[name]), name
