"""Small arrays to the device and back: values, shapes, and copies that nobody can change afterwards."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from rosebatch.engine import staging
from rosebatch.engine.staging import Staging

DEPTH = 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def numbers(size, seed=0):
    return np.random.default_rng(seed).integers(-(2**31), 2**31, size).astype(np.int32)


def test_several_arrays_in_one_copy_keep_their_places(device):
    """Empty ones too: a step without sampling rows sends such."""
    arrays = [numbers(size, seed) for seed, size in enumerate([5, 0, 1, 1000, 0, 63])]
    sent = Staging(device).send(*arrays)
    assert [tensor.device.type for tensor in sent] == [device.type] * 6
    assert {tensor.dtype for tensor in sent} == {torch.int32}
    for tensor, array in zip(sent, arrays, strict=True):
        assert np.array_equal(tensor.cpu().numpy(), array)


MIXED = [
    numbers(3),
    np.arange(5, dtype=np.int64) - 2**40,
    numbers(1),
    np.array([0.1, 1e-300]),
    np.array([], np.int64),
    np.array([0.5, 2**-30, -3.0], np.float32),
    np.array([7], np.int64),
]


def test_numbers_of_all_kinds_in_one_copy(device):
    """Block ids are int64, random numbers fp64: a sampled step sends them beside fp32 parameters."""
    for tensor, array in zip(Staging(device).send(*MIXED), MIXED, strict=True):
        assert tensor.cpu().numpy().dtype == array.dtype
        assert np.array_equal(tensor.cpu().numpy(), array)


def test_places_of_numbers_of_8_bytes():
    """At an odd place of the int32 buffer, a GPU cannot view them as what they are."""
    places, total = staging.lay_out(MIXED)
    assert [place.stop - place.start for place in places] == [3, 10, 1, 4, 0, 3, 2]
    assert all(place.start % 2 == 0 for place, array in zip(places, MIXED, strict=True) if array.itemsize == 8)
    assert all(a.stop <= b.start for a, b in pairwise(places))
    assert places[-1].stop == total == 3 + 1 + 10 + 1 + 1 + 4 + 3 + 1 + 2


def test_nothing_but_empty_arrays(device):
    (sent,) = Staging(device).send(np.array([], np.int32))
    assert sent.shape == (0,)


def test_slices_that_are_not_contiguous(device):
    """Moves come as the columns of a matrix."""
    pairs = numbers(14).reshape(7, 2)
    sources, targets = Staging(device).send(*pairs.T)
    assert sources.tolist() == pairs[:, 0].tolist()
    assert targets.tolist() == pairs[:, 1].tolist()


def test_what_was_sent_does_not_follow_the_array(device):
    """The caller may fill the same array again while the copy is under way."""
    array = numbers(100)
    (sent,) = Staging(device).send(array)
    wanted = array.copy()
    array[:] = 0
    assert np.array_equal(sent.cpu().numpy(), wanted)


@pytest.mark.parametrize("shape", [(1,), (7,), (8, 33), (2000,)])
def test_fetch_brings_values_in_their_shape(device, shape):
    values = numbers(int(np.prod(shape))).reshape(shape)
    fetched = Staging(device).fetch(torch.from_numpy(values).to(device))()
    assert fetched.dtype == np.int32
    assert np.array_equal(fetched, values)


def test_fetch_brings_a_view_of_a_wider_tensor(device):
    """The first tokens of a step are the start of a row with as many tokens as slots."""
    values = numbers(20).reshape(2, 10)
    tensor = torch.from_numpy(values).to(device)
    assert np.array_equal(Staging(device).fetch(tensor[0, :3])(), values[0, :3])
    assert np.array_equal(Staging(device).fetch(tensor[:, 2:5])(), values[:, 2:5])


def test_fetch_brings_what_was_there_when_it_was_asked_for(device):
    """The next window writes over the history before the tokens of the last are read."""
    tensor = torch.from_numpy(numbers(50)).to(device)
    wanted = tensor.tolist()
    fetch = Staging(device).fetch(tensor)
    tensor.zero_()
    assert fetch().tolist() == wanted
    assert fetch().tolist() == wanted


def test_as_many_fetches_as_there_are_buffers_wait_at_a_time(device):
    lines = Staging(device)
    waits = [lines.fetch(torch.full((size,), size, dtype=torch.int32, device=device)) for size in range(DEPTH)]
    assert [wait().tolist() for wait in waits] == [[size] * size for size in range(DEPTH)]


def test_a_fetch_that_would_overwrite_an_unread_one_is_refused(device):
    """The ninth took the first one's buffer, and its tokens came back in the place of the first one's."""
    lines = Staging(device)
    tensors = [torch.full((3,), number, dtype=torch.int32, device=device) for number in range(DEPTH + 1)]
    first, *others = [lines.fetch(tensor) for tensor in tensors[:-1]]
    with pytest.raises(AssertionError, match="8 transfers ago, a fetch was begun whose values were not read"):
        lines.fetch(tensors[-1])
    # Nothing was lost: it is read, and its buffer is free.
    assert first().tolist() == [0, 0, 0]
    ninth = lines.fetch(tensors[-1])
    with pytest.raises(AssertionError, match="were not read"):
        lines.fetch(tensors[0])
    assert [wait().tolist() for wait in (*others, ninth)] == [[number] * 3 for number in range(1, DEPTH + 1)]


@pytest.mark.gpu
def test_a_send_that_would_overwrite_an_unread_fetch_is_refused():
    """Both take the same buffers in turn. Only on a GPU: copies on a CPU have none."""
    lines = Staging(torch.device("cuda"))
    wait = lines.fetch(torch.arange(3, dtype=torch.int32, device="cuda"))
    for _ in range(DEPTH - 1):
        lines.send(numbers(5))
    with pytest.raises(AssertionError, match="were not read"):
        lines.send(numbers(5))
    assert wait().tolist() == [0, 1, 2]
    lines.send(numbers(5))


def test_many_fetches_read_in_turn(device):
    """As an engine does: two under way at a time, for ever."""
    lines, waits, got = Staging(device), [], []
    for number in range(5 * DEPTH):
        waits.append(lines.fetch(torch.full((number,), number, dtype=torch.int32, device=device)))
        if len(waits) == 2:
            got.append(waits.pop(0)().tolist())
    assert got == [[number] * number for number in range(5 * DEPTH - 1)]


def test_many_sends_in_a_row_each_keep_their_own_values(device):
    """Buffers come round and grow while copies out of them are under way: an early reuse would mix the values."""
    lines = Staging(device)
    sizes = [1, 5000, 3, 1024, 1025, 0, 70000, 2] * (2 * DEPTH)
    arrays = [numbers(size, seed) for seed, size in enumerate(sizes)]
    if device.type == "cuda":
        # Keeps the stream busy, so that all copies are still to come when the last is asked for.
        torch.cuda._sleep(10**8)
    sent = [lines.send(array, array[::-1]) for array in arrays]
    for (forwards, backwards), array in zip(sent, arrays, strict=True):
        assert np.array_equal(forwards.cpu().numpy(), array)
        assert np.array_equal(backwards.cpu().numpy(), array[::-1])
