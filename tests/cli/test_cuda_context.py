"""The early context must be the one in which PyTorch works, and runs without a GPU must not get one."""

import ctypes
import threading

import pytest

from rosebatch.cli import cuda_context
from tests.helpers.waiting import PATIENCE_SECONDS


class Driver:
    """Notes every call."""

    def __init__(self, init=0):
        self.calls, self.init = [], init

    def cuInit(self, flags):  # noqa: N802
        self.calls.append(("cuInit", flags))
        return self.init

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802
        self.calls.append(("cuDevicePrimaryCtxRetain", device))
        return 0


@pytest.mark.parametrize(("init", "retained"), [(0, True), (100, False)], ids=["a GPU", "none"])
def test_create(monkeypatch, init, retained):
    """Without a GPU the primary context must not be retained."""
    driver = Driver(init)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    cuda_context.create()
    assert driver.calls == [("cuInit", 0), *[("cuDevicePrimaryCtxRetain", 0)] * retained]


def test_without_a_driver(monkeypatch):
    """On a machine without a GPU nothing fails: PyTorch reports it later, if a GPU was requested."""

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_context.create()


@pytest.mark.parametrize(("device", "wanted"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_a_run_on_the_cpu_takes_no_gpu_memory(monkeypatch, device, wanted):
    """``--device cpu`` must not create a context."""
    created = threading.Event()
    monkeypatch.setattr(cuda_context, "create", created.set)
    cuda_context.create_in_background(device)
    assert created.wait(PATIENCE_SECONDS if wanted else 0.1) is wanted


@pytest.mark.gpu
def test_pytorch_works_in_it():
    """A second context would take the time all over again."""
    import torch

    torch.zeros(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    before, after = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(before)) == 0
    cuda_context.create()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(after), 0) == 0
    assert before.value == after.value
