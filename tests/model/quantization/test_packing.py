"""Fields of bits are read whatever their number, and only where they are wanted."""

import pytest
import torch

from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization.packing import E2M1_KIND, floats, powers_of_two, unpacked
from tests.model.quantization.numbers import E2M1, packed


@pytest.mark.parametrize("word_bits", [8, 32])
@pytest.mark.parametrize("bits", range(1, 9))
def test_fields_that_cross_words(bits, word_bits):
    """Those of 3, 5, 6 and 7 bits do; the sign of a word came along; a cut word read what is behind the last one."""
    generator = torch.Generator().manual_seed(bits)
    for count in (1, 7, 32, 45, 96):
        fields = torch.randint(1 << bits, (3, count), generator=generator)
        words = packed(fields, bits, word_bits)
        expected, wanted = fields.to(torch.uint8), torch.randperm(count, generator=generator)[: count // 2 + 1]
        rows = unpacked(LazyTensor.of(words), bits, -1, count, word_bits)
        assert torch.equal(rows.read(), expected)
        assert torch.equal(rows.take(1, wanted.numpy()).take(0, range(1, 3)).read(), expected[1:, wanted])
        columns = unpacked(LazyTensor.of(words.t().contiguous()), bits, 0, count, word_bits)
        assert torch.equal(columns.take(0, wanted.numpy()).read(), expected[:, wanted].t())


def test_every_4_bit_float_and_power_of_two():
    """A float off by one code, or a scale off by one, would still give numbers."""
    packed = torch.arange(0, 16, 2, dtype=torch.uint8) | torch.arange(1, 16, 2, dtype=torch.uint8) << 4
    codes = floats(unpacked(LazyTensor.of(packed), 4, -1, 16, 8).read(), E2M1_KIND)
    assert torch.equal(codes, E2M1)
    powers = powers_of_two(torch.arange(256, dtype=torch.uint8))
    assert powers[:-1].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert powers[-1].isnan()
