"""The parts of a mixture of experts, each against its reference or float64."""

import math

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.experts import reference
from rosebatch_kernels.experts.sizes import SIZES, Step, Tile
from tests.helpers.interpreter import add_up_exactly

kernel, order, router = map(Launchers, ("experts.kernel", "common.sort_rows", "experts.router"))

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
# (tokens, experts, experts of a token, H, I): one token; odd sizes; more pairs than one chunk of the sort has.
SHAPES = [(1, 5, 2, 24, 40), (7, 8, 3, 33, 17), (70, 5, 2, 64, 48)]
NAMES = ["silu_mul", "gelu_mul", "clamped_swiglu", "relu2"]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("experts", "k"), [(5, 2), (128, 8), (8, 8), (300, 9), (4, 1)])
def test_route(experts, k, normalize, device, randn):
    """Equal logits take the lowest ids; numbers of experts that are no power of two leave no gap to choose."""
    logits = (randn(9, experts) * 2).round().to(device)
    ids, weights = router.route(logits, k, normalize=normalize)
    expected_ids, expected = reference.route(logits.cpu(), k, normalize=normalize)
    assert ids.cpu().tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights.cpu(), expected)


# Experts, those of a token, groups and kept ones: DeepSeek V3's and V2's, groups of three and of one, all groups kept.
GROUPED = [(256, 8, 8, 4), (160, 6, 8, 3), (6, 2, 3, 2), (15, 5, 5, 2), (12, 9, 4, 4), (64, 4, 1, 1)]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("experts", "k", "groups", "kept"), GROUPED)
def test_route_of_groups(experts, k, groups, kept, sigmoid, normalize, device, randn):
    """Written out token by token: the correction chooses and does not weigh; equal scores take the lowest ids."""
    logits = (randn(9, experts) * 2).round()
    bias = (randn(experts) * 4).round() / 16 if sigmoid else None
    choice = reference.Choice(sigmoid, bias, groups, kept, 1.75, sum_eps=0.5)
    ids, weights = reference.route(logits, k, normalize=normalize, choice=choice)
    for token, row in enumerate(logits.tolist()):
        scores = [1 / (1 + math.exp(-x)) for x in row] if sigmoid else [math.exp(x) for x in row]
        # As fp32 has them: ties are there, too.
        ranks = (torch.tensor(row).neg().exp().add(1).reciprocal() + bias).tolist() if sigmoid else row
        size, best = experts // groups, []
        for g in range(groups):
            own = sorted(ranks[g * size : (g + 1) * size], reverse=True)
            best.append(float(torch.tensor(own[:2]).sum()) if sigmoid else own[0])
        open_groups = sorted(range(groups), key=lambda g: -best[g])[:kept]
        open_ids = [e for e in range(experts) if groups == 1 or e // size in open_groups]
        chosen = sorted(open_ids, key=lambda e: -ranks[e])[:k]
        assert ids[token].tolist() == chosen
        total = sum(scores[e] for e in chosen) if normalize else 1 if sigmoid else sum(scores)
        total += 0.5 if sigmoid and normalize else 0
        expected = torch.tensor([1.75 * scores[e] / total for e in chosen])
        torch.testing.assert_close(weights[token], expected, rtol=1e-5, atol=1e-6)
    choice = choice._replace(bias=None if bias is None else bias.to(device))
    found = router.route(logits.to(device), k, normalize=normalize, choice=choice)
    assert found[0].cpu().tolist() == ids.tolist()
    torch.testing.assert_close(found[1].cpu(), weights)


def test_factors_of_experts(device, randn):
    """Gemma 4 multiplies a weight by its expert's factor, after all weights were made to sum to 1."""
    logits, factors = randn(9, 5), randn(5)
    plain_ids, plain = reference.route(logits, 3, normalize=True)
    expected = plain * factors[plain_ids.long()]
    found = reference.route(logits, 3, normalize=True, choice=reference.Choice(factors=factors))
    assert torch.equal(found[0], plain_ids) and torch.equal(found[1], expected)
    choice = reference.Choice(factors=factors.to(device))
    ids, weights = router.route(logits.to(device), 3, normalize=True, choice=choice)
    assert ids.cpu().tolist() == plain_ids.tolist()
    torch.testing.assert_close(weights.cpu(), expected)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_padding_rows_get_valid_experts(device):
    """A NaN in a row that nobody reads must not make an id that lies outside of the weights."""
    ids, _ = router.route(torch.full((2, 5), float("nan"), device=device), 2, normalize=True)
    assert ids.cpu().tolist() == [[0, 1], [0, 1]]
    choice = reference.Choice(True, torch.zeros(6, device=device), 3, 2)
    ids, _ = router.route(torch.full((2, 6), float("nan"), device=device), 3, normalize=True, choice=choice)
    assert ids.cpu().tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 5), (3, 2, 5), (150, 3, 8), (700, 4, 40), (64, 2, 64)])
