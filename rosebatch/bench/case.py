"""A scenario together with the model and the engine options that it is run with."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rosebatch.bench.scenario import Scenario
from rosebatch.bench.workload import Workload, make_workload
from rosebatch.config import RunConfig
from rosebatch.engine.kv_cache import bytes_for_longest
from rosebatch.engine.roofline import Floor, Rates, find_floor
from rosebatch.model.source import ModelSource

# KV blocks are counted in no smaller size, whatever the engine's: an estimate that is too large does no harm.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario to run.

    Attributes:
        name: of the scenario.
        scenario: with the flags of the command line applied.
        config: for the engine, in agreement with the scenario.
        source: the model, resolved, for its shape and for other engines.
        device: ``cpu`` or ``cuda``.
        attribution: whether to find out where the time goes.
    """

    name: str
    scenario: Scenario
    config: RunConfig
    source: ModelSource
    device: str
    attribution: bool = False

    @property
    def dtype(self) -> str:
        """Name of the dtype that the model runs in."""
        return str(self.source.dtype).removeprefix("torch.")

    def workload(self, run: int = 0) -> Workload:
        """See ``make_workload``."""
        return make_workload(self.scenario, self.source.config.vocab_size, run)

    def floor(self, rates: Rates) -> Floor:
        """The floor of each run: their lengths are the same."""
        workload, scenario = self.workload(), self.scenario
        return find_floor(
            self.source.config,
            self.source.dtype.itemsize,
            workload.prompt_lens,
            workload.output_lens,
            max_num_seqs=scenario.max_num_seqs,
            rates=rates,
            cached_prefix=scenario.shared_prefix_len if scenario.prefix_cache else 0,
        )


def needed_kv_memory(case: Case) -> int:
    """Bytes of a KV cache in which the longest ``max_num_seqs`` sequences fit whole, with a block to spare for each."""
    workload, block = case.workload(), max(case.config.block_size or 0, _BLOCK)
    totals = map(sum, zip(workload.prompt_lens, workload.output_lens, strict=True))
    return bytes_for_longest(case.source.config.kv_shapes, block, case.source.dtype, totals, case.scenario.max_num_seqs)


def release_memory() -> None:
    """Give the GPU memory of engines that are no longer referenced back, and start its peak anew."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest; of an even number of values the lower of the two in the middle."""
    ordered = sorted(values)
    return {"median": ordered[(len(ordered) - 1) // 2], "min": ordered[0], "max": ordered[-1]}
