"""Attention of whole steps over the paged cache against naive attention over the full sequence, in float64."""

import math
import random

import pytest
import torch

from rosebatch.config import ModelConfig
from rosebatch.engine.kv_cache import KVCache, bytes_per_block
from rosebatch.engine.plan import Chunk, StepPlan
from rosebatch.engine.torch_runner.attention import GatheredAttention
from rosebatch.engine.torch_runner.batch import build_batch
from rosebatch.ops import Gate, mean_taps, select
from rosebatch.request import Request, Sequence
from rosebatch.toggles import Toggles

OPS = select(Toggles())
CPU = torch.device("cpu")
LAYERS, HEADS, KV_HEADS, SIZE = 2, 6, 2, 8
BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
DTYPES = [torch.float32, *([torch.bfloat16] if BF16 else [])]
# No two heads alike.
SIGMA, GAMMA = torch.linspace(0.3, 1.8, HEADS), torch.linspace(1.5, 0.5, HEADS)
GATE = Gate(mean_taps(SIGMA), GAMMA)


def config(window=0, kv_heads=KV_HEADS, **changes):
    """The first layer sees everything, the second one a window."""
    return ModelConfig(
        family="llama",
        vocab_size=100,
        hidden_size=16,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_dim=SIZE,
        intermediate_size=16,
        max_model_len=4096,
        norm_eps=1e-5,
        activation="silu",
        **{"sliding_windows": (0, window) if window else (), "attention_scales": (0.5, 0.7), **changes},
    )


