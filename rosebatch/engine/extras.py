"""What a step does beside the forward pass and the choice of tokens. No torch."""

from collections.abc import Iterable
from typing import NamedTuple

from rosebatch.request import Sequence
from rosebatch.sampling_params import MOST_LOGPROBS


class Extras(NamedTuple):
    """Needs of a batch: each combination has CUDA graphs of its own, the plain one those of most runs.

    Attributes:
        adjusts: some logits depend on the tokens so far, or are biased.
        biased: some are biased.
        logprobs: likeliest tokens to report beside each, 0 or ``MOST_LOGPROBS``; None for no report at all.
    """

    adjusts: bool = False
    biased: bool = False
    logprobs: int | None = None

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> "Extras":
        """What these need together."""
        params = [sequence.sampling for sequence in sequences if sequence.special]
        asked = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            adjusts=any(p.adjusts for p in params),
            biased=any(p.logit_bias for p in params),
            logprobs=(MOST_LOGPROBS if any(asked) else 0) if asked else None,
        )
