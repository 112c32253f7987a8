"""The seams carry what no family has yet: a model of unlike layers, a sum of experts, a runner in another process."""

import pickle
import subprocess

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.build import LoadedModel, build_engine
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.engine import Engine
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.ops.device import device_ops
from rosebatch.ops.select import select
from tests.engine.remote_runner import BLOCK_SIZE, BLOCKS, GROUP_OF, WINDOWS, make_runner
from tests.engine.toy_model import CONFIG, CPU, VOCAB, ToyModel, dense_attention
from tests.helpers.checkout import ROOT, environment
from tests.helpers.forked_jobs import python
from tests.helpers.waiting import PATIENCE_SECONDS

SLOTS = 3
PROMPTS = [(3, 1, 4, 1, 5, 9, 2, 6, 5), (27, 18), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9), (31,)]
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
# Of those ways to run a decode step that know of heads and windows.
WAYS = {"fused": (), "apart": ("fused_rotary", "fused_kv_append"), "split": ("fused_norm", "fused_mlp")}


@pytest.fixture(scope="module")
def expected():
    """Greedy completions of the model with dense attention, one prompt at a time."""
    model = ToyModel(select(Switches.resolve({}, "cpu")))
    completions = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(SAMPLING.max_tokens):
            with torch.inference_mode():
                hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), dense_attention)
                tokens.append(int(model.logits(hidden[-1:]).argmax()))
        completions.append(tuple(tokens[len(prompt) :]))
    assert len({len(set(completion)) for completion in completions}) > 1, "a model that repeats itself shows nothing"
    return completions


def completions(engine):
    requests = [Request(i, prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    done = {completion.request.id: completion.token_ids for completion in engine.run(requests)}
    engine.scheduler.check_integrity()
    return [done[i] for i in range(len(PROMPTS))]


def scheduler(**options):
    pools = [BlockPool(BLOCKS, BLOCK_SIZE, window) for window in WINDOWS]
    return Scheduler(*pools, max_num_seqs=SLOTS, max_num_batched_tokens=10, **options)


def engine_of(runner, async_depth=0, **options):
    return Engine(scheduler(**options), runner, vocab_size=VOCAB, max_model_len=40, async_depth=async_depth)


def test_layers_may_differ_in_heads_size_and_window(expected):
    """One head size or window for all layers, taken from the config, would change tokens or fail."""
    assert completions(engine_of(make_runner())) == expected


def test_a_model_of_its_own_gets_an_engine(expected):
    """The engine is put together from what the model says of its attention."""
    switches = Switches.resolve({}, "cpu")
    ops = select(switches)
    config = RunConfig(device="cpu", max_num_seqs=SLOTS, block_size=BLOCK_SIZE, kv_cache_memory=1 << 20)
    loaded = build_engine(LoadedModel(ToyModel(ops), CONFIG, ops, torch.float32, CPU), config, switches)
    assert completions(loaded.engine) == expected
    # K and V of 16 numbers a token in the first layer, of 16 in the one with a window of 5, of 64 in that of 7.
    pools = loaded.engine.scheduler.blocks.pools
    assert [pool.window for pool in pools] == [0, 5, 7]
    blocks_times_numbers = sum(pool.num_blocks * size for pool, size in zip(pools, (16, 16, 64), strict=True))
    assert loaded.kv_cache_bytes == blocks_times_numbers * BLOCK_SIZE * 2 * 4


@pytest.mark.thorough
@pytest.mark.matrix
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("off", WAYS.values(), ids=WAYS)
def test_kernels_serve_layers_that_differ(off, expected):
    """A workspace, an append or a mask made for one kind of layer would be wrong for the other."""
    served = {"cuda_graph", *off}
    switches = Switches(**{name: name not in served for name in Switches.__dataclass_fields__})
    ops = select(switches, "cuda")
    model = ToyModel(ops)
    layers = [spec.planes for spec in model.mixers]
    runner = TritonRunner(
        model,
        KVCache(layers, [BLOCKS + 1] * len(WINDOWS), BLOCK_SIZE, torch.float32, CPU, ops, GROUP_OF),
        ops,
        device_ops(switches),
        switches,
        vocab_size=VOCAB,
        eos_token_ids=(),
        max_num_seqs=SLOTS,
        max_len=40,
        window=4,
    )
    assert completions(engine_of(runner, async_depth=1, policy=SeparateDecodes(4))) == expected


class RemoteRunner:
    """Sends plans to another process, which has no scheduler and no sequences."""

    def __init__(self):
        self.process = subprocess.Popen(
            [python(), "-m", "tests.engine.remote_runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
        )

    def launch(self, plan, masks):
        pickle.dump(plan, self.process.stdin)
        self.process.stdin.flush()
        result = pickle.load(self.process.stdout)
        return lambda: result

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.thorough
def test_plans_are_carried_out_in_another_process(expected):
    """A plan that held a live object, or left out what a runner needs, could not be carried out there."""
    runner = RemoteRunner()
    try:
        assert completions(engine_of(runner)) == expected
    finally:
        runner.close()
