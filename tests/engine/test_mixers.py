"""A kind of token mixing that no family has, defined here alone: K and V differ in width, in both runners."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import rosebatch
from rosebatch.config.model import Planes
from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.cache.kv_cache import KVCache, bytes_per_block
from rosebatch.engine.cache.windows import window_groups
from rosebatch.engine.engine import Engine
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.torch_runner.runner import TorchRunner
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.model.contract import rows_of
from rosebatch.model.mixers.mixer import MixerSpec, TritonMixer
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch.ops.device import device_ops
from rosebatch.ops.select import select
from rosebatch_kernels.common.gather import gather
from tests.engine.toy_model import dense_attention

CPU = torch.device("cpu")
VOCAB, HIDDEN, MAX_LEN, BLOCK_SIZE, SLOTS = 50, 32, 100, 4, 4
HEADS, K_WIDTH, V_WIDTH = 2, 6, 10
QKV_SIZES = HEADS * K_WIDTH, HEADS * K_WIDTH, HEADS * V_WIDTH
PREFIX = tuple(7 * i % VOCAB for i in range(72))
# Prompts that share a prefix, one that is whole blocks twice, and others.
PROMPTS = [PREFIX, PREFIX, (*PREFIX[:40], 3, 1, 4), (27, 18), (*PREFIX[:64], 9, 9), (31,), PREFIX[:12], PREFIX[:12]]
NEW_TOKENS = 12


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WideValues(MixerSpec):
    """Softmax attention whose values are wider than its keys. The input is q, k and v as projected."""

    @property
    def planes(self):
        return Planes(HEADS, K_WIDTH), Planes(HEADS, V_WIDTH)

    @property
    def out(self):
        return HEADS * V_WIDTH

    def append(self, step, inputs):
        """Write K and V; returns q ``[T, heads, K_WIDTH]``."""
        q, *new = (x.unflatten(1, (HEADS, -1)) for x in inputs[0].split(QKV_SIZES, 1))
        for plane, values, rows in zip(step.planes(self), new, step.append_rows(self), strict=True):
            plane.view(-1, plane.shape[-1]).index_copy_(0, rows.flatten(), values.flatten(0, 1))
        return q

    def torch_step(self, step, inputs):
        def attend(q, tiles):
            rows, keys = (1 if tiles.generated else len(tiles.mask)), tiles.mask.shape[-1]
            q = q.unflatten(0, (-1, rows)).transpose(1, 2)
            planes = zip(step.planes(self), tiles.rows, strict=True)
            (k,), (v,) = (gather(plane, places, len(q), keys) for plane, places in planes)
            weights = (q @ k.transpose(-1, -2) + tiles.mask).softmax(-1)
            return (weights @ v).transpose(1, 2).reshape(-1, self.out)

        return step.attend(self, self.append(step, inputs), attend)

    @classmethod
    def triton_mixer(cls, specs, setup):
        return TritonWideValues()


class TritonWideValues(TritonMixer):
    """A token at a time, from the block tables."""

    def packed(self, spec, step, inputs, wanted):
        return rows_of(self.decode(spec, step, inputs), wanted)

    def decode(self, spec, step, inputs):
        q, table, planes = spec.append(step, inputs), step.table(spec), step.planes(spec)
        out = q.new_zeros(len(q), spec.out)
        for token, (row, position) in enumerate(zip(step.rows().tolist(), step.positions.tolist(), strict=True)):
            if row >= 0:
                first = max(0, position + 1 - spec.window) if spec.window else 0
                blocks = table[row, first // BLOCK_SIZE : position // BLOCK_SIZE + 1].long()
                skipped, end = first % BLOCK_SIZE, position + 1 - first // BLOCK_SIZE * BLOCK_SIZE
                k, v = (plane[0, blocks].transpose(0, 1).flatten(1, 2)[:, skipped:end] for plane in planes)
                out[token] = ((q[token, :, None] @ k.transpose(1, 2)).softmax(-1) @ v).flatten()
        return out


def plain(spec, *inputs, wanted=None):
    """The mixing of one whole sequence, written out."""
    if type(spec) is PagedAttentionSpec:
        return dense_attention(spec, *inputs)
    q, k, v = (x.unflatten(1, (HEADS, -1)).transpose(0, 1) for x in inputs[0].split(QKV_SIZES, 1))
    seen = torch.ones(len(inputs[0]), len(inputs[0]), dtype=torch.bool).tril()
    if spec.window:
        seen = seen.triu(1 - spec.window)
    weights = (q @ k.transpose(1, 2)).masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


class Model:
    """The kind with and without a window, next to softmax attention."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)
        softmax = PagedAttentionSpec(layer=1, num_heads=4, num_kv_heads=2, head_dim=8, scale=0.4)
        self.mixers = [WideValues(layer=0), softmax, WideValues(layer=2, window=9)]
        sizes = [(sum(QKV_SIZES), HEADS * V_WIDTH), (64, 32), (sum(QKV_SIZES), HEADS * V_WIDTH)]
        self.weights = [(self._random(HIDDEN, width), self._random(out, HIDDEN)) for width, out in sizes]
        self.embedding = self._random(VOCAB, HIDDEN) * HIDDEN**0.5

    def forward(self, input_ids, positions, attention, wanted=None):
        hidden = self.embedding[input_ids]
        for spec, (qkv, out) in zip(self.mixers, self.weights, strict=True):
            hidden = hidden + attention(spec, 2 * functional.rms_norm(hidden, (HIDDEN,)) @ qkv) @ out
        return rows_of(functional.rms_norm(hidden, (HIDDEN,)), wanted)

    def logits(self, hidden):
        return hidden @ self.embedding.t()

    def _random(self, *shape):
        return torch.randn(shape, generator=self.generator) / shape[0] ** 0.5


