"""Settings of cuBLAS that ``--batch-invariant`` makes in front of its first product."""

import os

import torch

from rosebatch.ops.device import keep_products_whole


def test_cublas_gets_no_memory_for_parts(monkeypatch):
    """Its defaults split products of few rows. Who has set a size keeps it."""
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    preferred = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred.append)
    keep_products_whole()
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "1"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert preferred == ["cublaslt"]
