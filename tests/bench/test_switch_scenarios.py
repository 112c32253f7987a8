"""Every switch has a scenario in ``configs/bench`` in which the code that it chooses runs.

A comparison in which both sides run the same code gives a ratio near 1 and says nothing. Where kernels decide, a small
model of the scenario's family runs a few of its rows, and the launches of kernels are compared, which need not compute
anything. Where lengths and numbers of rows decide, the scenario counts as it is.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from rosebatch.bench.scenario import configs_dir, load_scenarios
from rosebatch.bench.workload import Workload, make_workload
from rosebatch.config.byte_sizes import parse_size
from rosebatch.config.model import ModelConfig
from rosebatch.config.switches import Switches, hiding
from rosebatch.config.toml_file import load_toml
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import DecodeWindow, StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.staging import Staging
from rosebatch.engine.triton_runner.prefix_groups import PrefixGroupState
from rosebatch.engine.triton_runner.slots import Slots
from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.grouped import GroupedWeight
from rosebatch.ops.paged_attention import paged_attention_kernels
from rosebatch.ops.select import select
from rosebatch_kernels.common.device import HOPPER, Device
from rosebatch_kernels.fp8.fp8_linear import Fp8Linear
from rosebatch_kernels.linear.streamed import StreamedLinear
from rosebatch_kernels.linear.torch_packed import PackedLinear, can_pack
from rosebatch_kernels.paged_attention import prefill, sizes
from tests.engine.small_models import device_engine
from tests.helpers.checkout import ROOT
from tests.helpers.launches import note_launches

SWITCHES = {switch.name: switch for switch in fields(Switches)}
# What a GPU takes by default: tokens of a block and of a step, steps of a window.
BLOCK_SIZE, BUDGET, WINDOW = 64, 16384, 8
FAMILIES = {"gpt2": "gpt2", "qwen3-0.6b": "llama", "hp1-0.6b": "hp1"}


def scenario_of(switch):
    (chosen,) = load_scenarios([SWITCHES[switch].metadata["scenario"]])
    return chosen.scenario


@dataclass
class Seen:
    """What a run did.

    Attributes:
        launches: of kernels: names, grids and what they were compiled for.
        plans: kinds and sizes.
        writes: to the state of the runner.
        syncs: of the run.
        max_launched: plans under way at a time.
    """

    launches: Counter = field(default_factory=Counter)
    plans: list = field(default_factory=list)
    writes: int = 0
    syncs: int = 0
    max_launched: int = 0

    @property
    def kernels(self):
        """Launches by the name of the kernel."""
        counts = Counter()
        for (name, *_), number in self.launches.items():
            counts[name] += number
        return counts


@pytest.fixture
def observe(monkeypatch):
    """Runs a few rows of a switch's scenario on a small model, with the switch on and off."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the GPU in this process")
    seen = Seen()

    def note(name, grid, keywords):
        kinds = sorted((key, str(value)) for key, value in keywords.items() if isinstance(value, bool | str | None))
        seen.launches[name, str(grid), str(kinds)] += 1

    note_launches(monkeypatch, note)

    def side(switch, on):
        nonlocal seen
        seen = now = Seen()
        scenario = scenario_of(switch)
        off = [*hiding(switch, Switches.resolve({}, "cuda")), *([] if on else [switch])]
        engine = device_engine(FAMILIES[scenario.model], off)
        write = engine.runner.state._write

        def counted_write(cells, staging, many=()):
            now.writes += bool(cells or many)
            write(cells, staging, many)

        engine.runner.state._write = counted_write
        launch = engine.runner.launch

        def counted_launch(plan, masks):
            now.plans.append((type(plan).__name__, plan.num_tokens))
            return launch(plan, masks)

        engine.runner.launch = counted_launch
        prompts = [[number + 1] * min(scenario.input_len, 9) for number in range(3)]
        for request in Workload(prompts, [6] * 3).requests(scenario.sampling):
            engine.add(request)
        while engine.has_unfinished:
            engine.step()
            now.max_launched = max(now.max_launched, len(engine._launched))
        now.syncs = engine.stats.syncs
        return now

    return lambda switch: (side(switch, True), side(switch, False))


