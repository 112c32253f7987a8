"""Attention of whole steps over the paged cache against naive attention over the full sequence, in float64."""

import dataclasses
import math
import random
from array import array
from functools import partial

import msgspec
import pytest
import torch

from rosebatch.config.model import Planes
from rosebatch.config.switches import Switches
from rosebatch.core.sampling_params import GREEDY
from rosebatch.engine.cache.kv_cache import KVCache, bytes_per_block
from rosebatch.engine.plan import Chunk, SequenceSpec
from rosebatch.engine.staging import Staging
from rosebatch.engine.torch_runner.attention import TorchAttention
from rosebatch.engine.torch_runner.batch import build_batch
from rosebatch.model.mixers.hp1.mixer import HP1Spec
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.registry import build_model
from rosebatch.model.rope import Rotary
from rosebatch.ops.hp1 import Gate, mean_taps
from rosebatch.ops.ops import HeadLayerNorm, HeadRMSNorm, ValueRMSNorm, WholeRMSNorm
from rosebatch.ops.select import select
from tests.engine.small_models import MODELS

# Every way to run on each model: the fast tier takes some.
pytestmark = pytest.mark.matrix

OPS = select(Switches())
CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 6, 2, 8
BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
DTYPES = [torch.float32, *([torch.bfloat16] if BF16 else [])]
# No two heads alike.
SIGMA, GAMMA = torch.linspace(0.3, 1.8, HEADS), torch.linspace(1.5, 0.5, HEADS)
GATE = Gate(mean_taps(SIGMA, 3), GAMMA)


def make_specs(window=0, kv_heads=KV_HEADS, gate=None, **more):
    """The first layer sees everything, the second one a window; ``more`` is alike in both."""
    kind = PagedAttentionSpec if gate is None else partial(HP1Spec, gate=gate)
    return [
        kind(layer=layer, num_heads=HEADS, num_kv_heads=kv_heads, head_dim=SIZE, scale=scale, window=own, **more)
        for layer, (scale, own) in enumerate([(0.5, 0), (0.7, window)])
    ]


# Caps and sinks that move every weight: scores are mostly within 4 of 0.
CAP, SINKS = 1.5, torch.linspace(-2.0, 3.0, HEADS)
SOFTMAXES = {
    "plain": {},
    "cap": {"soft_cap": CAP},
    "sinks": {"sinks": SINKS},
    "cap and sinks": {"soft_cap": CAP, "sinks": SINKS},
}


def rotary(size, length=200):
    """Angles of ``size`` channels, of any size."""
    angles = torch.arange(length)[:, None] / torch.linspace(1, 9, size // 2)
    return Rotary(torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1))


def rotated(x, rotary):
    """Channel pairs of ``x [T, heads, D]`` as complex numbers, turned by the tables' angles."""
    half, length = rotary.cos.shape[1] // 2, len(x)
    turn = torch.complex(rotary.cos[:length, :half].double(), rotary.sin[:length, half:].double())[:, None]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def normed(x, norm, weight):
    """``x [T, heads, D]`` by the formula of each kind of norm."""
    over = (1, 2) if isinstance(norm, WholeRMSNorm) else (2,)
    centred = x - x.mean(2, keepdim=True) if isinstance(norm, HeadLayerNorm) else x
    factor = weight.double().view(x.shape[1:]) if weight.numel() > x.shape[2] else weight.double()
    return centred / (centred.square().mean(over, keepdim=True) + norm.eps).sqrt() * factor


