"""What ``--batched-rollover`` changes: the writes of new blocks in decode steps, and no others (article S1)."""

from collections import Counter

import pytest
import torch

from rosebatch.bench.scenario import load_scenarios
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import DecodeWindow, StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.staging import Staging
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.engine.triton_runner.state import DeviceState

BLOCK_SIZE, WINDOW, BUDGET = 64, 8, 16384


class WritingRunner:
    """Tells the device its state as the GPU's runner does, and computes nothing; every token is 7.

    Attributes:
        writes: to the state, by kind of plan.
        cells: written.
    """

    def __init__(self, slots, longest, batched):
        width = -(-longest // BLOCK_SIZE)
        self.slots, self.staging = Slots(slots, width), Staging(torch.device("cpu"))
        self.state = DeviceState(slots, width, WINDOW, torch.device("cpu"))
        self.apply = self.state.apply if batched else self.state.apply_rollovers_one_by_one
        self.writes, self.cells = Counter(), Counter()
        self.kind = ""
        write = self.state._write

        def counted(cells, staging, many=()):
            self.writes[self.kind] += bool(cells or many)
            self.cells[self.kind] += len(cells) + sum(len(indices) for indices, _ in many)
            write(cells, staging, many)

        self.state._write = counted

    def launch(self, plan, masks):
        window = isinstance(plan, DecodeWindow)
        self.kind = "decodes" if window else "prompts"
        self.apply(self.slots.update(plan), self.staging)
        lengths = [row.length for row in plan.rows] if window else [1] * len(plan.sampled_ids)
        return lambda: StepResult([[7] * length for length in lengths])


def run(name, batched):
    (chosen,) = load_scenarios([name])
    scenario = chosen.scenario
    longest = scenario.input_len + scenario.output_len
    runner = WritingRunner(scenario.max_num_seqs, longest, batched)
    scheduler = Scheduler(
        BlockPool(scenario.max_num_seqs * -(-longest // BLOCK_SIZE), BLOCK_SIZE),
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=BUDGET,
        policy=SeparateDecodes(WINDOW),
        prefix_cache=False,
    )
    engine = Engine(scheduler, runner, vocab_size=10, max_model_len=longest, async_depth=1)
    sampling = SamplingParams(max_tokens=scenario.output_len, ignore_eos=True)
    prompt = (1,) * scenario.input_len
    done = list(engine.run(Request(i, prompt, sampling) for i in range(scenario.num_prompts)))
    assert len(done) == scenario.num_prompts
    return runner


# gpt2-sampled: 256 prompts of 8 full blocks, two more for 128 tokens. article-s1: 256 keys each, in four blocks.
@pytest.mark.parametrize(("name", "rollovers"), [("gpt2-sampled", 256 * 2), ("article-s1", 256 * 3)])
def test_only_rollovers_are_written_one_by_one(name, rollovers):
    """All cells of admitted prompts were written alone too: of 6,144 single writes, 512 were rollovers."""
    on, off = run(name, True), run(name, False)
    assert on.cells == off.cells, "the same is told"
    assert off.writes["prompts"] == on.writes["prompts"] > 0
    # A window's cells beside its rollovers are one write.
    assert rollovers <= off.writes["decodes"] <= rollovers + on.writes["decodes"]
    assert on.writes["decodes"] < rollovers / 8
