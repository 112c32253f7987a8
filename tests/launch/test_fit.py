"""Whether a model fits is said before anything is loaded, and what would if it does not."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.config.toml_file import load_toml
from rosebatch.core.errors import FlagError
from rosebatch.engine.cache.memory import DeviceMemory
from rosebatch.launch.fit import Wanted, find_fit, require_room_for_adapters
from rosebatch.model.quantization.chosen import choose_quantization

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
GIB = 1 << 30
BLOCK = {"cuda": 64, "cpu": 16}


def gpu(total, free=None):
    return DeviceMemory("cuda", int((total if free is None else free) * GIB), int(total * GIB))


def host(free, total=None):
    return DeviceMemory("cpu", int(free * GIB), int((free if total is None else total) * GIB))


def wanted(model, device, dtype=torch.bfloat16, gpus=1, **limits):
    config = load_toml(CONFIGS / f"{model}.toml", ModelConfig)
    if "max_model_len" in limits:
        config = msgspec.structs.replace(config, max_model_len=limits["max_model_len"])
    switches = Switches.resolve({}, device)
    return Wanted(model, config, dtype, BLOCK[device], RunConfig(**limits), switches, gpus)


@pytest.fixture
def fp8_products(monkeypatch):
    """A device that multiplies fp8 weights as they are."""
    for module in ("rosebatch.model.quantization.chosen", "rosebatch.launch.fit"):
        monkeypatch.setattr(f"{module}.keeps", lambda layout, switches, device, dtype: device == "cuda")


def test_fp8_weights_that_are_kept(fp8_products):
    """A model of 15 GiB in 16 bits was refused on a GPU that its fp8 form fits."""
    memory = gpu(14)
    with pytest.raises(FlagError, match=r"; -tp 2 .* or --quantization fp8 .*would fit"):
        fit("llama-3.1-8b", memory)
    chosen = choose_quantization("fp8", None)
    found = find_fit(replace(wanted("llama-3.1-8b", "cuda"), quantization=chosen), memory)
    # The embedding and the head stay: 2 x 128256 x 4096 x 2 bytes.
    assert str(found).startswith("fits: 8.46 GiB of weights (fp8 at load) and ")


def test_fp8_weights_that_are_decoded():
    """The line says so: a GPU without a product for them holds them in 16 bits."""
    chosen = choose_quantization("fp8", None)
    found = find_fit(replace(wanted("llama-3.1-8b", "cpu"), quantization=chosen), host(60))
    assert str(found).startswith("fits: 14.96 GiB of weights (fp8 at load, decoded to bfloat16) and ")


@pytest.mark.parametrize("memory", [gpu(80), host(28)], ids=["cuda", "cpu"])
def test_memory_of_images(memory):
    """Beside a KV cache that was planned to take all, a tower had no room."""
    model = wanted("llama-3.1-8b", memory.device)
    without, found = (find_fit(replace(model, image_bytes=size), memory) for size in (0, 2 * GIB))
    share = 0.9 if memory.device == "cuda" else 0.25
    assert without.cache - found.cache == pytest.approx(share * 2 * GIB, rel=0.12)
    assert " of weights (bfloat16), 2.00 GiB for images and " in str(found)
    assert "for images" not in str(without)
    with pytest.raises(FlagError, match=r"14.96 GiB of weights in bfloat16, 70.00 GiB for images.*--limit-images 0"):
        find_fit(replace(model, image_bytes=70 * GIB), memory)
    # Serving no image was the only way.
    large = replace(model, image_bytes=70 * GIB, small_image_bytes=GIB)
    with pytest.raises(FlagError, match=r"70.00 GiB for images.*[; ]--max-pixels 1048576 or --limit-images 0 "):
        find_fit(large, memory)
    with pytest.raises(FlagError) as caught:
        find_fit(replace(large, small_image_bytes=70 * GIB), memory)
    assert "--max-pixels" not in str(caught.value)


def fit(model, memory, **options):
    return find_fit(wanted(model, memory.device, **options), memory)


@pytest.mark.parametrize(
    ("model", "memory", "options", "message"),
    [
        ("llama-3.3-70b", host(23), {}, "does not fit: 131.41 GiB of weights in bfloat16, in 23.00 GiB of free memory; "
         "take a smaller model, or a machine with more memory"),
        ("llama-3.1-8b", host(23), {"dtype": torch.float32}, "29.91 GiB of weights in float32, in 23.00 GiB of free "
         "memory; --dtype bfloat16 would fit"),
        ("llama-3.3-70b", gpu(80), {"gpus": 8}, "in 80.00 GiB of free GPU memory with "
         "--gpu-memory-utilization 0.9; -tp 2 or --quantization fp8 would fit"),
        ("llama-3.3-70b", gpu(80), {}, "-tp 2 (with 2 such GPUs; this process sees 1) or --quantization fp8 would fit"),
        ("llama-3.3-70b", gpu(24), {"gpus": 8}, "-tp 8 would fit"),
        ("llama-3.3-70b", gpu(24), {"gpus": 8, "tensor_parallel_size": 2},
         "65.71 GiB of weights in bfloat16 on each of 2 ranks"),
        ("llama-3.1-8b", gpu(16.6), {"gpu_memory_utilization": 0.9}, "--gpu-memory-utilization 0.97 would fit"),
        ("qwen3.5-9b", host(26), {}, "16.68 GiB of weights in bfloat16, and a step and a row beside them, in 26.00 GiB "
         "of free memory; --max-num-seqs 32 would fit"),
        ("llama-3.1-8b", host(17), {}, "in 17.00 GiB of free memory; --no-batch-invariant would fit"),
        ("gemma-3-4b", host(10), {}, "8.48 GiB of weights in bfloat16, and a step"),
        ("llama-3.1-8b", host(60, 64), {"data_parallel_size": 8}, "8 workers take 14.96 GiB of weights in bfloat16 "
         "each, the machine has 64.00 GiB; -dp 1 would fit"),
        ("llama-3.1-8b", host(23), {"kv_cache_memory": "16GiB"}, "; leaving out --kv-cache-memory would fit"),
        # They were to take a smaller model.
        ("llama-3.1-8b", host(17), {"dtype": torch.float32}, "; --dtype bfloat16 and --no-batch-invariant would fit"),
        ("llama-3.1-8b", host(23), {"dtype": torch.float32, "kv_cache_memory": "16GiB"},
         "; --dtype bfloat16 and leaving out --kv-cache-memory would fit"),
        ("llama-3.1-8b", host(19), {"max_num_batched_tokens": 65536},
         "; leaving out --max-num-batched-tokens would fit"),
        ("llama-3.1-8b", host(23), {"max_model_len": 100_000}, "--max-model-len 100000: a row of so many tokens does "
         "not fit: 2.01 GiB of KV cache are left beside 14.96 GiB of weights; --max-model-len 16464 would"),
        ("llama-3.1-8b", host(40), {"max_model_len": 100_000}, "--max-model-len 32768 or --kv-cache-memory 13GiB "
         "would"),
        ("llama-3.1-8b", gpu(24), {"max_model_len": 131_072, "gpus": 8}, "or -tp 2 would"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("fp8_products")
def test_what_does_not_fit_names_what_does(model, memory, options, message):
    """A model of 131 GiB loaded on 23 GiB for 90 seconds, then died of an "unexpected" error of the allocator."""
    with pytest.raises(FlagError) as raised:
        fit(model, memory, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("model", "memory", "options", "changed"),
    [
        ("llama-3.1-8b", host(23), {"dtype": torch.float32}, {"dtype": torch.bfloat16}),
        ("llama-3.3-70b", gpu(80), {}, {"tensor_parallel_size": 2}),
        ("llama-3.3-70b", gpu(24), {}, {"tensor_parallel_size": 8}),
        ("llama-3.1-8b", gpu(16.6), {}, {"gpu_memory_utilization": 0.97}),
        ("qwen3.5-9b", host(26), {}, {"max_num_seqs": 32}),
        ("llama-3.1-8b", host(60, 64), {"data_parallel_size": 8}, {"data_parallel_size": 1}),
        ("llama-3.1-8b", host(23), {"max_model_len": 100_000}, {"max_model_len": 16464}),
        ("llama-3.1-8b", host(40), {"max_model_len": 100_000}, {"kv_cache_memory": "13GiB"}),
    ],
)
def test_the_way_out_is_one(model, memory, options, changed):
    """The flag that a refusal names must not be refused."""
    fit(model, memory, **(options | changed))


def test_free_memory_that_is_wrong():
    """Nothing went against the measured free memory, though pages of files or a process that ends may make room."""
    with pytest.raises(
        FlagError, match=r"if more is free, give --kv-cache-memory, such as 1GiB: then all 32.00 GiB count"
    ):
        fit("llama-3.1-8b", host(10, 32))
    given = fit("llama-3.1-8b", host(10, 32), kv_cache_memory="1GiB")
    assert given.longest == 8192
    assert str(given).endswith(", in 32.00 GiB of memory, 10.00 GiB of it free"), "more than 10 GiB fit"
    with pytest.raises(FlagError) as raised:
        fit("llama-3.1-8b", host(10, 14))
    assert "if more is free" not in str(raised.value), "all of it does not suffice"


def test_the_line_of_a_model_that_fits():
    """Weights, the longest row and the sequences at a time, worked out by hand: 128 KiB of K and V a token."""
    found = fit("llama-3.1-8b", host(23))
    assert str(found) == (
        "fits: 14.96 GiB of weights (bfloat16) and 2.01 GiB of KV cache for a row of up to 16464 tokens "
        "(the model allows 131072), at most 256 rows at once, 1 of that length, in 23.00 GiB of free memory"
    )
    assert found.longest == (23 * GIB - found.wanted.weights("cpu")) // 4 // (16 * 2**17) * 16
    stored = wanted("llama-3.1-8b", "cpu")
    stored = replace(stored, config=msgspec.structs.replace(stored.config, kv_cache_dtype="fp8"))
    # 64 KiB of K and V a token, and 2 KiB of scales.
    assert find_fit(stored, host(23)).longest == (23 * GIB - stored.weights("cpu")) // 4 // (16 * 66 * 2**10) * 16
    assert "2.01 GiB of KV cache (fp8) for a row of up to 31936 tokens" in str(find_fit(stored, host(23)))
    divided = str(fit("llama-3.1-8b", gpu(24), tensor_parallel_size=2, max_num_seqs=7, max_model_len=4096))
    assert divided.startswith("fits: 7.48 GiB of weights (bfloat16) and 1.75 GiB of KV cache for a row of up to 4096 ")
    many = str(fit("llama-3.1-8b", host(23), max_model_len=4096, max_num_seqs=64))
    assert "a row of up to 4096 tokens, at most 64 rows at once, 4 of that length, in" in many
    assert divided.endswith("tokens, at most 7 rows at once, in 24.00 GiB of free GPU memory on each of 2 ranks")


def test_workers_that_have_loaded_do_not_count_twice():
    """A second worker starts beside the first one's weights: it needs its own."""
    assert fit("llama-3.1-8b", host(20, 36), data_parallel_size=2).longest > 0


