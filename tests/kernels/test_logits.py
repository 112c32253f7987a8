"""What changes logits, against its definition, number by number in Python."""

import random

import pytest
import torch
from torch import inf, nan

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.logits import layout, reference

kernel = Launchers("logits.kernel")
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

# One program of a row and several, whole and not.
SIZES = [1, 63, 1000, 1030, 4100]
NEUTRAL = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "positions": 5, "min_positions": 0}
PENALTIES = {"presence": 0.5, "frequency": 0.25, "repetition": 1.5, "positions": 5, "min_positions": 0}
IN_PROMPT, ENDS = 2**24, 2**25


def adjusted(x, mark, bias, presence, frequency, repetition, position, min_position):
    """The definition, of one number."""
    count, in_prompt, ends = mark % 2**24, mark // 2**24 % 2, mark // 2**25 % 2
    x += bias
    if count or in_prompt:
        x = x / repetition if x > 0 else x * repetition
    x -= frequency * count
    if count:
        x -= presence
    return -inf if ends and position < min_position else x


def random_marks(rows, size, seed=0):
    """Every count, in the prompt or not, ending or not: all together are found in a row of a few hundred."""
    numbers = random.Random(seed)
    choices = [count + flags for count in (0, 0, 0, 1, 2, 9) for flags in (0, IN_PROMPT, ENDS, IN_PROMPT + ENDS)]
    return torch.tensor([numbers.choices(choices, k=size) for _ in range(rows)], dtype=torch.int32)


def random_parameters(rows, seed=0):
    numbers = random.Random(seed)
    drawn = {
        "presence": [numbers.uniform(-2, 2) for _ in range(rows)],
        "frequency": [numbers.uniform(-2, 2) for _ in range(rows)],
        "repetition": [numbers.uniform(0.5, 2) for _ in range(rows)],
        "positions": [numbers.randrange(4, 7) for _ in range(rows)],
        "min_positions": [numbers.randrange(4, 7) for _ in range(rows)],
    }
    return vectors(drawn)


def vectors(values):
    """Lists as what ``adjust`` takes."""
    return {k: torch.tensor(v, dtype=torch.int32 if "position" in k else torch.float32) for k, v in values.items()}


def to(device, parameters):
    return {name: values.to(device) for name, values in parameters.items()}


def repeated(parameters, rows):
    return vectors({name: [value] * rows for name, value in parameters.items()})


def bits(x):
    return x.contiguous().view(torch.int16 if x.itemsize == 2 else torch.int32)


@pytest.mark.parametrize(
    ("integer", "biased"), [(None, False), (None, True), (torch.int32, True), (torch.int64, False)]
)
@pytest.mark.parametrize("size", SIZES)
def test_adjust(implementation, size, integer, biased, dtype, device, randn, assert_close):
    """A wrong step, or a wrong order of them; columns that no program does; another row's marks, bias or parameters."""
    rows, slots = 5, [6, 0, 3, 1, 5]
    logits, marks, bias = randn(rows, size, dtype=dtype) * 3, random_marks(7, size), randn(7, size)
    parameters = random_parameters(rows, size)
    out = implementation.adjust(
        logits.to(device),
        marks.to(device),
        bias.to(device) if biased else None,
        torch.tensor(slots, dtype=integer, device=device) if integer else None,
        **to(device, parameters),
    )
    assert out.dtype == torch.float32
    exact = []
    for row, slot in enumerate(slots if integer else range(rows)):
        numbers = [values[row].item() for values in parameters.values()]
        biases = bias[slot].tolist() if biased else [0.0] * size
        columns = zip(logits[row].tolist(), marks[slot].tolist(), biases, strict=True)
        exact.append([adjusted(*column, *numbers) for column in columns])
    assert_close(out, torch.tensor(exact, dtype=torch.float64))


