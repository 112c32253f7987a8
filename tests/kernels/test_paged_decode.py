"""Decode attention over scattered blocks against float64: what it gives, what it writes, and what it leaves alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.paged_attention import reference
from rosebatch_kernels.paged_attention import sizes as module
from tests.helpers.sizes import change_table
from tests.kernels.decode_step import check, check_far_apart, lay_apart, make_step, require_the_same_alone
from tests.kernels.scattered import rms_norm, rotary_tables

kernel, sizes = Launchers("paged_attention.decode"), Launchers("paged_attention.sizes")
qkv_kernel = Launchers("qkv.kernel")

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

IMPLEMENTATIONS = {"reference": reference.decode, "kernel": kernel.decode}


@pytest.mark.parametrize(
    ("kv_heads", "group", "size", "block_size", "window"),
    [
        (3, 1, 64, 16, 0),
        (2, 1, 80, 24, 64),
        (1, 2, 24, 64, 1),
        (2, 4, 128, 16, 0),
        (1, 4, 80, 24, 0),
        (1, 7, 64, 64, 7),
        (1, 7, 24, 24, 0),
        (1, 5, 96, 16, 24),
        (2, 3, 112, 64, 24),
        (1, 2, 12, 16, 24),
        (1, 3, 20, 24, 1),
        (1, 2, 256, 16, 40),
        (1, 3, 512, 16, 0),
    ],
)
def test_decode(implementation, kv_heads, group, size, block_size, window, dtype, device, randn, assert_close):
    """The first token, and lengths on both sides of where a tile and a block end; rows 1 and 4 are not live."""
    positions = [0, 30, 63, 1, 64, 65]
    shape = (kv_heads, group, size, block_size)
    step = make_step(positions, *shape, dtype, device, randn, window=window, idle=(1, 4))
    check(implementation, step, assert_close)


@pytest.mark.parametrize(
    ("rotary", "qk_norm"), [(True, None), (False, "rms"), (True, "rms"), (True, "uclip"), (True, "rms_values")]
)
@pytest.mark.parametrize(("group", "size"), [(1, 24), (2, 64), (1, 128)])
def test_norm_and_rotation(implementation, rotary, qk_norm, group, size, dtype, device, randn, assert_close):
    step = make_step([5, 0, 64], 2, group, size, 16, dtype, device, randn, rotary=rotary, qk_norm=qk_norm)
    check(implementation, step, assert_close)


@pytest.mark.parametrize("qk_norm", [None, "rms", "layer"])
@pytest.mark.parametrize(("kv_heads", "group", "size"), [(2, 2, 64), (1, 4, 128), (2, 1, 24)])
def test_keys_that_were_appended_before_give_the_same_bits(kv_heads, group, size, qk_norm, narrow, device, randn):
    """Tokens that are verified together are appended by a kernel of their own: each has the bits of a step alone."""
    positions = [5, 0, 64, 700, 63]
    step = make_step(positions, kv_heads, group, size, 16, narrow, device, randn, rotary=True, qk_norm=qk_norm)
    qkv, cache, table, where, limits, workspace = step.arguments
    apart = qkv.clone(), cache.clone()
    rows = torch.arange(len(qkv), dtype=torch.int32, device=device)
    options = {name: step.options.get(name) for name in ("num_heads", "rotary", "qk_norm")}
    qkv_kernel.prepare(*apart, table, rows, where, **options)
    expected = kernel.decode(*step.arguments, **step.options)
    assert torch.equal(apart[1].view(torch.int16), cache.view(torch.int16))
    plain = {"num_heads": step.options["num_heads"], "scale": step.options["scale"], "append": False}
    assert torch.equal(kernel.decode(*apart, table, where, limits, workspace, **plain), expected)


@pytest.mark.parametrize("qk_norm", [None, "rms", "layer"])
@pytest.mark.parametrize(("group", "size", "rotated"), [(1, 80, 20), (3, 96, 24), (5, 64, 16), (2, 12, 4), (7, 80, 32)])
def test_rotation_of_the_first_channels(
    implementation, group, size, rotated, qk_norm, dtype, device, randn, assert_close
):
    """The others pass through, normed; the tables' rows are as long as the rotated part, not as the head."""
    step = make_step([5, 0, 64], 2, group, size, 16, dtype, device, randn, rotary=rotated, qk_norm=qk_norm)
    check(implementation, step, assert_close)


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(("soft_cap", "with_sinks"), [(1.5, False), (0.0, True), (1.5, True)])
@pytest.mark.parametrize(("group", "window", "block_size"), [(1, 0, 16), (5, 24, 16), (2, 300, 64), (8, 1, 24)])
def test_soft_cap_and_sinks(
    implementation, group, window, block_size, soft_cap, with_sinks, append, dtype, device, randn, assert_close
):
    """Each sink counts once, whether one split has all keys or several share them; sinks far above and below scores."""
    heads = 2 * group
    sinks = torch.linspace(-2, 4, heads).to(dtype) if with_sinks else None
    options = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "scale": 0.6, "append": append}
    step = make_step([0, 1, 40, 700], 2, group, 24, block_size, dtype, device, randn, **options)
    check(implementation, step, assert_close)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
