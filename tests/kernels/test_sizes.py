"""Tables of kernels' sizes: which entry a device gets, and that launchers go by what they are given."""

import pytest
import torch

from rosebatch.config.switches import Switches
from rosebatch.ops.select import select
from rosebatch_kernels.common.device import INTERPRETER, Device
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.norm import kernel as norm
from rosebatch_kernels.paged_attention import sizes as attention
from tests.helpers.launches import note_launches


@pytest.mark.parametrize(
    ("arch", "entry"),
    [(80, "small"), (86, "small"), (89, "small"), (90, "measured"), (100, "measured"), (120, "small")],
)
def test_the_entry_of_a_device(arch, entry):
    """Sizes of a larger shared memory than the GPU has fail at launch; smaller ones than it needs are slow."""
    entry = "measured" if arch in (90, 100) else "small"
    assert table("measured", sm_86="small").of(Device.of_arch(arch, 100)) == entry
    assert table("measured").of(Device.of_arch(arch, 100)) == "measured"


def test_an_entry_of_its_own():
    assert table("measured", sm_86="small", sm_89="own").of(Device.of_arch(89, 100)) == "own"


@pytest.mark.parametrize(("arch", "entry"), [(90, "measured"), (100, "blackwell"), (103, "blackwell"), (120, "small")])
def test_the_newest_of_entries_with_as_much_memory(arch, entry):
    assert table("measured", sm_100="blackwell", sm_86="small").of(Device.of_arch(arch, 100)) == entry


def test_an_unknown_architecture_is_taken_for_a_small_one():
    assert table("measured", sm_86="small").of(Device.of_arch(75, 40)) == "small"


def test_measured_sizes_of_attention_are_left_alone_on_hopper():
    assert attention.SIZES.of(Device.of_arch(90, 132)) is attention.SIZES.measured
    assert attention.SIZES.of(INTERPRETER) is attention.SIZES.measured


def test_a_second_table_changes_what_is_launched(monkeypatch):
    """The operators take the entry of their device once; a launcher with a table of its own would ignore it."""
    second = norm.Sizes(tile=64, warps=((0, 2),))
    monkeypatch.setattr(norm, "SIZES", table(norm.Sizes(), sm_89=second))
    launched = []
    note_launches(monkeypatch, lambda name, grid, options: launched.append((name, grid[0], options["num_warps"])))
    x, weight = torch.ones(6, 32), torch.ones(32)
    for device in (INTERPRETER, Device.of_arch(89, 4)):
        monkeypatch.setattr("rosebatch.ops.select.device_of", lambda _, device=device: device)
        select(Switches.resolve({}, "cuda"), "cuda").rms_norm(x, weight, 1e-6)
    assert launched == [("_norm", 1, 4), ("_norm", 3, 2)]