@pytest.mark.parametrize("skewed", [False, True])
def test_order(tokens, k, experts, skewed, device, randn):
    """Stable across chunks; every place is in exactly one tile, of its own expert; experts may have no tokens."""
    ids, _ = reference.route(randn(tokens, experts) + skewed * torch.arange(experts), k, normalize=True)
    found = order.sort_by_group(ids.to(device), experts, 16, chunk=128)
    pairs, first = reference.sort_by_expert(ids, experts)
    assert torch.equal(found.rows.cpu(), pairs)
    assert torch.equal(found.first.cpu(), first)
    covered = []
    for expert, begin, places in found.tiles.tolist():
        assert 0 <= places <= 16
        assert all(ids.flatten()[pair] == expert for pair in pairs[begin : begin + places])
        covered += range(begin, begin + places)
    assert covered == list(range(tokens * k))
    owners = [expert for expert, _, places in found.tiles.tolist() if places]
    assert found.tile_ends.tolist() == [sum(owner <= expert for owner in owners) for expert in range(experts)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("biased", [False, True])
def test_parts(shape, activation, biased, dtype, device, randn, assert_close):
    """Odd sizes end inside a tile; rows of x lie apart; each slot's weight and bias reach its own token."""
    check(shape, activation, biased, None, dtype, device, randn, assert_close)


def test_parts_by_tensor_memory_accelerator(device, randn, assert_close):
    """A tile of a descriptor may reach into the next expert's weights, which must not show."""
    tile = Tile(64, 64, 32, 4, 3, True)
    for shape in ((70, 5, 2, 64, 48), (20, 3, 2, 40, 72)):
        check(shape, "silu_mul", True, Step(0, *(4 * (tile,))), torch.float16, device, randn, assert_close)


def check(shape, activation, biased, step, dtype, device, randn, assert_close):
    tokens, experts, k, size, inner = shape
    x = randn(tokens, size + 8, dtype=dtype).to(device)[:, :size]
    ids, weights = reference.route(randn(tokens, experts), k, normalize=True)
    columns = inner if activation == "relu2" else 2 * inner
    gate_up = (randn(experts, columns, size) * size**-0.5).to(device, dtype)
    down = (randn(experts, size, inner) * inner**-0.5).to(device, dtype)
    biases = (randn(experts, columns, dtype=dtype), randn(experts, size, dtype=dtype)) if biased else (None, None)
    biases = [None if bias is None else bias.to(device) for bias in biases]
    arguments = (ids.to(device), weights.to(device), gate_up, down, *biases)
    shared = randn(tokens, size, dtype=dtype).to(device) if biased else None
    out = kernel.parts(x, *arguments, activation, shared, step)
    wide = [None if a is None else a.double() if a.is_floating_point() else a for a in arguments]
    exact = torch.zeros(k, tokens, size, dtype=torch.float64)
    exact.copy_(exact_parts(x.double(), *wide, activation=activation))
    if shared is not None:
        exact = torch.cat((exact, shared.double().cpu()[None]))
    assert out.shape == exact.shape
    assert_close(out.to(dtype), exact)


def exact_parts(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation):
    """The formula token by token, in float64."""
    out = torch.empty(ids.shape[1], *x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for slot, expert in enumerate(ids[token].tolist()):
            inner = gate_up[expert] @ x[token]
            inner = inner if gate_up_bias is None else inner + gate_up_bias[expert]
            result = down[expert] @ reference.activated(activation, inner)
            result = result if down_bias is None else result + down_bias[expert]
            out[slot, token] = result * weights[token, slot]
    return out


def test_a_tokens_bits_do_not_depend_on_its_neighbours(randn):
    """PyTorch's path adds a token's parts in the order of its slots, whichever experts the batch has."""
    from rosebatch_kernels.experts.torch_experts import TorchExperts

    gate_up, down = randn(5, 34, 24), randn(5, 24, 17)
    invariant = [[lambda x, w=w: (x[:, None] * w).sum(-1) for w in weight] for weight in (gate_up, down)]
    layer = TorchExperts(*invariant, "silu_mul")
    x, (ids, weights) = randn(9, 24), reference.route(randn(9, 5), 3, normalize=False)
    whole = layer(x, ids, weights)
    expected = reference.parts(x, ids, weights, gate_up, down).sum(0)
    torch.testing.assert_close(layer(x, ids, weights, 2 * x), expected + 2 * x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    for row in range(9):
        assert torch.equal(layer(x[row : row + 1], ids[row : row + 1], weights[row : row + 1]), whole[row : row + 1])


def test_one_dtype_and_no_rounding_of_rows_for_all_numbers_of_tokens(narrow, device, randn):
    """With ``--batch-invariant``, parts of a row must not be fp32 in a small batch, nor rows fp8 in a large one."""
    sizes = SIZES.measured.invariant()
    for tokens in (1, 300):
        x, gate_up, down = (
            randn(*shape, dtype=narrow).to(device) for shape in ((tokens, 32), (3, 32, 32), (3, 32, 16))
        )
        ids, weights = reference.route(randn(tokens, 3), 2, normalize=True)
        out = kernel.parts(x, ids.to(device), weights.to(device), gate_up, down, sizes=sizes)
        assert out.dtype == narrow
    assert SIZES.measured.steps[0].fp8 is not None
    assert {(step.fp8, step.fp8_blocks) for step in sizes.steps} == {(None, None)}


def test_parts_in_two_dtypes_give_a_row_other_bits(narrow, device, randn, monkeypatch):
    """Without one dtype: what their reader makes of them went by the number of tokens."""
    if device == "cpu":
        add_up_exactly(monkeypatch)
    gate_up, down = (randn(*shape, dtype=narrow).to(device) / 4 for shape in ((3, 32, 32), (3, 32, 16)))
    x, (ids, weights) = randn(300, 32, dtype=narrow), reference.route(randn(300, 3), 2, normalize=True)

    def first_row(tokens, sizes):
        given = (each[:tokens].to(device) for each in (x, ids, weights))
        return kernel.parts(*given, gate_up, down, sizes=sizes)[:, 0].float().sum(0).to(narrow)

    alike = [
        torch.equal(*(first_row(n, each) for n in (1, 300))) for each in (SIZES.measured, SIZES.measured.invariant())
    ]
    assert alike == [False, True]