def plan_all(switch, *, blocks=0, **options):
    """The plans for the whole scenario, as a GPU's scheduler makes them; every token is 7."""
    scenario = scenario_of(switch)
    workload = make_workload(scenario, 1000)
    limit = blocks or scenario.max_num_seqs * (-(-workload.longest // BLOCK_SIZE) + 1)
    plans = []

    class Runner:
        def launch(self, plan, masks):
            plans.append(plan)
            window = isinstance(plan, DecodeWindow)
            lengths = [row.length for row in plan.rows] if window else [1] * len(plan.sampled_ids)
            return lambda: StepResult([[7] * length for length in lengths])

    limits = {"max_num_seqs": scenario.max_num_seqs, "max_num_batched_tokens": BUDGET}
    policy = SeparateDecodes(WINDOW)
    scheduler = Scheduler(BlockPool(limit, BLOCK_SIZE), **limits, policy=policy, **{"prefix_cache": False, **options})
    engine = Engine(scheduler, Runner(), vocab_size=1000, max_model_len=workload.longest, async_depth=1)
    assert len(list(engine.run(workload.requests(scenario.sampling)))) == scenario.num_prompts
    return plans


def launches_other_kernels(switch, observe, *, of_on=(), of_off=()):
    """The kernels named are launched on that side only, or more often there."""
    on, off = (seen.kernels for seen in observe(switch))
    for name in of_on:
        assert on[name] > off[name], (name, on, off)
    for name in of_off:
        assert off[name] > on[name], (name, on, off)
    assert on != off


def shares_prefixes(switch, observe):
    on, off = (sum(plan.num_tokens for plan in plan_all(switch, prefix_cache=value)) for value in (True, False))
    assert on < off / 2


def splits_prompts(switch, observe):
    on, off = (plan_all(switch, chunked_prefill=value) for value in (True, False))
    chunks = [chunk for plan in on if not isinstance(plan, DecodeWindow) for chunk in plan.chunks]
    assert any(not chunk.sampled for chunk in chunks)
    assert all(plan.num_sequences == len(plan.sampled_ids) for plan in off)


def shares_keys(switch, observe):
    """Nearly all rows of nearly all windows, with the sizes that a GPU takes."""
    scenario, model = scenario_of(switch), model_of(switch)
    plans = plan_all(switch, prefix_cache=True)
    slots = Slots(scenario.max_num_seqs, scenario.shared_prefix_len // BLOCK_SIZE + 4, keeps_tables=True)
    heads = model.num_heads, model.num_kv_heads
    state = PrefixGroupState(slots, BLOCK_SIZE, heads, torch.device("cpu"))
    begins = []
    for plan in plans:
        write = slots.update(plan)
        if plan.reset or plan.started or write.moves:
            state.forget()
        if isinstance(plan, DecodeWindow):
            bucket = slots.bucket(plan.sampled_ids)
            assert state.update(plan.rows, bucket, Staging(torch.device("cpu")))
            begins += [int(state.keys(bucket).begins[slots.slot_of[row.id]]) for row in plan.rows]
    assert len(begins) > 1000
    assert set(begins) == {scenario.shared_prefix_len}


def reads_once_a_step(switch, observe):
    on, off = observe(switch)
    assert off.syncs == on.syncs + sum(tokens for kind, tokens in off.plans if kind == "DecodeWindow") + 3
    assert "_choose" not in on.kernels


def keeps_bits(switch, observe):
    """Every product is packed, in fixed shapes or not."""
    layouts = []
    for value in (True, False):
        switches = replace(Switches.resolve({}, "cpu"), **{switch: value})
        dtype = getattr(torch, scenario_of(switch).dtype)
        weight = DenseWeight.of(torch.zeros(64, 32, dtype=dtype))
        if not can_pack(weight.dense()):
            pytest.skip("this PyTorch has no packed products in this dtype")
        product = select(switches).linear(weight, None)
        assert isinstance(product, PackedLinear)
        layouts.append(product.invariant)
    assert layouts == [True, False]


def results_come_late(switch, observe):
    on, off = observe(switch)
    assert (on.max_launched, off.max_launched) == (1, 0)
    assert len(on.plans) < len(off.plans), "windows of one step"


def rollovers_are_one_write(switch, observe):
    on, off = observe(switch)
    assert on.writes < off.writes
    assert on.plans == off.plans


def streams_weights(switch, observe):
    scenario, model = scenario_of(switch), model_of(switch)
    weight = torch.empty(model.hidden_size, model.num_heads * model.head_dim, dtype=getattr(torch, scenario.dtype))
    on, off = (
        select(replace(Switches.resolve({}, "cuda"), **{switch: value}), "cuda").linear(DenseWeight.of(weight), None)
        for value in (True, False)
    )
    rows = torch.empty(min(scenario.num_prompts, scenario.max_num_seqs), weight.shape[1])
    assert isinstance(on, StreamedLinear) and on.streams(rows)
    assert not isinstance(off, StreamedLinear)


def splits_sequences(switch, observe):
    scenario, model = scenario_of(switch), model_of(switch)
    batch = min(scenario.num_prompts, scenario.max_num_seqs)
    shape = batch, model.num_heads, model.num_kv_heads, model.head_dim, getattr(torch, scenario.dtype)
    assert sizes.undivided_keys(*shape, sizes=sizes.SIZES.measured) < scenario.input_len
    with pytest.MonkeyPatch.context() as patch:
        # The rows of the small model are too short to be divided.
        patch.setattr(sizes, "undivided_keys", lambda *_, **__: 0)
        on, off = observe(switch)
    assert on.kernels == off.kernels and on.launches != off.launches, "other grids"


def leaves_rows_out(switch, observe):
    """The last layer's MLP gets one row of a prompt, not all 5."""
    scenario, rows = scenario_of(switch), []
    assert scenario.output_len == 1, "prompts alone"

    @dataclass
    class Noted:
        mlp: Any

        def __call__(self, normed):
            rows.append(len(normed))
            return self.mlp(normed)

    for off in ((), (switch,)):
        engine = device_engine(FAMILIES[scenario.model], off)
        layers = engine.runner.model.layers
        layers[-1] = replace(layers[-1], mlp=Noted(layers[-1].mlp))
        assert len(list(engine.run(Workload([[1] * 5, [2] * 5], [1, 1]).requests(scenario.sampling)))) == 2
    assert rows == [1, 1, 5, 5]


def leaves_values_out(switch, observe):
    on, off = observe(switch)
    assert on.kernels == off.kernels and on.launches != off.launches, "compiled for something else"


def keeps_numbers(switch, observe):
    """With a model whose weights are fp8 in place of the scenario's own."""
    model, scenario = model_of(switch), scenario_of(switch)
    size = model.num_kv_heads * model.head_dim
    numbers, scales = torch.zeros(size, 128, dtype=torch.uint8), torch.ones(size, 1)
    each = LazyTensor.of(numbers), torch.float8_e4m3fn, LazyTensor.of(scales), None
    weight = GroupedWeight(*each, np.arange(size), np.zeros(128, int), getattr(torch, scenario.dtype))
    for value in (True, False):
        switches = replace(Switches.resolve({}, "cuda"), **{switch: value})
        assert isinstance(select(switches, "cuda").linear(weight, None), Fp8Linear) is value


def has_hoppers_kernel(switch, observe):
    """For the layers of the scenario's model."""
    model, hopper, cpu = model_of(switch), Device.of_arch(HOPPER, 132), torch.device("cpu")
    heads, dtype = (model.num_heads, model.num_kv_heads, model.head_dim), getattr(torch, scenario_of(switch).dtype)
    q = torch.empty(1, model.num_heads * model.head_dim, dtype=dtype)
    cache = torch.empty(2, 1, model.num_kv_heads, BLOCK_SIZE, model.head_dim, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rosebatch.ops.paged_attention.device_of", lambda _: hopper)
        for value in (True, False):
            switches = replace(Switches.resolve({}, "cuda"), **{switch: value})
            launcher = paged_attention_kernels(4, {heads}, {False}, switches, dtype, cpu).prefill
            options = {"num_heads": model.num_heads, "scale": 1.0, **launcher.keywords}
            assert (prefill.hopper_program(q, cache, **options) is not None) is value


def saves_blocks(switch, observe):
    """Nothing is computed twice."""
    scenario, planes = scenario_of(switch), model_of(switch).kv_planes
    blocks = parse_size(scenario.kv_cache_memory) // bytes_per_block(planes, BLOCK_SIZE, torch.bfloat16)
    on, off = (plan_all(switch, blocks=blocks, host_blocks=blocks * value) for value in (True, False))
    computed = scenario.num_prompts * (scenario.input_len + scenario.output_len - 1)
    assert sum(plan.num_tokens for plan in on) == computed < sum(plan.num_tokens for plan in off)
    assert any(plan.restores for plan in on)


def model_of(switch):
    return load_toml(configs_dir() / "models" / f"{scenario_of(switch).model}.toml", ModelConfig)


# How each switch shows that it acts; None: only on a GPU, see tests/gpu/test_switches_gpu.py.
ACTS = {
    "prefix_cache": shares_prefixes,
    "chunked_prefill": splits_prompts,
    "batched_sampling": reads_once_a_step,
    "trim_last_layer": leaves_rows_out,
    "batch_invariant": keeps_bits,
    "paged_attention": None,
    "cuda_graph": None,
    "parallel_compile": None,
    "late_results": results_come_late,
    "batched_rollover": rollovers_are_one_write,
    "fused_sampler": {"of_on": ("_choose", "_summarise")},
    "streamed_linear": streams_weights,
    "fused_norm": {"of_on": ("_norm",)},
    "fused_mlp": {"of_on": ("_activation",)},
    "fused_rotary": {"of_on": ("_prepare",), "of_off": ("_append",)},
    "fused_qk_norm": {"of_off": ("_uclip",)},
    "fused_kv_append": {"of_off": ("_prepare",)},
    "split_keys": splits_sequences,
    "shared_prefix_attention": shares_keys,
    "hopper_prefill": has_hoppers_kernel,
    "fused_peri_norm": {"of_off": ("_uclip",)},
    "sparse_values": leaves_values_out,
    "batched_kv_append": {"of_on": ("_append",)},
    "swap": saves_blocks,
    "quantized_linear": keeps_numbers,
}


def test_every_switch_has_a_way_to_show_it():
    """A new switch must say where it acts."""
    assert list(ACTS) == list(SWITCHES)


@pytest.mark.parametrize("switch", [name for name, acts in ACTS.items() if acts])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_switch_acts_in_its_scenario(switch, observe):
    """Two published ratios were of switches whose code did not run."""
    acts = ACTS[switch]
    if isinstance(acts, dict):
        launches_other_kernels(switch, observe, **acts)
    else:
        acts(switch, observe)


@pytest.mark.parametrize("switch", SWITCHES)
def test_docs_name_the_scenario(switch):
    """The reader who wants a switch's figure finds the work for it."""
    rows = [line.split("|") for line in (ROOT / "docs" / "switches.md").read_text().splitlines()]
    (row,) = [row for row in rows if len(row) == 6 and row[1].strip() == f"`{switch.replace('_', '-')}`"]
    assert re.fullmatch(r"`([\w-]+)`", row[4].strip())[1] == SWITCHES[switch].metadata["scenario"]


@pytest.mark.parametrize(
    ("name", "prompts", "lengths", "batch"),
    [
        ("article-s0", 256, (512, 128), 32),
        ("article-s1", 256, (1, 256), 16),
        ("article-s2", 256, (1, 64), 256),
        ("article-s3", 64, (1, 512), 64),
    ],
)
def test_the_articles_own_work(name, prompts, lengths, batch):
    """GPT-2 in fp16 without a prefix cache, as each article ran it."""
    (chosen,) = load_scenarios([name])
    scenario = chosen.scenario
    assert (scenario.num_prompts, scenario.input_len, scenario.output_len) == (prompts, *lengths)
    assert (scenario.max_num_seqs, scenario.model, scenario.dtype) == (batch, "gpt2", "float16")
    assert not scenario.prefix_cache
    sampled = (scenario.sampling.temperature, scenario.sampling.top_k, scenario.sampling.top_p)
    assert sampled == ((1.0, 50, 0.9) if name == "article-s0" else (0.0, 0, 1.0))
