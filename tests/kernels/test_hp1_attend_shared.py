"""HP1: keys that rows share, attended to once for all; the decode kernel's result is the same as without."""

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.shared_keys import MEMBERS
from tests.kernels.decode_step import check, with_shared_keys
from tests.kernels.hp1_exact import general_gate
from tests.kernels.test_hp1_decode import make_gated_step

decode = Launchers("hp1.decode").decode

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(
    ("kv_heads", "group", "size", "block_size"), [(2, 1, 64, 16), (1, 2, 128, 64), (2, 3, 24, 24), (1, 4, 80, 8)]
)
def test_one_group(kv_heads, group, size, block_size, append, dtype, device, randn, assert_close):
    """Rows need not be neighbours, and one has ended; the first own key's filter reaches back into the shared ones."""
    positions, rows, keys = [200, 197, 3, 250, 192, 193], [5, 0, 1, 3, 4], 192
    shape = kv_heads, group, size, block_size
    step = make_gated_step(positions, *shape, dtype, device, randn, append=append, idle=(2, 3), shared=[(rows, keys)])
    check(with_shared_keys(decode, [(rows, 0, keys, 0)]), step, assert_close)


@pytest.mark.parametrize("taps", [1, 2, 3, 8])
@pytest.mark.parametrize("relu_pre", [True, False])
def test_filters_over_the_ends_of_parts(taps, relu_pre, dtype, device, randn, assert_close):
    """Parts, a group inside, and own keys each begin with the scores of the keys in front; each head has its taps."""
    everyone, few = list(range(5)), [2, 4, 3]
    gate = general_gate(4, randn, device, taps=taps, relu_pre=relu_pre)
    shared = [(everyone, 64), (few, 160)]
    step = make_gated_step([64, 90, 160, 200, 163], 2, 2, 24, 16, dtype, device, randn, gate=gate, shared=shared)
    items = [(everyone, 0, 37, 0), (everyone, 37, 64, 1), (few, 64, 66, 2), (few, 66, 160, 3)]
    check(with_shared_keys(decode, items), step, assert_close)


@pytest.mark.parametrize(("rotary", "qk_norm"), [(True, "uclip"), (12, "uclip_each"), (0, "uclip"), (True, "rms")])
def test_norm_and_rotation(rotary, qk_norm, dtype, device, randn, assert_close):
    """Each query has its row's position."""
    options = {"rotary": rotary, "qk_norm": qk_norm, "shared": [([0, 1, 2], 32)], "idle": (1,)}
    step = make_gated_step([32, 40, 77], 2, 3, 24, 16, dtype, device, randn, **options)
    check(with_shared_keys(decode, [([0, 1, 2], 0, 32, 0)]), step, assert_close)


@pytest.mark.thorough
def test_more_rows_than_an_item_has(device, randn, assert_close):
    rows = list(range(MEMBERS + 1))
    positions = [32 + row % 5 for row in rows]
    step = make_gated_step(positions, 1, 2, 24, 16, torch.float32, device, randn, shared=[(rows, 32)])
    check(with_shared_keys(decode, [(rows[:MEMBERS], 0, 32, 0), (rows[MEMBERS:], 0, 32, 0)]), step, assert_close)


def test_own_keys_in_several_splits(device, randn, assert_close):
    """The first split alone adds what is shared."""
    step = make_gated_step([64, 700], 1, 2, 64, 16, torch.float32, device, randn, shared=[([0, 1], 64)])
    assert step.workspace.num_splits(2) > 1
    check(with_shared_keys(decode, [([0, 1], 0, 64, 0)]), step, assert_close)


def test_nobody_shares_anything(device, randn, assert_close):
    step = make_gated_step([3, 16], 1, 2, 24, 16, torch.float32, device, randn, shared=[([0], 0)])
    check(with_shared_keys(decode, []), step, assert_close)