def test_adjust_by_hand(implementation, device):
    """A misunderstanding that the definition above shares."""
    logits = torch.tensor([[3.0, 3.0, 3.0, -3.0, -3.0, 3.0, 3.0]], device=device)
    marks = torch.tensor(
        [[0, 2, IN_PROMPT, IN_PROMPT, 1, ENDS, ENDS + IN_PROMPT + 1]], dtype=torch.int32, device=device
    )
    parameters = repeated(PENALTIES, 1)
    out = implementation.adjust(logits, marks, None, None, **to(device, parameters))
    assert out.tolist() == [[3.0, 1.0, 2.0, -4.5, -5.25, 3.0, 1.25]]
    bias = torch.tensor([[1.5, 3.0, -6.0, 6.0, 0.0, 0.0, 0.0]], device=device)
    parameters["min_positions"] += 6
    out = implementation.adjust(logits, marks, bias, None, **to(device, parameters))
    assert out.tolist() == [[4.5, 3.0, -4.5, 2.0, -5.25, -inf, -inf]]


def test_layout():
    """Marks are made and kept elsewhere, so where the bits stand is a promise."""
    assert (layout.COUNT, layout.IN_PROMPT, layout.ENDS) == (2**24 - 1, IN_PROMPT, ENDS)


def test_count_with_all_its_bits(implementation, device):
    """A count that reaches into the flags, or that they reach into."""
    limit = 2**24 - 1
    marks = torch.tensor([[limit, limit + IN_PROMPT, IN_PROMPT + ENDS, -(2**26)]], dtype=torch.int32, device=device)
    parameters = repeated(NEUTRAL | {"frequency": 1.0}, 1)
    out = implementation.adjust(torch.zeros(1, 4, device=device), marks, None, None, **to(device, parameters))
    assert out.tolist() == [[-limit, -limit, 0.0, 0.0]]


@pytest.mark.parametrize("size", [1, 63, 4100])
def test_neutral_rows_keep_their_bits(implementation, size, dtype, device, randn):
    """A completion without parameters must not depend on those that are adjusted beside it."""
    logits = randn(6, size, dtype=dtype)
    special = [-0.0, 0.0, inf, -inf, torch.finfo(dtype).max, -torch.finfo(dtype).tiny, torch.finfo(dtype).tiny / 4]
    logits[0, : len(special)] = torch.tensor(special, dtype=dtype)[:size]
    parameters = random_parameters(6)
    for name, value in NEUTRAL.items():
        parameters[name][::2] = value
    logits, marks = logits.to(device), random_marks(6, size).to(device)
    # Of the others, one that must change wherever it is counted.
    marks[:, 0] = 3
    out = implementation.adjust(logits, marks, None, None, **to(device, parameters))
    assert torch.equal(bits(out[::2]), bits(logits[::2].float()))
    assert (out[1::2] != logits[1::2])[:, 0].all()