@pytest.fixture(scope="module")
def expected():
    """Greedy completions of the whole sequences, one prompt at a time."""
    model, completions = Model(), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            hidden = model.forward(torch.tensor(tokens), None, plain)
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
        completions.append(tuple(tokens[len(prompt) :]))
    assert len({token for completion in completions for token in completion}) > 10, "it repeats itself"
    return completions


class Recorded:
    """Keeps the plans that a runner gets."""

    def __init__(self, runner):
        self.runner, self.plans = runner, []

    def launch(self, plan, masks):
        self.plans.append(plan)
        return self.runner.launch(plan, masks)


def make_cache(model, blocks, ops):
    layers, windows = [spec.planes for spec in model.mixers], [spec.window for spec in model.mixers]
    groups, group_of = window_groups(windows, MAX_LEN)
    cache = KVCache(layers, [blocks] * len(groups), BLOCK_SIZE, torch.float32, CPU, ops, group_of)
    assert cache.nbytes == blocks * bytes_per_block(layers, BLOCK_SIZE, torch.float32)
    return cache, groups


def run(runner, groups, blocks, n=1, **options):
    """Completions of all prompts, the plans, and the engine. Prompts go in steps of 16 tokens."""
    pools = [BlockPool(blocks, BLOCK_SIZE, window) for window in groups]
    scheduler = Scheduler(*pools, max_num_seqs=SLOTS, max_num_batched_tokens=16, **options)
    runner = Recorded(runner)
    engine = Engine(scheduler, runner, vocab_size=VOCAB, max_model_len=MAX_LEN)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, n=n)
    done = [[None] * n for _ in PROMPTS]
    for completion in engine.run([Request(i, prompt, sampling) for i, prompt in enumerate(PROMPTS)]):
        done[completion.request.id][completion.sample] = completion.token_ids
    scheduler.check_integrity()
    return done, runner.plans, engine


@pytest.mark.parametrize(("blocks", "n"), [(200, 1), (200, 3), (30, 1)], ids=["plenty", "completions", "cramped"])
def test_the_pytorch_runner(blocks, n, expected):
    """One width for K and V, or one tensor, anywhere in cache, copies, wipes or gathers would change tokens or fail."""
    ops, model = select(Switches.resolve({}, "cpu")), Model()
    cache, groups = make_cache(model, blocks, ops)
    assert [data.shape[1:] for data in cache.tensors] == [
        (1, blocks, HEADS, BLOCK_SIZE, K_WIDTH),
        (1, blocks, HEADS, BLOCK_SIZE, V_WIDTH),
        (2, blocks, 2, BLOCK_SIZE, 8),
        (1, blocks, HEADS, BLOCK_SIZE, K_WIDTH),
        (1, blocks, HEADS, BLOCK_SIZE, V_WIDTH),
    ]
    done, plans, engine = run(TorchRunner(model, cache, ops), groups, blocks, n)
    assert done == [[completion] * n for completion in expected]
    whole = n * sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS)
    assert (engine.stats.preemptions > 0) is (blocks == 30)
    assert engine.stats.computed_tokens < whole or engine.stats.preemptions, "prefixes are found"
    assert any(plan.copies for plan in plans), "a prompt of whole blocks copies its last one"
    assert max(len(chunk.token_ids) for plan in plans for chunk in plan.chunks) == 16


@pytest.mark.thorough
def test_the_triton_runner(expected):
    """The same kind, next to the kernels of another."""
    served = {"cuda_graph", "fused_norm", "fused_mlp"}
    switches = Switches(**{name: name not in served for name in Switches.__dataclass_fields__})
    ops, model = select(switches, "cuda"), Model()
    cache, groups = make_cache(model, 200 + 1, ops)
    lengths = {"vocab_size": VOCAB, "max_num_seqs": SLOTS, "max_len": MAX_LEN, "window": 4}
    runner = TritonRunner(model, cache, ops, device_ops(switches), switches, eos_token_ids=(), **lengths)
    done, plans, _ = run(runner, groups, 200, policy=SeparateDecodes(4))
    assert done == [[completion] for completion in expected]
    assert any(plan.copies for plan in plans)


def test_a_kind_touches_its_own_files_only():
    """The tests above have nothing but this file. Of the kinds that are there, no generic file names a guest."""
    root = Path(rosebatch.__file__).parent
    own = ("model/mixers/hp1", "model/families/hp1", "config/hp1", "ops/hp1")
    # The lists of switches, and of the fields of model configs.
    lists = {"config/switches.py", "config/model.py"}
    naming = {
        name
        for path in root.rglob("*.py")
        if not (name := path.relative_to(root).as_posix()).startswith(own) and "hp1" in path.read_text().lower()
    }
    assert naming == lists
