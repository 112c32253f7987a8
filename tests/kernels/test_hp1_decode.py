"""HP1 decode attention over scattered blocks against the formula in float64, key by key."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.hp1 import decode as module
from rosebatch_kernels.hp1 import reference
from rosebatch_kernels.hp1 import sizes as table
from tests.helpers.sizes import change_table
from tests.kernels.decode_step import SCALE, check, check_far_apart, lay_apart, make_step, require_the_same_alone
from tests.kernels.hp1_exact import gated_attention, general_gate, make_gate
from tests.kernels.scattered import rotary_tables, uclip

kernel, num_splits = Launchers("hp1.decode"), Launchers("hp1.sizes").num_splits

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

IMPLEMENTATIONS = {"reference": reference.decode, "kernel": kernel.decode}
# Keys of a split whose runs are one group each, where runs and groups are few and small.
RUNS, KEYS = 4, 4
TILE = RUNS * KEYS


@pytest.fixture
def as_on_a_gpu():
    """For tests that keep the numbers of runs and keys that a GPU has."""


@pytest.fixture(autouse=True)
def sizes(request, monkeypatch):
    """Many runs of small groups in the interpreter, which takes as long for many as for few."""
    on_gpu = request.node.callspec.params.get("device") == "cuda"
    if not on_gpu and "as_on_a_gpu" not in request.fixturenames:
        monkeypatch.setattr(module, "runs_and_keys", lambda *_, **sizes: (16, 2))
        change_table(monkeypatch, table, max_splits=4)


def make_gated_step(positions, kv_heads, group, *arguments, gate=None, **options):
    *_, device, randn = arguments
    gate = gate or make_gate(kv_heads * group, randn, device)

    def attend(q, k, v):
        return gated_attention(q, k, v, SCALE, gate)

    step = make_step(positions, kv_heads, group, *arguments, attend=attend, num_splits=num_splits, **options)
    del step.options["window"]
    step.arguments.append(gate)
    return step


@pytest.mark.parametrize(
    ("kv_heads", "group", "size", "block_size"),
    [(3, 1, 64, 16), (1, 2, 24, 64), (2, 2, 128, 64), (1, 4, 80, 24), (1, 7, 24, 16)],
)
def test_decode(implementation, kv_heads, group, size, block_size, dtype, device, randn, assert_close):
    """The first tokens, which have fewer keys than the filter has taps, and both sides of a block's end."""
    positions = [0, 1, 2, 3, 63, 64, 65]
    shape = (kv_heads, group, size, block_size)
    check(implementation, make_gated_step(positions, *shape, dtype, device, randn, idle=(1, 4)), assert_close)


@pytest.mark.parametrize("sigma", [0, 2.99])
@pytest.mark.parametrize("relu_pre", [True, False])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-0.5, 0.25), (0.125, 2.0), (-3.0, -1.0)])
def test_gates(implementation, sigma, relu_pre, bounds, device, randn, assert_close):
    """Bounds without 0 between them give weight to keys that the filter would have barred, to future ones never.

    A lower bound below 0 changes nothing, because max(z, 0) comes first.
    """
    gate = make_gate(2, randn, device, sigma=sigma, relu_pre=relu_pre, clip_min=bounds[0], clip_max=bounds[1])
    check(implementation, make_gated_step([20, 3], 1, 2, 24, 16, torch.float32, device, randn, gate=gate), assert_close)


@pytest.mark.parametrize("taps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("relu_pre", [True, False])
def test_any_taps(implementation, taps, relu_pre, dtype, device, randn, assert_close):
    """Numbers of each head's own, none like another: which is whose shows, and so does a filter cut off at three."""
    gate = general_gate(4, randn, device, taps=taps, relu_pre=relu_pre)
    check(implementation, make_gated_step([40, 2, 1, 6], 2, 2, 24, 16, dtype, device, randn, gate=gate), assert_close)


@pytest.mark.thorough
def test_bits_do_not_depend_on_the_batch(dtype, device, randn):
    """With ``--batch-invariant``: few rows were divided among more programs than many."""
    positions = [0, 5, 300, 170]
    step = make_gated_step(positions, 1, 2, 24, 16, dtype, device, randn)
    fastest = table.SIZES.of(device_of(torch.device("cuda")))
    qkv, cache, blocks, places, limits, _, gate = step.arguments

    def run(rows, sizes, copies=1):
        rows = rows * copies
        splits = partial(table.num_splits, sizes=sizes)
        space = DecodeWorkspace(len(rows), 2, 1, 24, cache.device, splits)
        chosen = qkv[rows], cache.clone(), blocks[rows], places[rows], limits[rows], space, gate
        return kernel.decode(*chosen, **step.options, sizes=sizes)[:4]

    few = replace(fastest, programs=16, max_splits=8)

    def depends(sizes):
        alone = torch.cat([run([row], sizes) for row in range(4)])
        return not torch.equal(alone, run([0, 1, 2, 3], sizes, copies=4))

    assert not depends(few.invariant())
    # Rounded to 16 bits, other sums may be the same.
    assert dtype != torch.float32 or depends(few)


@pytest.mark.parametrize(("rotary", "qk_norm"), [(False, "uclip"), (True, "uclip")])
@pytest.mark.parametrize(("group", "size"), [(1, 24), (2, 64), (2, 128)])
def test_norm_and_rotation(implementation, rotary, qk_norm, group, size, dtype, device, randn, assert_close):
    """The keys before the new one are in the cache, normed and rotated: its filter must not do that again."""
    step = make_gated_step([5, 0, 64], 2, group, size, 16, dtype, device, randn, rotary=rotary, qk_norm=qk_norm)
    check(implementation, step, assert_close)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_norm_with_a_gain_for_each_channel(implementation, rotary, group, dtype, device, randn, assert_close):
    """Rotation exchanges the halves of a head: each channel must take its own gain along."""
    options = {"rotary": rotary, "qk_norm": "uclip_each"}
    check(implementation, make_gated_step([5, 0, 64], 2, group, 24, 16, dtype, device, randn, **options), assert_close)


@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (2, 64), (4, 24)])
def test_without_append(implementation, group, block_size, dtype, device, randn, assert_close):
    """The new K and V are in the cache already; q alone is passed, and neither normed nor rotated again."""
    positions, size = [0, 63, 64, 15], 64
    step = make_gated_step(positions, 1, group, size, block_size, dtype, device, randn, append=False, idle=(3,))
    whole = check(implementation, step, assert_close)
    step.arguments[0] = step.arguments[0][:, : group * size]
    step.options["rotary"] = tuple(table.to(device) for table in rotary_tables(65, size, dtype))
    step.options["qk_norm"], _ = uclip(size, dtype, device, randn)
    assert torch.equal(check(implementation, step, assert_close)[step.live], whole[step.live])