@pytest.mark.parametrize(("position", "barred"), [(6, True), (7, False), (8, False)])
def test_end_tokens_wait_for_the_first_position_that_may_end(implementation, position, barred, dtype, device, randn):
    """A completion one token shorter or longer than its minimum; other tokens taken out with the end tokens."""
    logits, marks = randn(3, 1030, dtype=dtype).to(device), random_marks(3, 1030).to(device)
    parameters = repeated(NEUTRAL | {"positions": position, "min_positions": 7}, 3)
    parameters["min_positions"][1] = 0
    taken_out = (marks // ENDS % 2 == 1) & barred
    # The row between has no minimum.
    taken_out[1] = False
    out = implementation.adjust(logits, marks, None, None, **to(device, parameters))
    assert torch.equal(out, torch.where(taken_out, -inf, logits.float()))


def test_minus_infinity_and_nan_stay(implementation, dtype, device):
    """A barred token that a penalty brings back; a NaN that a comparison turns into a number, and hides."""
    logits = torch.tensor([[-inf, nan] * 12], dtype=dtype, device=device).expand(4, -1)
    marks = torch.tensor([[0, 1, 5, IN_PROMPT, IN_PROMPT + 1, ENDS] * 4], dtype=torch.int32).sort().values
    parameters = repeated(PENALTIES, 4)
    parameters["presence"][1], parameters["frequency"][2], parameters["repetition"][3] = -2.0, -2.0, 0.5
    for bias in (None, torch.full((4, 24), 7.0, device=device)):
        out = implementation.adjust(logits, marks.expand(4, -1).to(device), bias, None, **to(device, parameters))
        assert (out[:, ::2] == -inf).all() and out[:, 1::2].isnan().all()


@pytest.mark.parametrize("biased", [True, False])
def test_adjust_of_rows_that_lie_apart(implementation, biased, dtype, device, randn):
    """What stands beside a row leaks into it; fp32 logits are written over, or are what comes back."""
    wide = torch.full((6, 1200), nan, dtype=dtype, device=device)
    wide_bias, wide_marks = torch.full((6, 1300), nan, device=device), torch.full((6, 1100), 2**26 - 1).int().to(device)
    logits, marks, bias = wide[:, 32:1062], wide_marks[:, 16:1046], wide_bias[:, 7:1037]
    logits.copy_(randn(6, 1030, dtype=dtype))
    marks.copy_(random_marks(6, 1030))
    bias.copy_(randn(6, 1030))
    parameters, before = to(device, random_parameters(6)), wide.clone()
    out = implementation.adjust(logits, marks, bias if biased else None, None, **parameters)
    bias = bias.contiguous() if biased else None
    assert torch.equal(out, implementation.adjust(logits.contiguous(), marks.contiguous(), bias, None, **parameters))
    assert torch.equal(bits(wide), bits(before))
    out = implementation.adjust(logits, marks, None, None, **to(device, repeated(NEUTRAL, 6)))
    out.fill_(0.0)
    assert torch.equal(bits(wide), bits(before))


def test_parameters_as_rows_of_one_matrix(implementation, device, randn):
    """The engine keeps them in one int32 matrix, real numbers as their bits, wider than the batch."""
    logits, marks, parameters = randn(5, 63).to(device), random_marks(5, 63).to(device), random_parameters(5)
    matrix = torch.full((9, 14), -1, dtype=torch.int32)
    for row, values in zip((1, 2, 4, 5, 8), parameters.values(), strict=True):
        matrix[row, 3:8] = values.view(torch.int32)
    matrix = matrix.to(device)
    views = {
        name: matrix[row].view(values.dtype)[3:8]
        for row, (name, values) in zip((1, 2, 4, 5, 8), parameters.items(), strict=True)
    }
    out = implementation.adjust(logits, marks, None, None, **views)
    assert torch.equal(out, implementation.adjust(logits, marks, None, None, **to(device, parameters)))


@pytest.mark.parametrize("biased", [True, False])
def test_kernel_has_the_references_bits(biased, dtype, device, randn):
    """A division that is not exact, a product and a difference rounded once: tokens that differ in a close choice."""
    logits, marks, bias = randn(4, 4100, dtype=dtype) * 9, random_marks(4, 4100), randn(4, 4100)
    arguments = [t.to(device) for t in (logits, marks)] + [bias.to(device) if biased else None, None]
    parameters = to(device, random_parameters(4, 3))
    out = kernel.adjust(*arguments, **parameters)
    assert torch.equal(bits(out), bits(reference.adjust(*arguments, **parameters)))


def counted(marks, tokens, slots):
    """The definition, in lists."""
    for row, token in enumerate(tokens):
        slot = row if slots is None else slots[row]
        if 0 <= token < len(marks[slot]):
            marks[slot][token] += 1


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 63), (300, 17)])
def test_count(implementation, rows, size, given, integer, device):
    """A token counted elsewhere, twice or not at all; flags changed, or sequences outside of the batch."""
    numbers = random.Random(rows)
    marks = random_marks(rows + 5, size).to(device)
    expected = marks.tolist()
    for _ in range(3):
        tokens = numbers.choices(range(size), k=rows)
        slots = numbers.sample(range(rows + 5), rows) if given else None
        on_device = torch.tensor(slots, dtype=integer, device=device) if given else None
        implementation.count_(marks, torch.tensor(tokens, dtype=integer, device=device), on_device)
        counted(expected, tokens, slots)
        assert marks.tolist() == expected


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_tokens_outside_of_the_vocabulary_are_not_counted(implementation, integer, device):
    """-1 stands for no token: counted, it would be in the row before. 2^32 + 3 would be 3 in 32 bits."""
    tokens = [-1, 3, 20, 19, -(2**31), 2**31 - 1, 0, 21]
    tokens += [2**32 + 3, 3 - 2**32] if integer == torch.int64 else [-20, -17]
    wide = torch.zeros(len(tokens), 50, dtype=torch.int32, device=device)
    implementation.count_(wide[:, 10:30], torch.tensor(tokens, dtype=integer, device=device), None)
    assert wide.nonzero().tolist() == [[1, 13], [3, 29], [6, 10]]
    assert wide.sum() == 3


