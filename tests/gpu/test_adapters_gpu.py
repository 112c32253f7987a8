"""Adapters on a GPU: merged, and those that rows choose."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.config.run import RunConfig
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.launch.launch import launch
from rosebatch.model.adapters.adapter import read_adapter
from rosebatch.model.quantization.forms import load_weight
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.device import has_e4m3
from tests.gpu.test_ranks_gpu import end
from tests.helpers.running import run
from tests.helpers.tiny_engines import engine_of
from tests.model.adapters.written import embedding_pair, experts_pair, numbers, pair, write_adapter

pytestmark = pytest.mark.gpu
SHAPES = {"a.proj.weight": (96, 64), "a.table.weight": (96, 64), "a.experts.down_proj": (4, 96, 64)}
SHAPES |= {"a.tokens.weight": (96, 64)}
ROWS = {"a.tokens.token_adapter.trainable_tokens_delta": numbers("rows", 3, 64)}


@pytest.mark.parametrize("part", ["whole", "rows", "columns"])
@pytest.mark.parametrize("name", SHAPES)
def test_merged_weights_are_those_of_a_cpu(device, tmp_path, name, part):
    """Sums have no rounding, so products in another order, or in fewer bits, would show."""
    shape = SHAPES[name]
    save_file({name: numbers("w", *shape), "a.proj.bias": numbers("bias", 96)}, tmp_path / "model.safetensors")
    linear, table, experts = pair("a.proj", 96, 64)[0], embedding_pair("a.table", 96, 64)[0], {}
    if "experts" in name:
        experts = experts_pair("a.experts", *shape)[0]
    tensors = {**linear, **table, **experts, **ROWS, "a.proj.lora_B.bias": numbers("b", 96)}
    folder = write_adapter(tmp_path / "adapter", tensors, trainable_token_indices=[90, 2, 40])

    def load(on):
        weights = SafetensorsWeights(tmp_path, torch.bfloat16, on, adapter=read_adapter("a", folder))
        weight = load_weight(weights, name, shape)
        cut = {"whole": weight, "rows": weight.rows(range(32, 96)), "columns": weight.columns(range(16, 48))}[part]
        return cut.dense(), weights.get("a.proj.bias", (96,))

    for found, expected in zip(load(device), load(torch.device("cpu")), strict=True):
        assert found.device.type == device.type
        assert torch.equal(found.cpu(), expected)


# Rows that choose adapters

NAMES = ["one", "two", "three"]
RANKS = {"one": 2, "two": 3, "three": 20}
# A token with a smaller margin may differ by rounding alone: such rows are left out.
MARGIN = 2e-3
TOKENS = 12


@pytest.fixture(scope="module")
def folders(saved_model, tmp_path_factory):
    """Adapters of other modules and ranks."""
    values = load_file(saved_model("Llama") / "model.safetensors")
    found = {}
    for name, rank in RANKS.items():
        tensors = {}
        for full, matrix in values.items():
            module = full.removesuffix(".weight")
            if "proj" in module and not (name == "two" and module.endswith(("k_proj", "up_proj"))):
                a, b = (numbers(f"{name} {module} {part}", *size) for part, size in sizes_of(matrix, rank))
                tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        found[name] = write_adapter(tmp_path_factory.mktemp(name), tensors, r=rank, lora_alpha=rank**0.5)
    return found


def sizes_of(matrix, rank):
    out, width = matrix.shape
    return ("a", (rank, width)), ("b", (out, rank))


@pytest.fixture(scope="module")
def lora(folders):
    """The flags of all."""
    return tuple(f"{name}={folder}" for name, folder in folders.items())


def row(number, adapter, **sampling):
    """Prompts of many lengths, which begin alike."""
    length = (1, 9, 40, 100, 130)[number // 4 % 5]
    prompt = [(3 * place) % 200 if place < 70 else (7 * number + place) % 200 for place in range(length)]
    prompt[-1] = number % 200
    params = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}
    return Request(number, tuple(prompt), SamplingParams(**params | sampling), adapter=adapter)


def mixed(count, **sampling):
    """Rows of each adapter in turn, and of none."""
    return [row(number, ["", *NAMES][number % 4], **sampling) for number in range(count)]


@pytest.fixture(scope="module")
def expected(saved_model, folders):
    """What a CPU answers with each adapter merged, of rows that rounding does not decide."""
    found = {}
    for name in ("", *NAMES):
        given = (f"{name}={folders[name]}",) if name else ()
        engine = engine_of(saved_model("Llama"), lora=given, max_num_seqs=8)
        rows = [row(each.id, "") for each in mixed(64) if each.adapter == name]
        found |= {number: done for number, done in run(engine, rows).items() if is_clear(done)}
    assert len(found) >= 48, "too many rows are decided by rounding"
    return {number: done.token_ids for number, done in found.items()}


def is_clear(completion):
    return all(first - second > MARGIN for (_, first), (_, second) in (each.top for each in completion.logprobs))


def outcome(engine, rows):
    """Tokens and log-probabilities."""
    return {number: (each.token_ids, [*each.logprobs]) for number, each in run(engine, rows).items()}


def graphs(engine):
    """Whether each graph of decode steps is of rows with adapters."""
    return [kind.adapted for kind in engine.runner.decodes._graphs]


@pytest.fixture
def engine_with(saved_model, lora, device):
    """An engine that has all adapters."""

    def make(dtype="float32", **limits):
        return engine_of(saved_model("Llama"), dtype, device.type, lora=lora, **{"max_num_seqs": 64, **limits})

    return make


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 64},
        {"switches": {"trim_last_layer": False, "prefix_cache": False}},
        {"switches": {"batch_invariant": True}},
        {"switches": {"paged_attention": False}},
        {"max_loras": 1},
        {"max_loras": 2, "max_num_batched_tokens": 64},
        {"max_loras": 1, "switches": {"batch_invariant": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 7, 64])
def test_each_row_has_its_adapter(count, limits, engine_with, expected):
    """As if it were merged, beside any others; by graphs, in chunks, with keys of a common beginning."""
    engine = engine_with(**limits)
    rows = mixed(count + 1)[1:]
    for _ in range(2):
        done = run(engine, rows)
        clear = [each.id for each in rows if each.id in expected]
        assert {number: done[number].token_ids for number in clear} == {number: expected[number] for number in clear}
    if limits.get("switches", {}).get("paged_attention", True):
        assert engine.stats.graph_replays > 0
        assert any(graphs(engine))
    assert (engine.stats.adapter_loads > 2) == (limits.get("max_loras", 3) < min(count, 3))


@pytest.mark.parametrize("most", [None, 1, 2])
def test_preempted_rows_keep_their_adapters(engine_with, expected, most):
    """They come back to other slots, after their adapter has lost its own."""
    engine = engine_with(blocks=40, block_size=16, max_num_batched_tokens=256, max_loras=most)
    done = run(engine, mixed(64, max_tokens=60))
    assert engine.stats.preemptions > 0
    assert {number: done[number].token_ids[:TOKENS] for number in expected} == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_without_adapters_pay_nothing(dtype, engine_with, saved_model, device):
    """Their steps are those of the model alone, to the bit; so they are again after rows with adapters."""
    rows = [row(number, "") for number in range(33)]
    alone = run(engine_of(saved_model("Llama"), dtype, device.type, max_num_seqs=64), rows)
    engine = engine_with(dtype)
    for turn in range(2):
        done = run(engine, rows)
        assert {number: each.token_ids for number, each in done.items()} == {
            i: each.token_ids for i, each in alone.items()
        }
        assert all([*done[number].logprobs] == [*alone[number].logprobs] for number in done)
        assert graphs(engine) and any(graphs(engine)) == (turn > 0)
        run(engine, mixed(33))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_bits_in_any_company(dtype, engine_with):
    """With ``--batch-invariant``: alone, beside others, and in chunks."""

    switches, rows = {"batch_invariant": True}, mixed(64)
    together = outcome(engine_with(dtype, switches=switches), rows)
    assert outcome(engine_with(dtype, switches=switches, max_num_batched_tokens=128, max_num_seqs=9), rows) == together
    engine = engine_with(dtype, switches=switches)
    for number in (1, 2, 3, 12, 13, 19):
        assert outcome(engine, [rows[number]]) == {number: together[number]}


def test_a_base_in_fp8(saved_model, lora, device):
    """It stays quantized, and adapters are added in 16 bits: most first tokens are those that a CPU has of it."""
    if not has_e4m3(device):
        pytest.skip("no fp8 products")

    def firsts(on, dtype):
        engine = engine_of(saved_model("Llama"), dtype, on, lora=lora, quantization="fp8", max_num_seqs=64)
        return [done.token_ids[0] for _, done in sorted(run(engine, mixed(64, max_tokens=1)).items())]

    exact, found = firsts("cpu", "float32"), firsts(device.type, "bfloat16")
    others = run(engine_of(saved_model("Llama"), max_num_seqs=64), [row(number, "") for number in range(64)])
    adapted = [number for number in range(64) if number % 4]
    assert sum(exact[number] == found[number] for number in adapted) >= 36
    assert sum(others[number].token_ids[0] == found[number] for number in adapted) < 12


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(saved_model, lora, expected):
    """A rank has its rows of B, or its columns of A."""
    config = RunConfig(
        model=str(saved_model("Llama")),
        dtype="float32",
        device="cuda",
        max_num_seqs=64,
        kv_cache_memory=1 << 27,
        tensor_parallel_size=2,
        lora=lora,
    )
    engine = launch(config).engine
    done = {completion.request.id: completion for completion in engine.run(mixed(64))}
    end(engine)
    assert {number: tuple(done[number].token_ids) for number in expected} == {i: tuple(expected[i]) for i in expected}
