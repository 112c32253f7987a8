"""Mean and percentiles of any number of durations, in memory that does not grow with the number."""

import math
from collections.abc import Iterable

# Relative width of a bucket. A percentile is off by at most half of it.
_WIDTH = 0.005
_SHORTEST = 1e-9
_RANKS = (50, 90, 95, 99)


class Durations:
    """Seconds, counted in buckets of a logarithmic scale (the idea of HdrHistogram and DDSketch, arXiv 1908.10693)."""

    __slots__ = ("_buckets", "_maximum", "_minimum", "_sum")

    def __init__(self, values: Iterable[float] = ()) -> None:
        # No ``Counter``: workers send these all the time, and it takes twice as long to unpickle and to add up.
        self._buckets: dict[int, int] = {}
        self._minimum, self._maximum, self._sum = math.inf, 0.0, 0.0
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return sum(self._buckets.values())

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a duration ``count`` times."""
        bucket = round(math.log(max(seconds, _SHORTEST)) / _WIDTH)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self._sum += seconds * count
        if seconds < self._minimum:
            self._minimum = seconds
        if seconds > self._maximum:
            self._maximum = seconds

    def merge(self, other: "Durations") -> None:
        """Count those of another one too."""
        own = self._buckets
        for bucket, count in other._buckets.items():
            own[bucket] = own.get(bucket, 0) + count
        self._sum += other._sum
        self._minimum, self._maximum = min(self._minimum, other._minimum), max(self._maximum, other._maximum)

    def summary(self) -> dict[str, float]:
        """``mean``, which is exact, and the percentiles of a report; empty without values."""
        return {"mean": self._sum / len(self), **self.percentiles(_RANKS)} if self._buckets else {}

    def percentiles(self, ranks: Iterable[int]) -> dict[str, float]:
        """Nearest-rank percentiles as ``{"p50": ...}``, accurate to a quarter of a percent; empty without values."""
        if not self._buckets:
            return {}
        ordered = sorted(self._buckets.items())
        return {f"p{rank}": self._value_at(-(-len(self) * rank // 100), ordered) for rank in ranks}

    def _value_at(self, place: int, ordered: list[tuple[int, int]]) -> float:
        for bucket, count in ordered:
            place -= count
            if place <= 0:
                return min(max(math.exp(bucket * _WIDTH), self._minimum), self._maximum)
        raise AssertionError("a rank is at most the number of values")