@pytest.mark.parametrize("positions", [[3], [700]])
def test_sinks_of_any_size(implementation, positions, sink, device, randn, assert_close):
    """One that weighs nothing, and one that leaves the keys nothing: no row may be NaN."""
    sinks = torch.tensor([sink, 0.0])
    step = make_step(positions, 1, 2, 24, 16, torch.float32, device, randn, sinks=sinks)
    check(implementation, step, assert_close)


def test_scores_far_past_a_soft_cap(implementation, device, randn, assert_close):
    """Exponentials of them would overflow: all scores are then the cap, or its negative."""
    step = make_step([0, 40], 1, 2, 24, 16, torch.float32, device, randn, scale=1e4, soft_cap=3.0)
    check(implementation, step, assert_close)


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("block_size", [8, 16, 24, 48, 64])
@pytest.mark.parametrize(("group", "window"), [(1, 24), (2, 1), (2, 5), (3, 24), (2, 300)])
def test_blocks_outside_of_the_window_are_left_alone(
    implementation, group, window, block_size, append, dtype, device, randn, assert_close
):
    """They may be another sequence's by then, and their entries in the table anything."""
    positions = [0, 23, 24, 63, 64, 65, 700]
    step = make_step(positions, 1, group, 24, block_size, dtype, device, randn, window=window, append=append)
    for row, position in enumerate(positions):
        step.paged.free_before(row, max(0, position + 1 - window))
    check(implementation, step, assert_close)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (2, 64), (4, 24)])
def test_without_append(implementation, group, block_size, window, dtype, device, randn, assert_close):
    """The new K and V are in the cache already; q alone is passed, and neither normed nor rotated again."""
    positions, size = [0, 63, 64, 15], 64
    step = make_step(
        positions, 1, group, size, block_size, dtype, device, randn, window=window, append=False, idle=(3,)
    )
    whole = check(implementation, step, assert_close)
    step.arguments[0] = step.arguments[0][:, : group * size]
    step.options["rotary"] = tuple(table.to(device) for table in rotary_tables(65, size, dtype))
    step.options["qk_norm"], _ = rms_norm(size, dtype, device, randn)
    assert torch.equal(check(implementation, step, assert_close)[step.live], whole[step.live])


@pytest.mark.parametrize(("group", "window", "append"), [(1, 0, True), (4, 0, False), (2, 300, True)])
def test_keys_in_several_splits(implementation, group, window, append, dtype, device, randn, assert_close):
    """Short sequences leave splits without work; the parts are merged in one order, whichever comes last."""
    assert sizes.num_splits(3, 1) > 1
    step = make_step([1000, 0, 300], 1, group, 64, 64, dtype, device, randn, window=window, append=append)
    first = check(implementation, step, assert_close)
    # The first call's partial results are left in the workspace, its counters are not.
    assert torch.equal(check(implementation, step, assert_close), first)


@pytest.mark.parametrize("group", [1, 2])
def test_no_programs_for_splits_that_have_nothing_to_do(group, dtype, device, randn, assert_close):
    """The same bits without them, up to the last number of keys that one program attends to."""
    limit = sizes.undivided_keys(3, group, 1, 64, dtype)
    for longest, divides in ((limit, False), (limit + 1, True)):
        step = make_step([longest, 0, 100], 1, group, 64, 64, dtype, device, randn)
        parts = step.arguments[5].sums.fill_(7)
        whole = check(kernel.decode, step, assert_close)
        assert bool((parts != 7).any()) == divides
        if not divides:
            step.options["divided"] = False
            assert torch.equal(check(kernel.decode, step, assert_close), whole)