def test_windows_bound_no_row():
    """Layers with a window give blocks back, so the full ones alone limit a row."""
    found = fit("gemma-3-4b", host(64), max_num_seqs=4)
    assert found.longest == 131072 and found.cache < 4 * GIB


@pytest.mark.parametrize(("model", "copies"), [("gemma-3-4b", 2), ("llama-3.1-8b", 1)])
def test_a_cpu_has_a_tied_projection_twice(model, copies):
    """Rows of the embedding and the projection's layout: Qwen3-0.6B took 1.4 GiB for weights of 1.1."""
    found = wanted(model, "cpu")
    assert found.weights("cpu") - found.weights("cuda") == (copies - 1) * found.head
    assert found.head == found.config.vocab_size * found.config.hidden_size * 2


def test_adapters_that_the_host_has_no_room_for():
    """It was out of memory minutes later, and ended without a word."""
    require_room_for_adapters(10, GIB, 10 * GIB)
    with pytest.raises(FlagError) as error:
        require_room_for_adapters(11, GIB, 10 * GIB)
    assert str(error.value) == (
        "--lora: 11 adapters take 11.00 GiB of the host's memory, 10.00 GiB is free: give each run 10 adapters at most"
    )


def test_adapters_at_a_time():
    """All were counted, and what fits was refused; the line says how many are there."""
    few = replace(wanted("llama-3.1-8b", "cuda"), adapter_bytes=2 * GIB, adapters=50, adapter_slots=2)
    assert str(find_fit(few, gpu(80))).startswith(
        "fits: 16.96 GiB of weights (bfloat16) with 2 of 50 adapters at a time and "
    )
    every = replace(few, adapter_slots=50, adapter_bytes=50 * GIB)
    assert "at a time" not in str(find_fit(every, gpu(141)))