class Stream:
    """A sequence with q, k and v of every layer and position decided beforehand.

    ``prompt`` of its ``length`` tokens are the prompt, the others count as generated.
    """

    def __init__(self, prompt, length, seed, dtype=torch.float32, kv_heads=KV_HEADS):
        generator = torch.Generator().manual_seed(seed)

        def numbers(heads):
            return torch.randn(LAYERS, length, heads, SIZE, generator=generator).to(dtype)

        self.q, self.k, self.v = numbers(HEADS), numbers(kv_heads), numbers(kv_heads)
        self.sequence = Sequence.start(Request(index=0, prompt_token_ids=(1,) * prompt), max_model_len=4096)
        self.sequence.token_ids = [1] * length
        self.outputs = torch.full((LAYERS, length, HEADS * SIZE), math.nan, dtype=dtype)

    def exact(self, layer, config, gated=False):
        """Every position's attention, straight from the definition of softmax or of HP1's gate."""
        q, k, v = (x[layer].double() for x in (self.q, self.k, self.v))
        group = HEADS // config.num_kv_heads
        position = torch.arange(len(q))
        seen = position[None] <= position[:, None]
        if window := config.sliding_window(layer):
            seen &= position[None] > position[:, None] - window
        out = []
        for head in range(HEADS):
            scores = q[:, head] @ k[:, head // group].t() * config.attention_scale(layer)
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            if gated:
                positive = torch.nn.functional.pad(scores.relu(), (2, 0))
                means = (positive[:, 2:] + positive[:, 1:-1] + positive[:, :-2]) / 3
                weights = GAMMA[head].double() * (scores - SIGMA[head].double() * means).clamp(0, 1) * seen
            out.append(weights @ v[:, head // group])
        return torch.cat(out, -1)


class Machine:
    """A cache and the means to run steps of some streams' chunks through it."""

    def __init__(self, config, block_size, num_blocks=200, dtype=torch.float32, seed=0, gate=None):
        self.config = config
        self.gate = gate
        self.cache = KVCache(config, num_blocks, block_size, dtype, CPU, OPS)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def step(self, *work):
        """``work``: (stream, start, length), carried out in this order."""
        chunks = []
        for stream, start, length in work:
            blocks = stream.sequence.block_ids
            while len(blocks) * self.cache.block_size < start + length:
                blocks.append(self.free.pop())
            samples = start + length == len(stream.sequence.token_ids)
            chunks.append(Chunk(stream.sequence, start, length, samples))
        batch = build_batch(StepPlan(tuple(chunks)), self.cache.block_size, CPU)
        attention = GatheredAttention(batch, self.cache, self.config, OPS)
        for layer in range(LAYERS):
            heads = (torch.cat([getattr(s, name)[layer, start : start + n] for s, start, n in work]) for name in "qkv")
            qkv = torch.cat(list(heads), dim=1)
            out = attention(layer, qkv.view(len(qkv), -1), None, self.gate).split([n for _, _, n in work])
            for (stream, start, length), rows in zip(work, out, strict=True):
                stream.outputs[layer, start : start + length] = rows


def cut(length, sizes):
    """(start, length) of successive chunks; the last size repeats."""
    start, pieces = 0, []
    while start < length:
        size = min(sizes[min(len(pieces), len(sizes) - 1)], length - start)
        pieces.append((start, size))
        start += size
    return pieces


def assert_exact(stream, config, positions=slice(None), gated=False):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4 * 2.0**-7}[stream.outputs.dtype]
    # A gate's sums are not divided: they grow with the keys.
    atol = 4 * tolerance if gated else tolerance
    for layer in range(LAYERS):
        torch.testing.assert_close(
            stream.outputs[layer, positions].double(),
            stream.exact(layer, config, gated)[positions],
            rtol=tolerance,
            atol=atol,
        )


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("block_size", [1, 7, 16, 48])
@pytest.mark.parametrize("sizes", [[200], [1], [64], [63, 2, 7], [1, 128, 3]])
def test_a_prompt_in_chunks_of_any_size(sizes, block_size, window):
    """Chunks that begin and end inside, at and across the edges of tiles and blocks."""
    conf = config(window)
    stream, machine = Stream(prompt=150, length=150, seed=1), Machine(conf, block_size)
    for start, length in cut(150, sizes):
        machine.step((stream, start, length))
    assert_exact(stream, conf)


@pytest.mark.parametrize("sizes", [[150], [1], [63, 2, 7], [1, 128, 3]])
def test_a_prompt_in_chunks_of_any_size_with_a_gate(sizes):
    """Its filter looks back across the edges of chunks and tiles, and sees nothing before the first key."""
    conf = config()
    stream, machine = Stream(prompt=150, length=150, seed=1), Machine(conf, block_size=7, gate=GATE)
    for start, length in cut(150, sizes):
        machine.step((stream, start, length))
    assert_exact(stream, conf, gated=True)


@pytest.mark.parametrize("gate", [None, GATE], ids=["softmax", "gate"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [7, 16])
def test_decodes_and_prefills_of_all_lengths_in_one_step(block_size, dtype, gate):
    """Decodes at short and long positions, whole prompts, ends and middles of others, in a mixed order."""
    conf = config(window=0 if gate else 9)
    machine = Machine(conf, block_size, num_blocks=800, dtype=dtype, gate=gate)
    lengths = [1, 2, 63, 64, 65, 130, 600, 1025]
    streams = [Stream(max(1, n // 2), n, seed, dtype) for seed, n in enumerate(lengths)]
    work = []
    for i, (stream, n) in enumerate(zip(streams, lengths, strict=True)):
        start = (0 if i % 2 else n - 1) if n < 600 else n - 70
        if start:
            machine.step((stream, 0, start))
        work.append((stream, start, n - start))
    machine.step(*random.Random(0).sample(work, len(work)))
    for stream, start, _ in work:
        assert_exact(stream, conf, slice(start, None), gated=gate is not None)


def test_a_chunk_of_prompt_and_generated_tokens():
    """What a sequence that resumes after a preemption computes: across the end of its prompt."""
    conf = config(window=6)
    for prompt in (1, 40, 64, 70):
        stream, machine = Stream(prompt, 90, seed=prompt), Machine(conf, block_size=16)
        for start, length in cut(90, [37, 60]):
            machine.step((stream, start, length))
        assert_exact(stream, conf)


def test_shared_blocks_written_in_the_same_step():
    """The second reads what the first writes: K and V of all go to the cache before any attention."""
    conf = config()
    first, second = Stream(40, 40, seed=3), Stream(40, 40, seed=3)
    machine = Machine(conf, block_size=16)
    first.sequence.block_ids = [machine.free.pop() for _ in range(3)]
    second.sequence.block_ids = [*first.sequence.block_ids[:2], machine.free.pop()]
    # The one that reads stands in front of the one that writes.
    machine.step((second, 32, 8), (first, 0, 40))
    assert_exact(first, conf)
    assert_exact(second, conf, slice(32, None))


def test_nothing_of_others_is_read():
    """All blocks that are not the sequence's own are NaN, but for block 0, with which tables are padded."""
    conf = config(window=5)
    machine = Machine(conf, block_size=16, num_blocks=20)
    machine.free.remove(0)
    machine.cache.data[:, :, 1:] = math.nan
    stream = Stream(prompt=100, length=130, seed=4)
    for start, length in cut(130, [50, 50, 1]):
        while len(stream.sequence.block_ids) * 16 < start + length:
            stream.sequence.block_ids.append(machine.free.pop())
            machine.cache.data[:, :, stream.sequence.block_ids[-1]] = 0
        machine.step((stream, start, length))
    assert_exact(stream, conf)


def test_default_scale_is_by_the_heads_size():
    conf = config(attention_scales=())
    assert conf.attention_scale(1) == SIZE**-0.5
    stream, machine = Stream(20, 20, seed=5), Machine(conf, block_size=16)
    machine.step((stream, 0, 20))
    assert_exact(stream, conf)


def run_alone(make, sizes, conf, block_size, gate):
    stream = make()
    machine = Machine(conf, block_size, dtype=stream.outputs.dtype, seed=99, gate=gate)
    for start, length in cut(len(stream.sequence.token_ids), sizes):
        machine.step((stream, start, length))
    return stream.outputs


@pytest.mark.parametrize("gate", [None, GATE], ids=["softmax", "gate"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "block_size"), [(KV_HEADS, 7), (KV_HEADS, 16), (HEADS, 16)])
def test_a_tokens_bits_do_not_depend_on_company_chunks_or_blocks(kv_heads, block_size, dtype, gate):
    """Alone in one chunk, alone in others, or in random steps beside twelve sequences: the same bits.

    Without grouped heads a generated token is a product of one row, which has other bits than a row of a tile: so
    generated tokens must never be computed in one.
    """
    conf = config(window=0 if gate else 33, kv_heads=kv_heads)
    numbers = random.Random(block_size)
    shapes = [(1, 90), (64, 70), (65, 66), (130, 140), (20, 200), (600, 610)]
    shapes += [(numbers.randint(1, 150), 160) for _ in range(7)]

    def maker(i):
        return lambda: Stream(*shapes[i], seed=i, dtype=dtype, kv_heads=kv_heads)

    alone = [run_alone(maker(i), [10**6], conf, block_size, gate) for i in range(len(shapes))]
    for i in range(6):
        assert torch.equal(run_alone(maker(i), [17, 1, 64, 3], conf, 16, gate), alone[i])
    streams = [maker(i)() for i in range(len(shapes))]
    machine = Machine(conf, block_size, num_blocks=900, dtype=dtype, gate=gate)
    done = [0] * len(streams)
    while any(n < shapes[i][1] for i, n in enumerate(done)):
        work = []
        for i in numbers.sample(range(len(streams)), k=numbers.randint(1, len(streams))):
            left = shapes[i][1] - done[i]
            if left:
                length = min(left, numbers.choice([1, 5, 64, 100]))
                work.append((streams[i], done[i], length))
                done[i] += length
        if work:
            machine.step(*work)
    for stream, expected in zip(streams, alone, strict=True):
        assert torch.equal(stream.outputs, expected)


def test_groups_that_are_too_large_to_gather_are_split(monkeypatch):
    conf = config(window=5)

    def outputs():
        streams = [Stream(70, 75, seed=i) for i in range(5)]
        machine = Machine(conf, block_size=16)
        machine.step(*((s, 0, 74) for s in streams))
        machine.step(*((s, 74, 1) for s in streams))
        return torch.stack([s.outputs for s in streams])

    whole = outputs()
    monkeypatch.setattr("rosebatch.engine.torch_runner.attention._GROUP_BYTES", 1)
    assert torch.equal(outputs(), whole)


def test_cache_size_and_copies():
    """A block's bytes are what the tensor takes, and a copy reaches K and V of all layers."""
    conf = config()
    cache = KVCache(conf, 5, 7, torch.bfloat16, CPU, OPS)
    assert cache.data.nbytes == 5 * bytes_per_block(conf, 7, torch.bfloat16)
    assert not cache.data.any()
    cache.data[:, :, 1] = torch.randn(LAYERS, 2, KV_HEADS, 7, SIZE).to(torch.bfloat16)
    cache.copy([(1, 4), (1, 2)])
    cache.copy([])
    assert torch.equal(cache.data[:, :, 4], cache.data[:, :, 1])
    assert torch.equal(cache.data[:, :, 2], cache.data[:, :, 1])
    assert not cache.data[:, :, [0, 3]].any()
    assert torch.equal(cache.layer(1), cache.data[1])