def random_masks(rows, size, seed=0):
    """Words of all kinds: nothing allowed, everything, one end of 32, any; bits behind the vocabulary as well."""
    numbers = random.Random(seed)

    def word():
        return numbers.choice([0, -1, 1, -(2**31), numbers.randrange(-(2**31), 2**31)])

    return torch.tensor([[word() for _ in range(-(-size // 32))] for _ in range(rows)], dtype=torch.int32)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [*SIZES, 64, 65])
def test_mask(implementation, size, integer, dtype, device, randn):
    """To the bit: a token too many or too few, one row's mask on another, a row without a mask that is changed."""
    logits, masks, rows = randn(7, size, dtype=dtype).to(device), random_masks(4, size), [5, 0, 6, 2]
    expected = logits.tolist()
    for row, words in zip(rows, masks.tolist(), strict=True):
        for token in range(size):
            # Python's shift of a negative number is that of endless bits.
            if not words[token // 32] >> token % 32 & 1:
                expected[row][token] = -inf
    implementation.mask_(logits, masks.to(device), torch.tensor(rows, dtype=integer, device=device))
    assert torch.equal(logits.cpu(), torch.tensor(expected, dtype=dtype))


def test_mask_of_rows_that_lie_apart(implementation, dtype, device, randn):
    """The last word's bits behind the vocabulary, and columns behind it: both stand for no token."""
    wide, wide_masks = randn(5, 3000, dtype=dtype).to(device), random_masks(3, 3200).to(device)
    before, logits, masks = wide.clone(), wide[:, 64:2114], wide_masks[:, 8:73]
    rows = torch.tensor([4, 1, 2], device=device)
    same = logits.contiguous()
    implementation.mask_(same, masks.contiguous(), rows)
    implementation.mask_(logits, masks, rows)
    assert torch.equal(logits, same)
    assert torch.equal(wide[:, :64], before[:, :64])
    assert torch.equal(wide[:, 2114:], before[:, 2114:])


def test_mask_of_nan_and_infinity(implementation, dtype, device):
    """Barred they are -inf, allowed they stay, whichever of its bit patterns a NaN has: a mask is no sum."""
    logits = torch.tensor([[nan, inf, -inf, -0.0] * 2], dtype=dtype, device=device)
    expected = logits.clone()
    expected[:, :4] = -inf
    implementation.mask_(
        logits, torch.tensor([[0xF0]], dtype=torch.int32, device=device), torch.zeros(1).int().to(device)
    )
    real = ~expected.isnan()
    assert torch.equal(~logits.isnan(), real)
    assert torch.equal(bits(logits)[real], bits(expected)[real])


@pytest.mark.parametrize("size", [1, 63, 5000])
@pytest.mark.parametrize(("scale", "cap"), [(0.25, 0.0), (1.0, 3.0), (-2.0, 0.5)])
def test_scale_and_cap(implementation, size, scale, cap, dtype, device, randn, assert_close):
    """Rows are views of padded ones, whose padding must stay as it is."""
    padded = (randn(7, size + 5) * 4).to(device, dtype)
    before, logits = padded.clone(), padded[:, :size]
    exact = before[:, :size].double() * scale
    out = implementation.scale_and_cap_(logits, scale, cap)
    assert out is logits
    assert_close(out, (exact / cap).tanh() * cap if cap else exact)
    assert torch.equal(padded[:, size:], before[:, size:])


def test_the_cap_of_extremes(implementation, device):
    """Far from zero nothing overflows, and a barred token's logit and NaN stay what they are."""
    logits = torch.tensor([[-3e38, 0.0, 3e38, float("nan")]], device=device)
    assert implementation.scale_and_cap_(logits, 1.0, 30.0)[0, :3].tolist() == [-30.0, 0.0, 30.0]
    assert logits[0, 3].isnan()


def test_no_rows(implementation, device):
    """A step in which nothing is to be done is no error, and changes nothing."""
    none, logits = torch.zeros(0, dtype=torch.int32, device=device), torch.ones(3, 40, device=device)
    marks = torch.ones(3, 40, dtype=torch.int32, device=device)
    out = implementation.adjust(logits[:0], marks, None, none, **to(device, repeated(NEUTRAL, 0)))
    assert out.shape == (0, 40)
    implementation.count_(marks, none, none)
    implementation.mask_(logits, marks[:0, :2], none)
    assert (marks == 1).all() and (logits == 1).all()


def test_kernels_refuse_columns_that_lie_apart(randn):
    """They would read, and write, what stands between."""
    apart, logits = randn(3, 16)[:, ::2], randn(3, 8)
    marks, parameters = torch.zeros(3, 8, dtype=torch.int32), repeated(NEUTRAL, 3)
    apart_marks, row = apart.int().repeat(1, 2)[:, ::2], torch.zeros(1, dtype=torch.int32)
    for call in (
        lambda: kernel.adjust(apart, marks, None, None, **parameters),
        lambda: kernel.adjust(logits, apart_marks, None, None, **parameters),
        lambda: kernel.adjust(logits, marks, apart, None, **parameters),
        lambda: kernel.count_(apart_marks, row, None),
        lambda: kernel.mask_(apart, marks[:1], row),
        lambda: kernel.mask_(logits, apart_marks[:1], row),
    ):
        with pytest.raises(AssertionError, match="contiguous"):
            call()


@pytest.mark.xdist_group("large_memory")
def test_kernel_offsets_past_int32(device, randn, far_apart):
    """Marks of many sequences are more than 2^31: a product of int32 numbers would point elsewhere."""
    logits, bias = randn(3, 64, dtype=torch.float16).to(device), randn(3, 64).to(device)
    marks, parameters = random_marks(3, 64).to(device), to(device, random_parameters(3))
    slots = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    far_logits, far_marks = far_apart(logits), far_apart(marks)
    for given in (slots, None):
        out = kernel.adjust(far_logits, far_marks, far_apart(bias), given, **parameters)
        assert torch.equal(out, kernel.adjust(logits, marks, bias, given, **parameters))
        for turn in (marks, far_marks):
            kernel.count_(turn, slots + 7, given)
        assert torch.equal(far_marks, marks)
    masks = random_masks(3, 64).to(device)
    kernel.mask_(logits, masks, slots)
    kernel.mask_(far_logits, far_apart(masks), slots)
    assert torch.equal(far_logits, logits)


@pytest.mark.gpu
def test_one_graph_serves_all_parameters(randn):
    """A launch that reads a number on the host would keep that of the step that was captured."""
    logits, masks, rows = randn(4, 1030).cuda(), random_masks(2, 1030).cuda(), torch.tensor([1, 3]).cuda()
    marks, tokens = random_marks(6, 1030).cuda(), torch.tensor([3, 5, -1, 7], dtype=torch.int32).cuda()
    slots, bias = torch.tensor([4, 1, 0, 5], dtype=torch.int32).cuda(), randn(6, 1030).cuda()
    parameters = to("cuda", random_parameters(4))

    def step(module, marks):
        module.count_(marks, tokens, slots)
        out = module.adjust(logits, marks, bias, slots, **parameters)
        module.mask_(out, masks, rows)
        return out

    step(kernel, marks.clone())
    graph = torch.cuda.CUDAGraph()
    expected_marks = marks.clone()
    with torch.cuda.graph(graph):
        out = step(kernel, marks)
    for seed in range(3):
        logits.copy_(randn(4, 1030))
        tokens.copy_(torch.tensor([seed, 1029, 1030, 8]))
        slots.copy_(torch.tensor(random.Random(seed).sample(range(6), 4)))
        for name, values in random_parameters(4, seed + 1).items():
            parameters[name].copy_(values)
        graph.replay()
        assert torch.equal(out, step(reference, expected_marks))
        assert torch.equal(marks, expected_marks)