@pytest.mark.parametrize(
    ("rows", "registers", "narrow"),
    [
        (4, 184, 168),
        (32, 184, 168),
        (64, 184, 168),
        (96, 168, 168),
        (112, 184, 128),
        (128, 184, 128),
        (160, 168, 168),
        (256, 168, 128),
    ],
)
def test_as_many_programs_at_once_as_save_a_round(rows, registers, narrow):
    """Of 768 programs, 108 ran in a second round, for 5 % of a step. With few, fewer registers only cost time."""
    heads = {"num_heads": 16, "kv_heads": 8, "device": Device.of_arch(90, 132)}
    form = partial(sizes.form, rows, divided=False, **heads)
    assert form(size=128, dtype=torch.bfloat16) == (rows <= 128, 1, registers)
    assert form(size=64, dtype=torch.bfloat16)[-1] == narrow
    # Heads of 256 channels would spill registers.
    assert form(size=256, dtype=torch.bfloat16)[-1] is None
    assert form(size=128, dtype=torch.float32)[-1] is None


@pytest.mark.parametrize(
    ("rows", "divided", "registers"),
    [(1, True, None), (32, True, None), (64, True, 168), (64, False, None), (256, True, 168)],
)
def test_pieces_keep_as_many_programs(rows, divided, registers):
    """Without a limit the compiler took 239 registers: four programs a multiprocessor in place of six."""
    invariant = module.SIZES.measured.invariant()
    heads = {"num_heads": 16, "kv_heads": 8, "size": 128, "dtype": torch.bfloat16, "device": Device.of_arch(90, 132)}
    assert module.form(rows, divided=divided, sizes=invariant, **heads)[-1] == registers


@pytest.mark.gpu
def test_registers_change_no_bits(randn, assert_close):
    """A row's tokens would depend on how many rows run beside it."""
    step = make_step([700, 0, 100], 2, 2, 128, 64, torch.bfloat16, torch.device("cuda"), randn)
    step.options["divided"] = False
    whole = check(kernel.decode, step, assert_close)
    for registers in (168, 255):
        of_decode = replace(module.SIZES.measured.decode, group_registers=((0, (registers,)),))
        step.options["sizes"] = replace(module.SIZES.measured, decode=of_decode)
        assert torch.equal(check(kernel.decode, step, assert_close), whole)


def test_one_split(implementation, device, randn, assert_close, monkeypatch):
    """As many sequences as fill a GPU, which is made small here; nearly none are live."""
    change_table(monkeypatch, module, "decode", splits=((100, 1), (0, 16)))
    batch, live = 100, (0, 7, 99)
    assert sizes.num_splits(batch, 1) == 1
    positions = [3 if row in live else 0 for row in range(batch)]
    idle = [row for row in range(batch) if row not in live]
    step = make_step(positions, 1, 2, 24, 16, torch.float32, device, randn, idle=idle)
    check(implementation, step, assert_close)


@pytest.mark.parametrize("append", [True, False])
def test_scores_of_any_size(implementation, append, device, randn, assert_close):
    """Scores of millions, where a key has a head to itself; a single one may be that far below zero."""
    positions = [0, 1, 40, 200]
    step = make_step(positions, 2, 2, 64, 16, torch.float32, device, randn, scale=2.0**20, append=append)
    check(implementation, step, assert_close)


@pytest.mark.parametrize("append", [True, False])
def test_rows_that_lie_apart(implementation, append, dtype, device, randn, assert_close):
    step = make_step([20, 64, 3], 2, 2, 24, 16, dtype, device, randn, rotary=append, append=append, idle=(1,))
    lay_apart(step)
    check(implementation, step, assert_close)


def test_bits_of_a_row_do_not_depend_on_the_others(implementation, dtype, device, randn):
    require_the_same_alone(implementation, make_step([65, 300, 1, 40], 1, 2, 64, 16, dtype, device, randn))


def test_nobody_is_live(dtype, device, randn):
    """As in the steps that a graph takes after the last sequence has ended."""
    step = make_step([3, 16], 1, 2, 24, 16, dtype, device, randn, idle=(0, 1))
    check(kernel.decode, step, lambda actual, exact: None)


@pytest.mark.xdist_group("large_memory")
def test_kernel_offsets_past_int32(device, randn, assert_close, far_apart):
    positions = [20, 5, 33]
    step = make_step(positions, 1, 2, 64, 64, torch.float16, device, randn)
    cache = check_far_apart(kernel.decode, step, far_apart, assert_close)
    for row, position in enumerate(positions):
        written = cache[:, row, 0, position].cpu().double()
        assert torch.equal(written, torch.stack((step.new_keys[row][0], step.new_values[row, 0].double())))
