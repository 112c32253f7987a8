"""What adapters add to products, against float64."""

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.adapters import reference
from rosebatch_kernels.adapters.layout import Stack, is_gated
from rosebatch_kernels.adapters.sizes import SIZES
from rosebatch_kernels.mlp import reference as mlp
from tests.helpers.interpreter import add_up_exactly

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
IMPLEMENTATIONS = {"reference": reference, "kernel": Launchers("adapters.kernel")}
# Parts of the outputs, in, and ranks: one part; q, k and v with a gate of q's part behind; more outputs than a tile,
# and more columns than a program's share; ranks in several tiles, which are no power of two.
SHAPES = [
    ([0] * 48, 32, 16),
    ([0] * 40 + [1] * 16 + [2] * 16 + [0] * 8, 40, 16),
    ([0] * 300 + [1] * 300, 1100, 16),
    ([0] * 24 + [1] * 24, 64, 48),
]
NUMBERS = [[1], [0, 0, 0], [2, 0, 3, 1, 2, 2, 0], [3] * 40 + [0] + [1] * 30]


def make(parts, width, ranks, dtype, device, randn, count=3):
    a = (randn(count, (max(parts) + 1) * ranks, width) * width**-0.5).to(device, dtype)
    b = (randn(count, len(parts), ranks) * ranks**-0.5).to(device, dtype)
    return Stack.of(a, b, parts)


def added(x, stack, parts, numbers, dtype):
    """``B A x`` of each row in float64, of ``A x`` rounded."""
    found = torch.zeros(len(x), len(parts), dtype=torch.float64)
    ranks = stack.b.shape[2]
    for row, number in enumerate(numbers):
        if number:
            y = (stack.a[number - 1].cpu().double() @ x[row].cpu().double()).to(dtype).double()
            for column, part in enumerate(parts):
                found[row, column] = stack.b[number - 1, column].cpu().double() @ y[part * ranks : (part + 1) * ranks]
    return found


def rows_of(implementation, numbers, device, count=3):
    return implementation.sort_rows(torch.tensor(numbers, dtype=torch.int32, device=device), count)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape[0])}x{shape[1]}x{shape[2]}")
def test_add(implementation, shape, numbers, dtype, device, randn, assert_close):
    """Each row gets its own adapter's part, in rows that lie apart; others stay as they are, to the bit."""
    parts, width, _ = shape
    stack = make(*shape, dtype, device, randn)
    x = randn(len(numbers), width + 8, dtype=dtype).to(device)[:, :width]
    out = randn(len(numbers), len(parts) + 8, dtype=dtype).to(device)[:, : len(parts)]
    before = out.clone()
    assert implementation.add_(out, x, stack, rows_of(implementation, numbers, device)) is out
    assert_close(out, before.cpu().double() + added(x, stack, parts, numbers, dtype))
    none = torch.tensor(numbers) == 0
    assert torch.equal(out.cpu()[none], before.cpu()[none])


@pytest.mark.parametrize("activation", mlp.GATED)
@pytest.mark.parametrize("parts", [[0] * 300, [0] * 150 + [1] * 150], ids=["fused", "apart"])
def test_gated(implementation, parts, activation, dtype, device, randn, assert_close):
    """Rows without an adapter are activated too; the second half has its own part, or the same."""
    numbers = NUMBERS[2]
    stack = make(parts, 40, 16, dtype, device, randn)
    assert stack.is_gated
    x = randn(len(numbers), 40, dtype=dtype).to(device)
    gate_up = randn(len(numbers), len(parts) + 8, dtype=dtype).to(device)[:, : len(parts)]
    whole = (gate_up.cpu().double() + added(x, stack, parts, numbers, dtype)).to(dtype).double()
    out = implementation.gated(gate_up, x, stack, rows_of(implementation, numbers, device), activation)
    assert_close(out, mlp.GATED[activation](whole))


def test_is_gated():
    """One that is not would be activated by another projection's part."""
    assert is_gated([0, 0, 1, 1]) and is_gated([0, 0])
    for parts in ([0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 2], [0, 0, 2, 2]):
        assert not is_gated(parts)


@pytest.mark.parametrize("fewer", [1, 7])
def test_a_rows_bits_in_any_company(fewer, device, narrow, randn, monkeypatch):
    """With sizes of their own, the number of rows decides nothing."""
    if device == "cpu":
        add_up_exactly(monkeypatch)
    from rosebatch_kernels.common.device import device_of

    kernel, sizes = IMPLEMENTATIONS["kernel"], SIZES.of(device_of(torch.device("cuda"))).invariant()
    parts, width = [0] * 96, 2100
    stack = make(parts, width, 16, narrow, device, randn)
    numbers = torch.arange(1300, dtype=torch.int32) % 4
    x = randn(1300, width, dtype=narrow).to(device)
    out = randn(1300, len(parts), dtype=narrow).to(device)
    few = out[:fewer].clone()
    for rows in (few, out):
        order = kernel.sort_rows(numbers[: len(rows)].to(device), 3, sizes=sizes)
        kernel.add_(rows, x[: len(rows)], stack, order, sizes=sizes)
    assert torch.equal(few, out[:fewer])
