"""What is said before anything is loaded."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import FlagError
from rosebatch.engine.cache.memory import DeviceMemory
from rosebatch.launch import plan
from rosebatch.model.quantization.chosen import PLAIN, choose_quantization
from rosebatch_kernels.common.device import Device
from tests.helpers.hub_cache import add_snapshot, without_network
from tests.helpers.small_llama import save_llama, save_tokenizer


@pytest.fixture
def source():
    """A model that nobody loads."""
    return SimpleNamespace(
        folder=None,
        config=SimpleNamespace(num_state_layers=0, experts=None, bidirectional=False),
        quantization=PLAIN,
        dtype=torch.bfloat16,
        keep_state=lambda: None,
        head=None,
    )


@pytest.fixture
def on_cuda(monkeypatch, source):
    """Plans for a GPU, wherever the test runs, and finds that model."""
    plan.warn_once.cache_clear()
    monkeypatch.setattr(plan, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(plan, "find_model", lambda *args, **options: source)
    yield plan.plan_launch
    plan.warn_once.cache_clear()


def test_one_line_about_a_switch_without_effect(on_cuda, capsys):
    """``--no-batched-sampling`` beside the fused sampler ran the same code in silence. Two engines need one line."""
    for _ in range(2):
        assert on_cuda(RunConfig.of("any", batched_sampling=False)).switches.batched_sampling is False
    line = "rosebatch: warning: --no-batched-sampling has no effect while --fused-sampler is on\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("model", "load_format", "sight", "told"),
    [
        (None, "auto", "x", "no --model was given, and the demo model is one of text"),
        ("a.gguf", "auto", "x", "a GGUF file has its text part alone: give the folder of the model"),
        ("a.gguf", "dummy", "x", "x"),
        ("folder", "auto", "x", "x"),
    ],
)
def test_why_a_model_takes_no_images(on_cuda, source, model, load_format, sight, told):
    """Rows with images, and jobs of them, are told what to change: the demo model and GGUF files are of text."""
    source.sight, source.load_format = sight, load_format
    found = on_cuda(RunConfig(model=model, load_format=load_format, limit_images=0))
    assert (found.sight, found.no_images) == (told, f"the model takes no images: {told}")


def test_nothing_is_said_of_switches_that_act(on_cuda, capsys):
    on_cuda(RunConfig.of("any", batched_sampling=False, fused_sampler=False, prefix_cache=True))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        (89, "this GPU is sm_89: kernel sizes are smaller ones that fit its shared memory; they were measured"),
        (100, "this GPU is sm_100: kernel sizes are an H100's; they were measured"),
        (90, ""),
    ],
)
def test_one_line_about_a_gpu_whose_sizes_were_not_measured(on_cuda, capsys, monkeypatch, arch, said):
    """A user who sees no speed must know that nobody has tuned the kernels for this card."""
    monkeypatch.setattr("rosebatch.ops.device.device_of", lambda device: Device.of_arch(arch, 100))
    for _ in range(2):
        on_cuda(RunConfig.of("any"))
    _, err = capsys.readouterr()
    assert err == (f"rosebatch: warning: {said} on an H100 only\n" if said else "")


@pytest.mark.parametrize(("arch", "served"), [(86, False), (89, True), (90, True)])
def test_a_gpu_without_e4m3(on_cuda, monkeypatch, arch, served):
    """Triton refuses the type there, in the middle of a run; PyTorch's operators do not."""
    monkeypatch.setattr("rosebatch.ops.device.device_of", lambda device: Device.of_arch(arch, 100))
    on_cuda(RunConfig.of("any", kv_cache_dtype="fp8", paged_attention=False))
    if served:
        on_cuda(RunConfig.of("any", kv_cache_dtype="fp8"))
        return
    with pytest.raises(FlagError, match=r"^--kv-cache-dtype fp8: its kernels need a GPU of Ada"):
        on_cuda(RunConfig.of("any", kv_cache_dtype="fp8"))


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (PLAIN, "the model's weights are not quantized"),
        (choose_quantization("none", {"quant_method": "fp8"}), "--quantization none decodes all weights"),
        (choose_quantization("auto", {"quant_method": "bitsandbytes"}), "bitsandbytes is decoded to bfloat16 here"),
        (choose_quantization("auto", {"quant_method": "mxfp4"}), "mxfp4 fp4, groups of 32 is decoded to bfloat16 here"),
        (choose_quantization("fp8", None), ""),
    ],
)
def test_a_switch_that_changes_nothing_for_the_model(source, on_cuda, monkeypatch, capsys, quantization, said):
    """A user who sees no speed must know that nothing was switched on. mxfp4 is of experts, and the model has none."""
    monkeypatch.setattr("rosebatch.ops.select.device_of", lambda device: Device.of_arch(90, 100))
    source.quantization = quantization
    on_cuda(RunConfig.of("any", quantized_linear=True))
    line = f"rosebatch: warning: --quantized-linear has no effect: {said}\n" if said else ""
    assert capsys.readouterr().err == line


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A small model that is on the Hub only. Gives the patterns of each download."""
    folder, downloads = tmp_path / "model", []
    folder.mkdir()
    save_llama(folder)
    save_tokenizer(folder)
    cache = without_network(monkeypatch, tmp_path / "cache")

    def snapshot_download(name, *, allow_patterns, **options):
        downloads.append(allow_patterns)
        files = {path.name: path.read_bytes() for path in folder.iterdir() if any(map(path.match, allow_patterns))}
        return str(add_snapshot(cache, files, commit=f"{len(downloads):040}"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return downloads


def test_weights_are_downloaded_once_the_model_fits(repository):
    """What is loaded is of the commit that the weights came with."""
    found = plan.plan_fitting(RunConfig(model="org/name", device="cpu"))
    assert ["*.safetensors" in patterns for patterns in repository] == [False, True]
    assert (found.source.folder.name, found.fit.longest) == (f"{2:040}", 256)
    assert all(map(Path.exists, found.source._files()))


def test_check_downloads_no_weights(repository):
    """``check`` fetched all of a model of any size, to count the tokens of some rows."""
    found = plan.plan_fitting(RunConfig(model="org/name", device="cpu"), weights=False)
    assert ["*.safetensors" in patterns for patterns in repository] == [False]
    assert found.fit.wanted.weights("cpu") > 0 and not list(found.source.folder.glob("*.safetensors"))


def test_a_model_that_does_not_fit_is_not_downloaded(repository, monkeypatch):
    """The refusal must come before 131 GiB do."""
    monkeypatch.setattr(plan, "memory_of", lambda device: DeviceMemory("cpu", 1000, 1000))
    with pytest.raises(FlagError, match=r"org/name does not fit: 0\.1 MiB of weights in float32, in 0\.0 MiB of free"):
        plan.plan_fitting(RunConfig(model="org/name", device="cpu"))
    assert ["*.safetensors" in patterns for patterns in repository] == [False]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({}, None),
        ({"device": "cpu", "dtype": torch.float32}, None),
        ({"device": "cpu", "dtype": torch.float16}, "float16 on this CPU"),
        ({"device": "cpu", "dtype": torch.float32, "model_impl": "transformers"}, "transformers' code of the model"),
        ({"dtype": torch.float16}, None),
        ({"batch_invariant": False}, "--no-batch-invariant"),
        ({"paged_attention": False}, "--no-paged-attention"),
        ({"model_impl": "transformers"}, "transformers' code of the model"),
        ({"max_num_batched_tokens": 63}, "--max-num-batched-tokens 63, below 64"),
        ({"max_num_batched_tokens": 64}, None),
        ({"max_num_batched_tokens": 63, "device": "cpu", "dtype": torch.float32}, None),
    ],
)
def test_what_lets_a_row_depend_on_its_batch(change, cause):
    """A report that promises the same bytes after a break must know what nobody has made independent.

    On a CPU it promised them for fp16, whose products are PyTorch's own, and for transformers' code of a model; on a
    GPU for chunks that end within a block, where no cached prefix does.
    """
    device = change.get("device", "cuda")
    switches = {name: change.get(name, True) for name in ("batch_invariant", "paged_attention")}
    switches |= {"paged_attention": None} if device == "cpu" else {}
    source = SimpleNamespace(
        model_impl=change.get("model_impl", "rosebatch"),
        dtype=change.get("dtype", torch.bfloat16),
    )
    resolved = Switches.resolve(switches, device)
    config = RunConfig(max_num_batched_tokens=change.get("max_num_batched_tokens"))
    assert plan.LaunchPlan(config, torch.device(device), resolved, source, None, 0.0).dependence == cause


def test_one_line_where_the_batch_matters_all_the_same(on_cuda, source, capsys):
    """Who asks for equal bytes must know that a model does not have them."""
    source.model_impl = "transformers"
    on_cuda(RunConfig.of("any", batch_invariant=True))
    expected = "--batch-invariant: with transformers' code of the model, results may still depend"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "lines"), [({}, 0), ({"batch_invariant": True}, 1)])
def test_who_did_not_ask_for_equal_bytes_is_told_nothing(on_cuda, source, capsys, monkeypatch, asked, lines):
    """The switch is on by default on a CPU: each run with transformers' code would begin with a warning."""
    monkeypatch.setattr(plan, "pick_device", lambda name: torch.device("cpu"))
    source.model_impl = "transformers"
    on_cuda(RunConfig.of("any", **asked))
    assert capsys.readouterr().err.count("may still depend on the batch") == lines
