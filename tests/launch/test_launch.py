"""What is said before anything is loaded."""

from types import SimpleNamespace

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.launch import launch
from rosebatch_kernels.common.device import Device


@pytest.fixture
def on_cuda(monkeypatch):
    """Plans for a GPU, wherever the test runs, and finds a model that nobody loads."""
    launch._warn_once.cache_clear()
    monkeypatch.setattr(launch, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(
        launch,
        "find_model",
        lambda *args, **options: SimpleNamespace(folder=None, config=SimpleNamespace(num_state_layers=0), state=""),
    )
    yield launch.plan_launch
    launch._warn_once.cache_clear()


def test_one_line_about_a_switch_without_effect(on_cuda, capsys):
    """``--no-batched-sampling`` beside the fused sampler ran the same code in silence. Two engines need one line."""
    for _ in range(2):
        assert on_cuda(RunConfig.of("any", batched_sampling=False)).switches.batched_sampling is False
    line = "rosebatch: warning: --no-batched-sampling has no effect while --fused-sampler is on\n"
    assert capsys.readouterr() == ("", line)


def test_nothing_is_said_of_switches_that_act(on_cuda, capsys):
    on_cuda(RunConfig.of("any", batched_sampling=False, fused_sampler=False, prefix_cache=True))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        (89, "this GPU is sm_89: kernel sizes are smaller ones that fit its shared memory; they were measured"),
        (100, "this GPU is sm_100: kernel sizes are an H100's; they were measured"),
        (90, ""),
    ],
)
def test_one_line_about_a_gpu_whose_sizes_were_not_measured(on_cuda, capsys, monkeypatch, arch, said):
    """A user who sees no speed must know that nobody has tuned the kernels for this card."""
    monkeypatch.setattr("rosebatch.ops.device.device_of", lambda device: Device.of_arch(arch, 100))
    for _ in range(2):
        on_cuda(RunConfig.of("any"))
    _, err = capsys.readouterr()
    assert err == (f"rosebatch: warning: {said} on an H100 only\n" if said else "")