class Stream:
    """A sequence with q, k and v of every layer and position decided beforehand.

    ``prompt`` of its ``length`` tokens are the prompt, the others count as generated.
    """

    def __init__(self, prompt, length, seed, specs, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)

        def numbers(heads, size):
            return torch.randn(length, heads, size, generator=generator).to(dtype)

        self.qkv = [
            [numbers(heads, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
            for spec in specs
        ]
        self.length = length
        self.spec = SequenceSpec(0, (1,) * prompt, GREEDY, max_len=4096)
        self.block_ids = []
        sizes = [spec.num_heads * spec.head_dim for spec in specs]
        self.outputs = [torch.full((length, size), math.nan, dtype=dtype) for size in sizes]

    def exact(self, spec):
        """Every position's attention, straight from the definition of softmax or of HP1's gate."""
        q, k, v = (x.double() for x in self.qkv[spec.layer])
        if spec.qk_norm is not None:
            q, k = normed(q, spec.qk_norm, spec.qk_norm.q_weight), normed(k, spec.qk_norm, spec.qk_norm.k_weight)
        if isinstance(spec.qk_norm, ValueRMSNorm):
            v = normed(v, spec.qk_norm, torch.ones(v.shape[2]))
        if spec.rotary is not None:
            q, k = rotated(q, spec.rotary), rotated(k, spec.rotary)
        group = spec.num_heads // spec.num_kv_heads
        position = torch.arange(len(q))
        seen = position[None] <= position[:, None]
        if spec.window:
            seen &= position[None] > position[:, None] - spec.window
        out = []
        for head in range(spec.num_heads):
            scores = q[:, head] @ k[:, head // group].t() * spec.scale
            if isinstance(spec, HP1Spec):
                positive = torch.nn.functional.pad(scores.relu(), (2, 0))
                means = (positive[:, 2:] + positive[:, 1:-1] + positive[:, :-2]) / 3
                weights = GAMMA[head].double() * (scores - SIGMA[head].double() * means).clamp(0, 1) * seen
            else:
                if spec.soft_cap:
                    scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
                exponentials = scores.masked_fill(~seen, -math.inf).exp()
                sink = 0.0 if spec.sinks is None else spec.sinks[head].double().exp()
                weights = exponentials / (exponentials.sum(-1, keepdim=True) + sink)
            out.append(weights @ v[:, head // group])
        return torch.cat(out, -1)


class Machine:
    """A cache and the means to run steps of some streams' chunks through it."""

    def __init__(self, specs, block_size, num_blocks=200, dtype=torch.float32, seed=0):
        self.specs = specs
        self.cache = KVCache([spec.planes for spec in specs], [num_blocks], block_size, dtype, CPU, OPS)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)

    def step(self, *work):
        """``work``: (stream, start, length), carried out in this order."""
        chunks = []
        for number, (stream, start, length) in enumerate(work):
            while len(stream.block_ids) * self.cache.block_size < start + length:
                stream.block_ids.append(self.free.pop())
            chunks.append(Chunk(number, start, array("I", [1] * length), int(start + length == stream.length)))
        sequences = {number: stream.spec for number, (stream, *_) in enumerate(work)}
        blocks = {number: [stream.block_ids] for number, (stream, *_) in enumerate(work)}
        batch = build_batch(tuple(chunks), sequences, blocks, self.cache.block_size, CPU)
        attention = TorchAttention(batch, self.cache, self.specs, OPS)
        for spec in self.specs:
            rows = [[x[start : start + n] for x in s.qkv[spec.layer]] for s, start, n in work]
            qkv = torch.cat([torch.cat(own, dim=1).flatten(1) for own in rows])
            out = attention(spec, qkv).split([n for _, _, n in work])
            for (stream, start, length), own in zip(work, out, strict=True):
                stream.outputs[spec.layer][start : start + length] = own


def cut(length, sizes):
    """(start, length) of successive chunks; the last size repeats."""
    start, pieces = 0, []
    while start < length:
        size = min(sizes[min(len(pieces), len(sizes) - 1)], length - start)
        pieces.append((start, size))
        start += size
    return pieces


def assert_exact(stream, specs, positions=slice(None)):
    for spec in specs:
        outputs = stream.outputs[spec.layer]
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 4 * 2.0**-7}[outputs.dtype]
        # A gate's sums are not divided: they grow with the keys.
        atol = 4 * tolerance if isinstance(spec, HP1Spec) else tolerance
        exact = stream.exact(spec)[positions]
        torch.testing.assert_close(outputs[positions].double(), exact, rtol=tolerance, atol=atol)


def assert_exact_in_chunks(stream, machine, sizes):
    for start, length in cut(stream.length, sizes):
        machine.step((stream, start, length))
    assert_exact(stream, machine.specs)


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("block_size", [1, 7, 16, 48])
@pytest.mark.parametrize("sizes", [[200], [1], [64], [63, 2, 7], [1, 128, 3]])
def test_a_prompt_in_chunks_of_any_size(sizes, block_size, window):
    """Chunks that begin and end inside, at and across the edges of tiles and blocks."""
    specs = make_specs(window)
    assert_exact_in_chunks(Stream(150, 150, seed=1, specs=specs), Machine(specs, block_size), sizes)


@pytest.mark.parametrize("sizes", [[150], [1], [63, 2, 7], [1, 128, 3]])
def test_a_prompt_in_chunks_of_any_size_with_a_gate(sizes):
    """Its filter looks back across the edges of chunks and tiles, and sees nothing before the first key."""
    specs = make_specs(gate=GATE)
    assert_exact_in_chunks(Stream(150, 150, seed=1, specs=specs), Machine(specs, block_size=7), sizes)


@pytest.mark.parametrize("kind", ["cap", "sinks", "cap and sinks"])
@pytest.mark.parametrize("kv_heads", [KV_HEADS, 1, HEADS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_caps_and_sinks(dtype, kv_heads, kind):
    """A sink of another head, a cap behind the mask, or a sink counted for each tile would change every row."""
    specs = make_specs(window=9, kv_heads=kv_heads, **SOFTMAXES[kind])
    stream = Stream(100, 130, seed=2, specs=specs, dtype=dtype)
    assert_exact_in_chunks(stream, Machine(specs, 7, dtype=dtype), [63, 2, 60, 1])


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_rotation_of_the_first_channels(size):
    """The others pass through; a pair lies half of the rotated channels apart, not half of the head."""
    specs = make_specs(window=9, rotary=rotary(size))
    assert_exact_in_chunks(Stream(70, 90, seed=3, specs=specs), Machine(specs, 16), [50, 30, 1])


@pytest.mark.parametrize("kind", [HeadRMSNorm, ValueRMSNorm, HeadLayerNorm, WholeRMSNorm])
def test_norms_of_q_and_k(kind):
    """Each family's statistics: over a head or over all of them, about the mean or about 0."""
    shapes = {HeadRMSNorm: [(SIZE,)] * 2, ValueRMSNorm: [(SIZE,)] * 2, HeadLayerNorm: [(HEADS, SIZE), (KV_HEADS, SIZE)]}
    q_weight, k_weight = (
        1 + 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for seed, shape in enumerate(shapes.get(kind, [(HEADS * SIZE,), (KV_HEADS * SIZE,)]))
    )
    specs = make_specs(window=9, rotary=rotary(4), qk_norm=kind(q_weight, k_weight, 1e-2))
    assert_exact_in_chunks(Stream(70, 90, seed=5, specs=specs), Machine(specs, 16), [50, 30, 1])


@pytest.mark.parametrize("more", [{"soft_cap": 1.0}, {"sinks": SINKS}])
def test_a_gate_has_no_softmax_to_change(more):
    """HP1's kernels would ignore them without a word."""
    with pytest.raises(TypeError, match="unexpected keyword"):
        make_specs(gate=GATE, **more)


@pytest.mark.parametrize("gate", [None, GATE], ids=["softmax", "gate"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [7, 16])
def test_decodes_and_prefills_of_all_lengths_in_one_step(block_size, dtype, gate):
    """Decodes at short and long positions, whole prompts, ends and middles of others, in a mixed order."""
    specs = make_specs(window=0 if gate else 9, gate=gate)
    machine = Machine(specs, block_size, num_blocks=800, dtype=dtype)
    lengths = [1, 2, 63, 64, 65, 130, 600, 1025]
    streams = [Stream(max(1, n // 2), n, seed, specs, dtype) for seed, n in enumerate(lengths)]
    work = []
    for i, (stream, n) in enumerate(zip(streams, lengths, strict=True)):
        start = (0 if i % 2 else n - 1) if n < 600 else n - 70
        if start:
            machine.step((stream, 0, start))
        work.append((stream, start, n - start))
    machine.step(*random.Random(0).sample(work, len(work)))
    for stream, start, _ in work:
        assert_exact(stream, specs, slice(start, None))


def test_a_chunk_of_prompt_and_generated_tokens():
    """What a sequence that resumes after a preemption computes: across the end of its prompt."""
    specs = make_specs(window=6)
    for prompt in (1, 40, 64, 70):
        assert_exact_in_chunks(Stream(prompt, 90, seed=prompt, specs=specs), Machine(specs, block_size=16), [37, 60])


def test_shared_blocks_written_in_the_same_step():
    """The second reads what the first writes: K and V of all go to the cache before any attention."""
    specs = make_specs()
    first, second = (Stream(40, 40, seed=3, specs=specs) for _ in range(2))
    machine = Machine(specs, block_size=16)
    first.block_ids = [machine.free.pop() for _ in range(3)]
    second.block_ids = [*first.block_ids[:2], machine.free.pop()]
    # The one that reads stands in front of the one that writes.
    machine.step((second, 32, 8), (first, 0, 40))
    assert_exact(first, specs)
    assert_exact(second, specs, slice(32, None))


def test_nothing_of_others_is_read():
    """All blocks that are not the sequence's own are NaN, but for block 0, with which tables are padded."""
    specs = make_specs(window=5)
    machine = Machine(specs, block_size=16, num_blocks=20)
    machine.free.remove(0)
    (data,) = machine.cache.tensors
    data[:, :, 1:] = math.nan
    stream = Stream(100, 130, seed=4, specs=specs)
    for start, length in cut(130, [50, 50, 1]):
        while len(stream.block_ids) * 16 < start + length:
            stream.block_ids.append(machine.free.pop())
            data[:, :, stream.block_ids[-1]] = 0
        machine.step((stream, start, length))
    assert_exact(stream, specs)


@pytest.mark.parametrize("block_size", [7, 16])
def test_blocks_in_front_of_the_window_are_not_read(block_size):
    """They belong to others by then, NaN here, and their entries in the table may be anything."""
    specs = [spec for spec in make_specs(window=24, sinks=SINKS) if spec.window]
    specs = [dataclasses.replace(spec, layer=layer) for layer, spec in enumerate(specs)]
    machine = Machine(specs, block_size)
    stream = Stream(100, 130, seed=4, specs=specs)
    (data,) = machine.cache.tensors
    for start, length in cut(130, [50, 20, 1]):
        for index in range(max(0, start + 1 - 24) // block_size):
            if stream.block_ids[index] < 10**6:
                data[:, :, stream.block_ids[index]] = math.nan
                stream.block_ids[index] = 10**6
        machine.step((stream, start, length))
    assert stream.block_ids.count(10**6) > 3
    assert_exact(stream, specs)


def test_layers_that_differ():
    """In heads, grouping, head size, scale and window: nothing of one layer is used for another."""
    specs = [
        PagedAttentionSpec(layer=0, num_heads=6, num_kv_heads=2, head_dim=8, scale=0.5),
        PagedAttentionSpec(layer=1, num_heads=4, num_kv_heads=4, head_dim=16, scale=0.3, window=9),
        PagedAttentionSpec(layer=2, num_heads=6, num_kv_heads=1, head_dim=8, scale=0.7, window=30),
        PagedAttentionSpec(layer=3, num_heads=2, num_kv_heads=2, head_dim=8, scale=0.4, soft_cap=2.0, rotary=rotary(8)),
        PagedAttentionSpec(
            layer=4, num_heads=2, num_kv_heads=2, head_dim=8, scale=0.4, sinks=SINKS[:2], rotary=rotary(4)
        ),
    ]
    streams = [Stream(70, 80, seed=i, specs=specs) for i in range(3)]
    machine = Machine(specs, block_size=7)
    for start, length in cut(80, [50, 25, 1]):
        machine.step(*((stream, start, length) for stream in streams))
    for stream in streams:
        assert_exact(stream, specs)


def test_a_models_attention_is_what_its_config_says():
    """Of each layer: the scale is by the head's size if the config has none, the window is the layer's own."""
    for config in MODELS["llama"], MODELS["gpt2"], MODELS["hp1"]:
        kind = HP1Spec if config.family == "hp1" else PagedAttentionSpec
        model = build_model(config, OPS, RandomWeights(torch.float32, CPU))
        for layer, spec in zip(range(2), model.mixers, strict=True):
            assert (spec.layer, spec.scale, type(spec)) == (layer, 16**-0.5, kind)
            assert (spec.heads, spec.planes) == ((2, config.num_kv_heads, 16), config.kv_planes[layer])
            assert spec.window == config.sliding_window(layer)
        scaled = msgspec.structs.replace(config, attention_scales=(0.5, 0.25))
        scales = [spec.scale for spec in build_model(scaled, OPS, RandomWeights(torch.float32, CPU)).mixers]
        assert scales == [0.5, 0.25]
        stored = msgspec.structs.replace(config, kv_cache_dtype="fp8")
        specs = build_model(stored, OPS, RandomWeights(torch.float32, CPU)).mixers
        assert tuple(spec.planes for spec in specs) == stored.kv_planes
        number = {"llama": [2, 1], "gpt2": [2, 2], "hp1": [1, 1]}[config.family]
        assert [len(spec.planes) for spec in specs] == number, "a short window and HP1 stay as they are"
    assert [MODELS["llama"].sliding_window(layer) for layer in (0, 1)] == [0, 7]


def run_alone(make, sizes, specs, block_size):
    stream = make()
    machine = Machine(specs, block_size, dtype=stream.outputs[0].dtype, seed=99)
    for start, length in cut(stream.length, sizes):
        machine.step((stream, start, length))
    return stream.outputs


@pytest.mark.parametrize("kind", ["softmax", "gate", "cap and sinks"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "block_size"), [(KV_HEADS, 7), (KV_HEADS, 16), (HEADS, 16)])
def test_a_tokens_bits_do_not_depend_on_company_chunks_or_blocks(kv_heads, block_size, dtype, kind):
    """Alone in one chunk, alone in others, or in random steps beside twelve sequences: the same bits.

    Without grouped heads a generated token is a product of one row, which has other bits than a row of a tile: so
    generated tokens must never be computed in one.
    """
    more = {"gate": GATE} if kind == "gate" else SOFTMAXES.get(kind, {})
    specs = make_specs(window=0 if kind == "gate" else 33, kv_heads=kv_heads, **more)
    numbers = random.Random(block_size)
    shapes = [(1, 90), (64, 70), (65, 66), (130, 140), (20, 200), (600, 610)]
    shapes += [(numbers.randint(1, 150), 160) for _ in range(7)]

    def maker(i):
        return lambda: Stream(*shapes[i], seed=i, specs=specs, dtype=dtype)

    alone = [run_alone(maker(i), [10**6], specs, block_size) for i in range(len(shapes))]
    for i in range(6):
        assert all(map(torch.equal, run_alone(maker(i), [17, 1, 64, 3], specs, 16), alone[i]))
    streams = [maker(i)() for i in range(len(shapes))]
    machine = Machine(specs, block_size, num_blocks=900, dtype=dtype)
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
        assert all(map(torch.equal, stream.outputs, expected))


def test_groups_that_are_too_large_to_gather_are_split(monkeypatch):
    specs = make_specs(window=5)

    def outputs():
        streams = [Stream(70, 75, seed=i, specs=specs) for i in range(5)]
        machine = Machine(specs, block_size=16)
        for start, length in (0, 74), (74, 1):
            machine.step(*((s, start, length) for s in streams))
        return torch.stack([torch.stack(s.outputs) for s in streams])

    whole = outputs()
    monkeypatch.setattr("rosebatch.engine.torch_runner.attention._GROUP_BYTES", 1)
    assert torch.equal(outputs(), whole)


def test_cache_size_and_copies():
    """A block's bytes are what the tensors take, and a copy reaches K and V of all layers, whatever their shapes."""
    small, large = (Planes(KV_HEADS, SIZE, 2),), (Planes(3, 16, 2),)
    layers = [small, large, small]
    cache = KVCache(layers, [5], 7, torch.bfloat16, CPU, OPS)
    assert cache.nbytes == sum(data.nbytes for data in cache.tensors) == 5 * bytes_per_block(layers, 7, torch.bfloat16)
    assert [tuple(data.shape) for data in cache.tensors] == [(2, 2, 5, KV_HEADS, 7, SIZE), (1, 2, 5, 3, 7, 16)]
    assert not any(data.any() for data in cache.tensors)
    for data in cache.tensors:
        data[:, :, 1] = torch.randn(data[:, :, 1].shape).to(torch.bfloat16)
    cache.copy([(0, 1, 4), (0, 1, 2)], Staging(CPU))
    cache.copy([], Staging(CPU))
    for data in cache.tensors:
        assert torch.equal(data[:, :, 4], data[:, :, 1])
        assert torch.equal(data[:, :, 2], data[:, :, 1])
        assert not data[:, :, [0, 3]].any()
    # Layers of one shape share a tensor, each has its own part.
    first, second = cache.tensors
    for layer, data in enumerate([first[0], second[0], first[1]]):
        (own,) = cache.layer(layer)
        assert torch.equal(own, data)
        assert own.data_ptr() == data.data_ptr()


def test_copies_and_wipes_of_one_group_leave_the_others():
    """Block 2 of a window is another sequence's than block 2 of full attention; and there may be no such block."""
    layers = [(Planes(KV_HEADS, SIZE, 2),), (Planes(KV_HEADS, SIZE, 2),), (Planes(3, 16, 2),)]
    cache = KVCache(layers, [3, 6], 7, torch.float32, CPU, OPS, group_of=[1, 0, 1])
    assert [tuple(data.shape[:3]) for data in cache.tensors] == [(1, 2, 6), (1, 2, 3), (1, 2, 6)]
    for data in cache.tensors:
        data.copy_(torch.randn(data.shape))
    before = [cache.layer(layer)[0].clone() for layer in range(3)]
    cache.copy([(1, 2, 5), (0, 1, 2), (1, 0, 3)], Staging(CPU))
    for layer, moved in enumerate(({5: 2, 3: 0}, {2: 1}, {5: 2, 3: 0})):
        expected = [before[layer][:, moved.get(block, block)] for block in range(before[layer].shape[1])]
        assert torch.equal(cache.layer(layer)[0], torch.stack(expected, 1))
    before = [cache.layer(layer)[0].clone() for layer in range(3)]
    cache.wipe([(1, 4), (0, 0), (1, 1)], Staging(CPU))
    for layer, wiped in enumerate(([4, 1], [0], [4, 1])):
        before[layer][:, wiped] = 0
        assert torch.equal(cache.layer(layer)[0], before[layer])
