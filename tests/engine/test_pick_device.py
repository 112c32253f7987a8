"""The device of a run."""

import pytest
import torch

from rosebatch.core.errors import FlagError
from rosebatch.engine.load import pick_device


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_amds_gpus_do_not_pass_for_cuda(monkeypatch, name):
    """PyTorch for ROCm says that CUDA is available; kernels then failed one by one, deep in a run."""
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(FlagError, match=r"^this PyTorch is for AMD GPUs \(ROCm 6\.4\.0\), .*: --device cpu$"):
        pick_device(name)
    assert pick_device("cpu") == torch.device("cpu")
