"""A scenario together with the model and the engine options that it runs with."""

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch

from rosebatch.bench.scenario import Scenario
from rosebatch.bench.workload import Workload, make_workload
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.plain import dtype_name
from rosebatch.engine.cache.kv_cache import bytes_for_longest
from rosebatch.engine.cache.memory import batched_tokens
from rosebatch.engine.metrics.roofline import Floor, Rates, find_floor
from rosebatch.launch.launch import Launched, launch
from rosebatch.launch.plan import resolve_switches
from rosebatch.model.source import ModelSource
from rosebatch.ops.layout import MatrixBytes

# The estimate counts KV blocks of at least this size, whatever the engine's: too large an estimate does no harm.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario to run.

    Attributes:
        name: of the scenario.
        scenario: with the command line's flags applied.
        config: for the engine, consistent with the scenario.
        source: the model, resolved. It gives the shape, also for other engines.
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
        """Name of the dtype in which the model runs."""
        return dtype_name(self.source.dtype)

    @property
    def switches(self) -> Switches:
        """As decided for the device."""
        return resolve_switches(self.config, self.device)

    @property
    def kept(self) -> MatrixBytes:
        """What the matrices of layers take."""
        return self.source.quantization.kept(self.switches, self.device, self.source.dtype)

    def workload(self, run: int = 0) -> Workload:
        """See ``make_workload``."""
        return make_workload(self.scenario, self.source.config.vocab_size, run)

    def floor(self, rates: Rates) -> Floor:
        """The floor of any run: lengths are the same in all of them."""
        workload, scenario = self.workload(), self.scenario
        return find_floor(
            self.source.config,
            self.source.dtype.itemsize,
            workload.prompt_lens,
            workload.output_lens,
            max_num_seqs=scenario.max_num_seqs,
            rates=rates.of(self.config.tensor_parallel_size),
            cached_prefix=scenario.shared_prefix_len if scenario.prefix_cache else 0,
            kept=self.kept,
        )


def needed_kv_memory(case: Case) -> int:
    """Bytes of a KV cache for the ``max_num_seqs`` longest sequences, with a spare block for each."""
    workload, block = case.workload(), max(case.config.block_size or 0, _BLOCK)
    totals = map(sum, zip(workload.prompt_lens, workload.output_lens, strict=True))
    slots, chunk = case.scenario.max_num_seqs, batched_tokens(case.config, case.device)
    source = case.source
    whole = bytes_for_longest(source.config, block, source.dtype, totals, slots, chunk, source.draft_planes)
    # Each process has some of the K/V heads.
    fewest = min(source.config.num_kv_heads, source.config.of_window(0).num_kv_heads)
    return -(-whole // min(case.config.tensor_parallel_size, fewest))


def launch_case(config: RunConfig) -> Launched:
    """An engine of a case; a line on stderr says how it fits.

    Raises:
        UserError: as ``rosebatch.launch.launch.launch``.
    """
    launched = launch(config)
    sys.stderr.write(f"rosebatch: {launched.plan.source.name} {launched.plan.fit}\n")
    return launched


def release_memory() -> None:
    """Return the GPU memory of engines that nobody references any more, and reset the peak."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum. For an even number of values the median is the lower of the middle two."""
    return {"median": median_low(values), "min": min(values), "max": max(values)}
