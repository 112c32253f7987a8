"""What a step does in addition to the forward pass and sampling. No torch."""

from collections.abc import Iterable
from typing import NamedTuple

from rosebatch.core.sampling_params import MAX_LOGPROBS
from rosebatch.engine.plan import SequenceSpec


class Features(NamedTuple):
    """The needs of a batch. Each combination has CUDA graphs of its own; most runs only need the plain one.

    Attributes:
        adjusts: some logits depend on the tokens so far, or are biased.
        biased: some are biased.
        logprobs: likeliest tokens to report with each token, 0 or ``MAX_LOGPROBS``; None for no report.
    """

    adjusts: bool = False
    biased: bool = False
    logprobs: int | None = None

    @classmethod
    def of(cls, specs: Iterable[SequenceSpec]) -> "Features":
        """What these sequences need together."""
        params = [spec.sampling for spec in specs if spec.has_features]
        asked = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            adjusts=any(p.adjusts for p in params),
            biased=any(p.logit_bias for p in params),
            logprobs=(MAX_LOGPROBS if any(asked) else 0) if asked else None,
        )
