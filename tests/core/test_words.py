"""Sentences for people."""

import pytest

from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import StructuredOutputsParams
from rosebatch.core.words import quoted


@pytest.mark.parametrize("value", ["x" * 198, [1] * 66, {"a": 1.5}, None, b"x" * 197])
def test_short_values_are_quoted_as_they_are(value):
    """A cut must leave nothing out of what people look for."""
    assert quoted(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 10**6, [1] * 10**6, (1,) * 10**6, dict.fromkeys(range(10**5)), 10**201])
def test_long_values_are_cut(value):
    """A message of 10 MB quoted a list of a million texts."""
    assert quoted(value) == repr(value)[:200] + " ..."


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(stop=["s"] * 10**5),
        lambda: SamplingParams(stop=dict.fromkeys(range(10**5))),
        lambda: SamplingParams(temperature="0" * 10**5),
        lambda: SamplingParams(logit_bias=["0"] * 10**5),
        lambda: PoolingParams(dimensions=[0] * 10**5),
        lambda: PoolingParams(normalize="x" * 10**5),
        lambda: StructuredOutputsParams(regex=[0] * 10**5),
        lambda: StructuredOutputsParams(choice=[0] * 10**5),
    ],
)
def test_messages_quote_no_whole_list(make):
    """It is the user's value, and may have any size."""
    with pytest.raises(ValueError, match=r", got .* \.\.\.$") as found:
        make()
    assert len(str(found.value)) < 400