@pytest.mark.parametrize(("first", "append"), [(0, True), (4 * TILE - 3, True), (4 * TILE - 3, False)])
def test_borders_of_runs_and_splits_at_every_offset(first, append, device, randn, assert_close, monkeypatch):
    """What a run or a split takes from the keys in front of it; as many splits as there are tiles of keys."""
    change_table(monkeypatch, table, min_keys=TILE)
    monkeypatch.setattr(module, "runs_and_keys", lambda *_, **sizes: (RUNS, KEYS))
    positions = list(range(first, first + TILE + 2))
    step = make_gated_step(positions, 1, 2, 8, 16, torch.float32, device, randn, append=append)
    assert num_splits(len(positions), 1) > 3
    check(kernel.decode, step, assert_close)


@pytest.mark.parametrize(("group", "append"), [(1, True), (4, False), (2, True)])
def test_keys_in_several_splits(implementation, group, append, dtype, device, randn, assert_close):
    """Short sequences leave splits without work; the parts are added in one order, whichever comes last."""
    assert num_splits(3, 1) > 1
    gate = make_gate(group, randn, device, sigma=1.4)
    step = make_gated_step([400, 0, 150], 1, group, 64, 64, dtype, device, randn, append=append, gate=gate)
    first = check(implementation, step, assert_close)
    # The first call's partial results are left in the workspace, its counters are not.
    assert torch.equal(check(implementation, step, assert_close), first)


def test_all_values_or_those_with_weight(dtype, device, randn, assert_close, as_on_a_gpu):
    """The same sums to the bit: what is left out is zero times a value. Compiled, both may add up differently."""
    step = make_gated_step([100, 7, 64], 1, 2, 24, 16, dtype, device, randn)
    sparse = check(kernel.decode, step, assert_close)
    step.options["sparse"] = False
    every = check(kernel.decode, step, assert_close)
    assert device == "cuda" or torch.equal(every, sparse)


def test_one_split(implementation, device, randn, assert_close, monkeypatch):
    """As many sequences as fill a GPU, which is made small here; nearly none are live."""
    change_table(monkeypatch, table, programs=100)
    batch, live = 100, (0, 7, 99)
    assert num_splits(batch, 1) == 1
    positions = [3 if row in live else 0 for row in range(batch)]
    idle = [row for row in range(batch) if row not in live]
    check(
        implementation, make_gated_step(positions, 1, 2, 24, 16, torch.float32, device, randn, idle=idle), assert_close
    )


@pytest.mark.parametrize("append", [True, False])
def test_rows_that_lie_apart(implementation, append, dtype, device, randn, assert_close):
    step = make_gated_step([20, 64, 3], 2, 2, 24, 16, dtype, device, randn, rotary=append, append=append, idle=(1,))
    lay_apart(step)
    check(implementation, step, assert_close)


def test_bits_of_a_row_do_not_depend_on_the_others(implementation, dtype, device, randn):
    require_the_same_alone(implementation, make_gated_step([65, 200, 1, 40], 1, 2, 24, 16, dtype, device, randn))


def test_nobody_is_live(dtype, device, randn):
    """As in the steps that a graph takes after the last sequence has ended."""
    step = make_gated_step([3, 16], 1, 2, 24, 16, dtype, device, randn, idle=(0, 1))
    check(kernel.decode, step, lambda actual, exact: None)


@pytest.mark.xdist_group("large_memory")
def test_kernel_offsets_past_int32(device, randn, assert_close, far_apart):
    step = make_gated_step([20, 5, 33], 1, 2, 64, 64, torch.float16, device, randn)
    check_far_apart(kernel.decode, step, far_apart, assert_close)
