"""A run over time in bounded memory: when there are too many samples, each pair becomes one."""

from array import array
from copy import deepcopy
from typing import Any

_MAX_BUCKETS = 240
_FIRST_WIDTH = 0.02


class Timeline:
    """Tokens and occupancy by spans of time of one width, which doubles as the run gets longer."""

    def __init__(self) -> None:
        self._width = _FIRST_WIDTH
        self._end = 0.0
        self._prompt_tokens = array("d")
        self._output_tokens = array("d")
        self._live = array("d")
        self._blocks = array("d")

    def add(self, seconds: float, *, prompt_tokens: int, output_tokens: int, live: int, blocks: int) -> None:
        """Count a step, spread over the time since the last one.

        Args:
            seconds: since the run began, at the end of the step.
            prompt_tokens, output_tokens: computed and generated in it.
            live: sequences that were running.
            blocks: blocks of the KV cache in use.
        """
        while seconds >= _MAX_BUCKETS * self._width:
            self._widen()
        began, self._end = min(self._end, seconds), seconds
        last = int(seconds / self._width)
        if (missing := last + 1 - len(self._live)) > 0:
            for values in self._samples():
                values.extend([0.0] * missing)
        for index in range(int(began / self._width), last + 1):
            inside = min(seconds, (index + 1) * self._width) - max(began, index * self._width)
            share = inside / (seconds - began) if seconds > began else float(index == last)
            self._prompt_tokens[index] += share * prompt_tokens
            self._output_tokens[index] += share * output_tokens
            self._live[index] = max(self._live[index], live)
            self._blocks[index] = max(self._blocks[index], blocks)

    def merge(self, other: "Timeline") -> None:
        """Add what another engine did at the same time."""
        other = deepcopy(other)
        while self._width < other._width:
            self._widen()
        while other._width < self._width:
            other._widen()
        self._end = max(self._end, other._end)
        for values, more in zip(self._samples(), other._samples(), strict=True):
            values.extend([0.0] * (len(more) - len(values)))
            for index, value in enumerate(more):
                values[index] += value

    def _samples(self) -> tuple["array[float]", ...]:
        return self._prompt_tokens, self._output_tokens, self._live, self._blocks

    def as_dict(self) -> dict[str, Any]:
        """``seconds_per_sample``; tokens a second, and most sequences and blocks, in each."""
        return {
            "seconds_per_sample": self._width,
            "prompt_tokens_per_s": [tokens / self._width for tokens in self._prompt_tokens],
            "output_tokens_per_s": [tokens / self._width for tokens in self._output_tokens],
            "live_sequences": [int(value) for value in self._live],
            "blocks_used": [int(value) for value in self._blocks],
        }

    def _widen(self) -> None:
        self._width *= 2
        for values, merge in (
            (self._prompt_tokens, sum),
            (self._output_tokens, sum),
            (self._live, max),
            (self._blocks, max),
        ):
            values[:] = array("d", [merge(values[i : i + 2]) for i in range(0, len(values), 2)])
