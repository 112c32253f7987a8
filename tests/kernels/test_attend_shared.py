"""Keys that rows share, attended to once for all: the decode kernel's result is the same as without."""

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.shared_keys import MEMBERS
from tests.kernels.decode_step import check, make_step, with_shared_keys

decode = Launchers("paged_attention.decode").decode

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(
    ("kv_heads", "group", "size", "block_size"),
    [(2, 1, 64, 16), (1, 2, 128, 64), (2, 4, 24, 24), (1, 7, 80, 16), (1, 3, 20, 48), (1, 16, 64, 16), (1, 4, 512, 16)],
)
def test_one_group(kv_heads, group, size, block_size, append, dtype, device, randn, assert_close):
    """Rows of a group need not be neighbours, and one has ended; others share nothing."""
    positions, rows, keys = [100, 97, 3, 150, 96, 120], [5, 0, 1, 3, 4], 2 * 48
    shape = kv_heads, group, size, block_size
    step = make_step(positions, *shape, dtype, device, randn, append=append, idle=(2, 3), shared=[(rows, keys)])
    check(with_shared_keys(decode, [(rows, 0, keys, 0)]), step, assert_close)


@pytest.mark.parametrize(("rotary", "qk_norm"), [(True, "rms"), (12, None), (True, "layer"), (0, "rms")])
def test_norm_and_rotation(rotary, qk_norm, dtype, device, randn, assert_close):
    """Each query has its row's position and its head's weights."""
    options = {"rotary": rotary, "qk_norm": qk_norm, "shared": [([0, 1, 2], 32)], "idle": (1,)}
    step = make_step([32, 0 + 40, 77], 2, 3, 24, 16, dtype, device, randn, **options)
    check(with_shared_keys(decode, [([0, 1, 2], 0, 32, 0)]), step, assert_close)


@pytest.mark.parametrize(("soft_cap", "with_sinks"), [(1.5, False), (0.0, True), (1.5, True)])
def test_soft_cap_and_sinks(soft_cap, with_sinks, device, randn, assert_close):
    """A sink counts once, not once more for each part."""
    sinks = torch.linspace(-2, 4, 4) if with_sinks else None
    options = {"soft_cap": soft_cap, "sinks": sinks, "scale": 0.6, "shared": [([0, 1], 64)]}
    step = make_step([64, 700], 2, 2, 24, 16, torch.float32, device, randn, **options)
    check(with_shared_keys(decode, [([0, 1], 0, 64, 0)]), step, assert_close)


def test_parts_and_nested_groups(dtype, device, randn, assert_close):
    """Keys of a group in several parts, at ends that are no tile's; a group inside of another; two that lie apart."""
    everyone, few, apart = list(range(7)), [2, 6, 3], [7, 9, 8]
    positions = [600, 200, 500, 421, 192, 250, 433, 130, 128, 129, 77]
    shared = [(everyone, 192), (few, 416), (apart, 128)]
    step = make_step(positions, 1, 2, 64, 16, dtype, device, randn, shared=shared)
    items = [(everyone, 0, 112, 0), (everyone, 112, 192, 1), (few, 192, 208, 2), (few, 208, 416, 3)]
    items += [(apart, 0, 128, 0)]
    check(with_shared_keys(decode, items), step, assert_close)


def test_more_rows_than_an_item_has(device, randn, assert_close):
    """A group goes over several items, the last of them with one member; more queries than a program has."""
    rows = list(range(MEMBERS + 1))
    positions = [32 + row % 5 for row in rows]
    step = make_step(positions, 1, 3, 24, 16, torch.float32, device, randn, shared=[(rows, 32)])
    items = [(rows[:MEMBERS], 0, 32, 0), (rows[MEMBERS:], 0, 32, 0)]
    check(with_shared_keys(decode, items), step, assert_close)


def test_what_is_shared_is_read_through_the_first_member(device, randn, assert_close):
    """The decode kernel leaves the shared keys alone: the other rows' tables may say anything there."""
    step = make_step([70, 90], 1, 2, 64, 16, torch.float32, device, randn, shared=[([0, 1], 64)])
    step.paged.table[1, :4] = 2**30
    check(with_shared_keys(decode, [([0, 1], 0, 64, 0)]), step, assert_close)


def test_scores_of_any_size(device, randn, assert_close):
    """Of millions: the largest of all parts decides."""
    step = make_step([64, 70], 1, 2, 64, 16, torch.float32, device, randn, scale=2.0**20, shared=[([0, 1], 64)])
    check(with_shared_keys(decode, [([0, 1], 0, 32, 0), ([0, 1], 32, 64, 1)]), step, assert_close)


def test_nobody_shares_anything(device, randn, assert_close):
    """As a graph that serves with and without; the first item is empty then."""
    step = make_step([3, 16], 1, 2, 24, 16, torch.float32, device, randn, shared=[([0], 0)])
    check(with_shared_keys(decode, []), step, assert_close)
